let data = JSON.parse(find("#data").textContent);
const choice = (name) => find(`[data-choice=${name}]`);
const counted = (x) => x.toLocaleString("en");
const finite = (y) => typeof y === "number"; // what is not comes as the word for it
const told = (y) => finite(y) ? brief(y) : y === "nan" ? "no number: entries are not finite" : y === "inf" ? "infinite" : "−infinite";
const ROWS_AT_ONCE = 100; // of the table: a thousand take a phone a second

// Series: pairs of step and value, from the lists of steps that many share

const pairs = ([place, values]) => values.map((y, k) => [data.steps[place][k], y]);
const ends = (values) => values.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);

const curve = (matrix, quantity, more = {}) => {
  const own = matrix.series;
  const band = quantity === "condition_number" && own.condition_number_low && own.condition_number_high
    ? [pairs(own.condition_number_low), pairs(own.condition_number_high)] : null;
  return { label: data.labels[quantity], quantity: data.labels[quantity], points: pairs(own[quantity]), band, ...more };
};

// A chart over steps: curves with gaps, their bands, alerts on the axis of time, and where the run was cut

const span = () => {
  const logged = Object.values(data.logs).flatMap(([place]) => [data.steps[place][0], data.steps[place].at(-1)]);
  const read = data.matrices.flatMap(({ series }) => Object.values(series).flatMap(([place]) => [data.steps[place][0], data.steps[place].at(-1)]));
  return ends([...logged, ...read, data.step]);
};

// The logarithm is shown where nothing is negative and most is positive; of shares the whole from zero.
const scale = (curves) => {
  const values = curves.flatMap(({ points }) => points.map(([, y]) => y).filter(finite));
  const above = values.filter((y) => y > 0);
  const logarithmic = 2 * above.length > values.length && values.every((y) => y >= 0) && !curves.some(({ linear }) => linear);
  const [low, high] = ends(logarithmic ? above : values);
  const narrow = low > high / 2; // zero is far below, and would press the curve flat
  const range = logarithmic || narrow ? [low, high] : [Math.min(0, low), Math.max(0, high) || (low < 0 ? 0 : 1)];
  return { logarithmic, range, empty: !values.length };
};

const frame = (home, high) => {
  const wide = Math.max(240, Math.round(home.clientWidth));
  return { wide, high, left: 58, right: 26, top: 26, bottom: 40 };
};

// Steps along the width, with as many ticks as have room for their numbers.
const time = ({ left, right, wide }) => {
  const across = axis(span(), left, wide - right, false);
  return { ...across, ticks: steps(across.low, across.high, Math.max(2, Math.floor((wide - left - right) / 75))) };
};

const trace = (points, across, up, logarithmic) => {
  let d = "", open = false;
  for (const [x, y] of points) {
    const drawn = finite(y) && !(logarithmic && y <= 0);
    if (drawn) d += `${open ? "L" : "M"}${across.at(x).toFixed(1)} ${up.at(y).toFixed(1)}${open ? "" : "h0"}`;
    open = drawn;
  }
  return d;
};

// A band is cut off at the frame: an interval may end at infinity.
const area = ([lows, highs], across, up) => {
  const inside = (y) => up.at(Math.min(Math.max(y === "inf" ? up.high : y, up.low), up.high)).toFixed(1);
  const stretches = [[]];
  lows.forEach(([x, low], k) => {
    const high = highs[k]?.[1];
    if (finite(low) && (finite(high) || high === "inf")) stretches.at(-1).push([across.at(x).toFixed(1), inside(low), inside(high)]);
    else stretches.push([]);
  });
  return stretches.filter((those) => those.length).map((those) =>
    `M${those.map(([x, y]) => `${x} ${y}`).join("L")}L${those.toReversed().map(([x, , y]) => `${x} ${y}`).join("L")}Z`).join("");
};

const marks = (picture, alerts, across, { high, top, bottom }) => {
  const floor = high - bottom;
  for (const [step, why] of data.cuts) {
    const x = across.at(step);
    picture.append(make("line", { class: "cut", x1: x, x2: x, y1: top, y2: floor }, make("title", {}, why)));
  }
  for (const step of new Set(alerts.map(([step]) => step))) {
    const x = across.at(step);
    picture.append(make("line", { class: "alerted", x1: x, x2: x, y1: top, y2: floor }),
      make("path", { class: "alert", d: `M${x} ${floor - 10}l5 9h-10Z` }));
  }
};

const chart = (home, title, curves, { high = 260, up: shared, alerts = [], pick, note = "", keys = [] } = {}) => {
  const { logarithmic, range, empty } = shared ?? scale(curves);
  const size = frame(home, high);
  if (empty) return home.append(make("p", { class: "absent" }, `${title}: not one finite number was read.`));
  const across = time(size);
  const up = axis(range, high - size.bottom, size.top, logarithmic);
  const picture = box(title, across, up, "step", size);
  picture.setAttribute("tabindex", 0);
  marks(picture, alerts, across, size);
  const drawn = curves.map((each) => {
    const group = make("g", { class: each.kind ?? "" });
    if (each.share !== undefined) group.style.setProperty("--share", `${Math.round(100 * each.share)}%`);
    if (each.band) group.append(make("path", { class: "band", d: area(each.band, across, up) }));
    group.append(make("path", { class: "curve", d: trace(each.points, across, up, logarithmic) }));
    for (const [x, y] of each.points) {
      if (!finite(y)) group.append(make("text", { class: "gap", x: across.at(x), y: high - size.bottom - 3, "text-anchor": "middle" }, "×"));
    }
    picture.append(group);
    return group;
  });
  const gaps = curves.some(({ points }) => points.some(([, y]) => !finite(y)));
  const shown = figure(picture, gaps ? [...keys, ["not finite", "gap-key"]] : keys, note);
  home.append(shown);
  follow(picture, curves, drawn, across, up, find("output", shown), { logarithmic, alerts, pick, floor: high - size.bottom });
};

// Numbers under the pointer, and under the arrows of the keyboard: along a curve, or to the next one

const follow = (picture, curves, drawn, across, up, output, { logarithmic, alerts, pick, floor }) => {
  const dot = make("circle", { class: "dot", r: 4, visibility: "hidden" });
  const first = output.textContent;
  let at = null;
  const height = (y) => finite(y) && !(logarithmic && y <= 0) ? up.at(y) : floor;
  const show = (k, j) => {
    at = [k, j];
    const each = curves[k], [x, y] = each.points[j];
    drawn.forEach((group, i) => group.classList.toggle("chosen", i === k));
    drawn[k].append(dot);
    for (const [key, place] of Object.entries({ cx: across.at(x), cy: height(y), visibility: "visible" })) dot.setAttribute(key, place);
    const interval = each.band && finite(y) ? ` [${[0, 1].map((end) => { const z = each.band[end][j]?.[1]; return z === "inf" ? "∞" : told(z ?? y); }).join(", ")}]` : "";
    const near = alerts.filter(([step]) => Math.abs(across.at(step) - across.at(x)) < 6).map(([step, , , text]) => ` · alert at step ${counted(step)}: ${text}`);
    const name = each.label === each.quantity ? "" : `${each.label}, `;
    output.textContent = `${name}step ${counted(x)}: ${each.quantity} ${told(y)}${interval}${near.join("")}`;
  };
  const hide = () => {
    at = null;
    drawn.forEach((group) => group.classList.remove("chosen"));
    dot.setAttribute("visibility", "hidden");
    output.textContent = first;
  };
  picture.addEventListener("pointermove", (event) => {
    const place = picture.getBoundingClientRect(), zoom = picture.viewBox.baseVal.width / place.width;
    const px = (event.clientX - place.left) * zoom, py = (event.clientY - place.top) * zoom;
    let best = Infinity, found = null;
    curves.forEach(({ points }, k) => points.forEach(([x, y], j) => {
      const distance = Math.abs(across.at(x) - px) * 3 + Math.abs(height(y) - py);
      if (distance < best) [best, found] = [distance, [k, j]];
    }));
    if (found) show(...found);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const [along, over] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (event.key === "Enter" && at && pick) return pick(curves[at[0]]);
    if (along === undefined) return undefined;
    event.preventDefault();
    const [k, j] = at ?? [0, along < 0 ? curves[0].points.length : -1];
    const next = (k + over + curves.length) % curves.length, points = curves[next].points;
    const step = curves[k].points[Math.max(0, Math.min(j, curves[k].points.length - 1))][0];
    const same = over ? points.findIndex(([x]) => x >= step) : j + along;
    return show(next, Math.max(0, Math.min(same < 0 ? points.length - 1 : same, points.length - 1)));
  });
  if (pick) picture.addEventListener("click", () => at && pick(curves[at[0]]));
};

// What was logged, with all alerts

const logs = () => {
  const home = find("#logs .charts"), name = choice("log").value;
  home.replaceChildren();
  choice("log").closest(".controls").hidden = Object.keys(data.logs).length < 2;
  if (data.logs[name]) {
    const points = pairs(data.logs[name]);
    chart(home, name, [{ label: name, quantity: name, points, linear: true }], { high: 240, alerts: data.alerts, keys: signs(data.alerts) });
  } else if (data.alerts.length || data.cuts.length) chart(home, "Alerts", [{ label: "", quantity: "", points: [[data.step, 0]] }], { high: 110, alerts: data.alerts, keys: signs(data.alerts) });
};

const signs = (alerts) => [...(alerts.length ? [["alert", "alert-key"]] : []), ...(data.cuts.length ? [["taken up again", "cut-key"]] : [])];

// Kinds of matrices, side by side with the same axes

const depths = () => ends(data.matrices.map(({ depth }) => depth).filter((depth) => depth !== null));

const kinds = () => {
  const home = find("#kinds .charts"), quantity = choice("quantity").value, [first, last] = depths();
  const groups = new Map();
  for (const place of inModel()) {
    const matrix = data.matrices[place];
    if (!matrix.series[quantity]) continue;
    const share = matrix.depth === null ? undefined : (matrix.depth - first) / Math.max(1, last - first);
    const label = matrix.depth === null ? matrix.name : `layer ${matrix.depth}, ${matrix.name}`;
    const own = curve(matrix, quantity, { label, share, place, kind: share === undefined ? "plain" : "deep", linear: quantity.startsWith("swallowed") });
    groups.set(matrix.kind, [...(groups.get(matrix.kind) ?? []), own]);
  }
  const up = scale([...groups.values()].flat());
  home.replaceChildren(...[...groups.keys()].map(() => make("div")));
  [...groups].forEach(([kind, curves], k) => {
    home.children[k].style.setProperty("--each", Math.min(0.18, 0.6 / curves.length)); // bands lie on one another
    home.children[k].classList.toggle("crowded", curves.length > 16);
    const places = new Set(curves.map(({ place }) => place));
    chart(home.children[k], `${kind} (${curves.length})`, curves, { high: 210, up, alerts: data.alerts.filter(([, , those]) => those.some((place) => places.has(place))), pick: ({ place }) => open(place) });
  });
  if (!groups.size) home.append(make("p", { class: "absent" }, "No matrix was read yet."));
  find("#kinds .ramp").hidden = !(last > first);
};

const inModel = () => data.order;

// One matrix

const open = (place) => {
  choice("matrix").value = place;
  one();
  signal();
  find("#matrix").scrollIntoView();
};

const one = () => {
  const place = Number(choice("matrix").value), matrix = data.matrices[place];
  const home = find("#matrix > .charts");
  home.replaceChildren();
  if (!matrix) return;
  const alerts = data.alerts.filter((alert) => alert[2].includes(place));
  find("#matrix h3").replaceChildren(make("bdi", {}, matrix.name));
  find("#matrix .facts").textContent = [matrix.kind, matrix.depth === null ? "" : `layer ${matrix.depth}`, matrix.shape, matrix.dtype,
    matrix.kappa === "–" ? "" : `κ ${matrix.kappa}`, matrix.swallowed === "–" ? "" : `swallowed ${matrix.swallowed}`].filter(Boolean).join(" · ");
  find("#matrix .own").replaceChildren(...alerts.map(([step, name, , text]) => telling([step, name, [], text])));
  const charts = data.charts.map((each) => ({ ...each, own: each.quantities.filter((quantity) => matrix.series[quantity]) })).filter(({ own }) => own.length);
  home.append(...charts.map(() => make("div"))); // all of them, for the width of each
  charts.forEach(({ title, note, own }, place) => {
    const linear = own.some((quantity) => /share|swallowed|alignment/.test(quantity));
    const curves = own.map((quantity, k) => curve(matrix, quantity, { kind: own.length > 1 ? tint(k) : "", linear }));
    chart(home.children[place], title, curves, { alerts, note, keys: own.length > 1 ? own.map((quantity, k) => [data.labels[quantity], tint(k)]) : [] });
  });
  if (!matrix.detailed) home.append(make("p", { class: "absent" }, "The other numbers of this matrix make room for matrices that need more attention; the record has them all."));
  for (const button of all("[data-turn]")) button.disabled = !data.matrices[place + Number(button.dataset.turn)];
};

const telling = ([step, name, [place], text]) => make("li", {}, make("span", { class: "badge" }, name.replaceAll("-", " ")), " ",
  make("span", { class: "when" }, `step ${counted(step)}`), ` ${text}`,
  ...(place !== undefined ? [" ", make("button", { type: "button", class: "link", "data-open": place }, "show")] : []));

// A heat map of the entries of a vector: index across the height, steps along the width

const LEVELS = 6; // decades below the largest, each paler than the one before
const level = (y, most) => finite(y) && y !== 0 ? Math.max(0, LEVELS - Math.floor(Math.log10(most / Math.abs(y)) + 1e-9)) : 0;
const which = (index) => index === 0 ? "largest" : index === 1 ? "smallest" : `at ${brief(100 * index)} %`;

const signal = () => {
  const home = find("#signal .charts"), matrix = data.matrices[Number(choice("matrix").value)], quantity = choice("vector").value;
  home.replaceChildren();
  find("#signal").hidden = !data.vectors.length;
  find("#signal .subject").textContent = matrix?.name ?? "";
  const lines = (matrix?.vectors[quantity] ?? []).map(([index, place, values]) => [index, pairs([place, values])]);
  if (!lines.length) return home.append(make("p", { class: "absent" }, matrix?.detailed === false
    ? "Kept for matrices that need more attention only, so that the page stays small; the record has it." : "Not read for this matrix."));
  const rowHigh = Math.max(6, Math.min(26, 400 / lines.length)), every = Math.ceil(15 / rowHigh); // rows with a label
  const size = { ...frame(home, 66 + rowHigh * lines.length), left: 76 };
  const across = time(size);
  const picture = box(`${data.labels[quantity]}, by singular index`, across, { ticks: [], at: (y) => y }, "step", size);
  picture.setAttribute("tabindex", 0);
  const most = Math.max(...lines.flatMap(([, points]) => points.map(([, y]) => finite(y) ? Math.abs(y) : 0)));
  const cells = new Map(); // one path for each colour
  lines.forEach(([index, points], k) => {
    const top = size.top + k * rowHigh;
    points.forEach(([x, y], j) => {
      const left = across.at(x), right = j + 1 < points.length ? across.at(points[j + 1][0]) : size.wide - size.right;
      const kind = finite(y) ? `${y < 0 ? "below" : "above"}-${level(y, most)}` : "unknown";
      cells.set(kind, `${cells.get(kind) ?? ""}M${left.toFixed(1)} ${top.toFixed(1)}H${Math.max(right, left + 1).toFixed(1)}v${(rowHigh * 0.95).toFixed(1)}H${left.toFixed(1)}Z`);
    });
    const labelled = k === 0 || k === lines.length - 1 || (k % every === 0 && lines.length - 1 - k >= every);
    if (labelled) picture.append(make("text", { x: size.left - 6, y: top + rowHigh / 2 + 4, "text-anchor": "end" }, which(index)));
  });
  for (const [kind, d] of cells) picture.append(make("path", { class: `cell ${kind}`, d }));
  marks(picture, data.alerts.filter(([, , those]) => those.some((place) => data.matrices[place] === matrix)), across, size);
  const signed = lines.some(([, points]) => points.some(([, y]) => y < 0));
  const keys = Array.from({ length: 4 }, (_, k) => [`${k ? `÷ ${power(k)}` : brief(most)}`, `swatch above-${LEVELS - k}`]);
  const asks = /^signal/.test(quantity); // of the step down the gradient, which goes the other way
  if (signed) keys.push([asks ? "positive: descent lowers σ" : "positive", "swatch above-5"], [asks ? "negative: descent raises σ" : "negative", "swatch below-5"]);
  if (cells.has("unknown")) keys.push(["not finite", "swatch unknown"]);
  const shown = figure(picture, keys, "Each shade is a decade; point at a cell, or use the arrows, to read it.");
  home.append(shown);
  return readCells(picture, lines, across, size, rowHigh, find("output", shown), data.labels[quantity]);
};

const readCells = (picture, lines, across, size, rowHigh, output, quantity) => {
  const mark = make("rect", { class: "picked", visibility: "hidden", height: rowHigh });
  picture.append(mark);
  let at = [0, -1];
  const show = (k, j) => {
    k = Math.max(0, Math.min(k, lines.length - 1));
    const [index, points] = lines[k];
    j = Math.max(0, Math.min(j, points.length - 1));
    at = [k, j];
    const left = across.at(points[j][0]), right = j + 1 < points.length ? across.at(points[j + 1][0]) : size.wide - size.right;
    for (const [key, place] of Object.entries({ x: left, y: size.top + k * rowHigh, width: Math.max(2, right - left), visibility: "visible" })) mark.setAttribute(key, place);
    output.textContent = `Singular value ${which(index)}, step ${counted(points[j][0])}: ${quantity} ${told(points[j][1])}`;
  };
  const until = (points, step) => Math.max(0, points.findLastIndex(([x]) => x <= step));
  picture.addEventListener("pointermove", (event) => {
    const place = picture.getBoundingClientRect(), zoom = picture.viewBox.baseVal.width / place.width;
    const k = Math.floor(((event.clientY - place.top) * zoom - size.top) / rowHigh);
    if (!lines[k]) return;
    const px = (event.clientX - place.left) * zoom;
    show(k, Math.max(0, lines[k][1].findLastIndex(([x]) => across.at(x) <= px)));
  });
  picture.addEventListener("keydown", (event) => {
    const [along, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (along === undefined) return;
    event.preventDefault();
    const [k, j] = at, row = Math.max(0, Math.min(k + down, lines.length - 1));
    show(row, down ? until(lines[row][1], lines[k][1][Math.max(0, j)][0]) : j + along);
  });
};

// The table of all matrices

const table = find("#matrices table");
let limit = ROWS_AT_ONCE;

const spark = (matrix) => {
  const points = matrix.series.condition_number ? pairs(matrix.series.condition_number).filter(([, y]) => finite(y) && y > 0) : [];
  if (points.length < 2) return make("td", { "data-label": "κ over time", class: "none" }, "–");
  const across = axis(span(), 1, 119, false), up = axis(ends(points.map(([, y]) => y)), 23, 3, true);
  const picture = make("svg", { viewBox: "0 0 120 26", class: "spark", "aria-hidden": "true" });
  picture.append(make("path", { class: "curve", d: trace(points, across, up, true) }));
  return make("td", { "data-label": "κ over time" }, picture);
};

const amount = (label, number, text) => make("td", { class: text && text !== "–" ? "number" : "number none", "data-label": label, "data-value": finite(number) ? number : "" }, text);
const latest = (matrix, quantity) => matrix.series[quantity]?.[1].at(-1);

const lines = () => {
  table.tBodies[0].replaceChildren(...data.matrices.map((matrix, place) => {
    const kappa = latest(matrix, "condition_number"), first = matrix.series.condition_number?.[1][0];
    const grown = finite(kappa) && finite(first) && first > 0 ? kappa / first : undefined;
    const update = latest(matrix, "update_size"), many = data.alerts.filter((alert) => alert[2].includes(place)).length;
    return make("tr", {},
      make("td", { "data-label": "Name" }, make("button", { type: "button", class: "link", "data-open": place }, make("bdi", {}, matrix.name))),
      make("td", { "data-label": "Shape" }, matrix.shape || "–"),
      amount("κ", kappa, matrix.kappa), spark(matrix),
      amount("κ, last / first", grown, grown === undefined ? "–" : `× ${brief(grown)}`),
      amount("Update / weight", update, update === undefined ? "–" : told(update)),
      amount("Swallowed", latest(matrix, "swallowed"), matrix.swallowed),
      amount("Alerts", many, many ? String(many) : ""));
  }));
  table.original = undefined; // the order of attention
  const sorted = find("[aria-sort]", table);
  if (sorted) sort(table, sorted.cellIndex, sorted.getAttribute("aria-sort"));
  lay();
};

const lay = () => {
  const text = choice("text").value.trim().toLowerCase();
  let found = 0;
  for (const row of table.tBodies[0].rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(text) || ++found > limit;
  find("#matrices output").textContent = `${found} of ${data.matrices.length}`;
  find(".more").hidden = found <= limit;
};

// Menus keep what was chosen when a run that is followed goes on

const menu = (name, options) => {
  const select = choice(name), before = select.value;
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  if (options.some(([value]) => String(value) === before)) select.value = before;
};

const tell = () => {
  find(".opening").textContent = data.extent;
  find(".verdict").replaceChildren(...data.verdict.map((sentence) => make("p", {}, sentence)));
  find("ol.alerts").replaceChildren(...data.alerts.map(telling));
  if (data.alerts.length) find("#alerts .absent")?.remove();
};

const draw = () => { logs(); kinds(); one(); signal(); };

const show = () => {
  tell();
  menu("log", [data.loss, ...Object.keys(data.logs).filter((name) => name !== data.loss)].filter((name) => name in data.logs).map((name) => [name, name]));
  menu("quantity", data.overview.map((name) => [name, data.labels[name]]));
  menu("matrix", data.matrices.map(({ name }, place) => [place, name]));
  menu("vector", data.vectors.map((name) => [name, data.labels[name]]));
  draw();
  lines();
};

choice("log").addEventListener("change", logs);
choice("quantity").addEventListener("change", kinds);
choice("matrix").addEventListener("change", () => { one(); signal(); });
choice("vector").addEventListener("change", signal);
choice("text").addEventListener("input", () => { limit = ROWS_AT_ONCE; lay(); });
for (const button of all("[data-turn]")) button.addEventListener("click", () => {
  choice("matrix").value = Number(choice("matrix").value) + Number(button.dataset.turn);
  one();
  signal();
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-open]");
  if (button) open(Number(button.dataset.open));
});
find(".more button").addEventListener("click", () => { limit += 10 * ROWS_AT_ONCE; lay(); });
table.addEventListener("sorted", lay);
addEventListener("beforeprint", () => { limit = Infinity; lay(); }); // paper has no button for more
addEventListener("afterprint", () => { limit = ROWS_AT_ONCE; lay(); });
offer(find("[data-sort]"), table);
show();

let wide = document.body.clientWidth;
addEventListener("resize", () => {
  if (wide === document.body.clientWidth) return;
  wide = document.body.clientWidth;
  draw();
});

// A page that follows its run asks for the document again

const seconds = Number(document.body.dataset.poll ?? 0) / 1000;
let last = "";
const ask = async () => {
  const live = find(".live");
  try {
    const text = await (await fetch("run.json", { cache: "no-cache" })).text();
    if (text !== last) {
      [last, data] = [text, JSON.parse(text)];
      show();
    }
    live.textContent = data.closed ? "closed" : "following";
  } catch { live.textContent = "no answer: kappascope watch has ended"; }
  setTimeout(ask, 1000 * seconds);
};
if (seconds) setTimeout(ask, 1000 * seconds);
