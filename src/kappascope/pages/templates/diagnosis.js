const data = JSON.parse(document.getElementById("data").textContent);
const zip = (xs, ys, factor = 1) => xs.map((x, k) => [x + (xs[0] === 0), ys[k] * factor]);

const capital = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

const spectrum = (plot) => {
  const points = plot.spectrum ? zip(data.shelf[plot.spectrum[0]], plot.spectrum[1]) : [];
  const chance = plot.null ? zip(data.shelf[plot.null[0]], data.shelf[plot.null[1]], plot.null[2]) : [];
  const seen = positive(points), random = positive(chance);
  if (!seen.length) return null;
  const least = Math.min(...[...seen, ...random].map(([, y]) => y));
  const floor = plot.floor > least / 100 ? [plot.floor] : []; // far below it would press the curves flat
  const across = axis([...seen, ...random].map(([x]) => x), LEFT, WIDE - RIGHT, true);
  const up = axis([...[...seen, ...random].map(([, y]) => y), ...floor], HIGH - BOTTOM, TOP, true);
  const picture = box("Singular values", across, up, "index, from the largest");
  if (floor.length) {
    const y = up.at(floor[0]);
    picture.append(
      make("rect", { class: "below", x: LEFT, y, width: WIDE - RIGHT - LEFT, height: Math.max(0, HIGH - BOTTOM - y) }),
      make("line", { class: "floor", x1: LEFT, x2: WIDE - RIGHT, y1: y, y2: y }));
  }
  if (random.length) picture.append(line(random, across, up, "curve null"));
  picture.append(line(seen, across, up, "curve"));
  if (seen.length === 1) picture.append(make("circle", { class: "dot", cx: across.at(seen[0][0]), cy: up.at(seen[0][1]), r: 4 }));
  const zeros = points.length - seen.length;
  const keys = [["this matrix", ""]];
  if (random.length) keys.push(["a random matrix", "null"]);
  if (floor.length) keys.push([`below ${brief(floor[0])} the dtype resolves nothing`, "floor"]);
  else if (plot.floor > 0) keys.push([`resolved down to ${brief(plot.floor)}, far below`, "plain"]);
  const shown = figure(picture, keys, zeros ? `${zeros} of these values are zero and not drawn.` : "");
  follow(picture, seen, across, find("output", shown));
  return shown;
};

const follow = (picture, points, across, told) => {
  const dot = make("circle", { class: "dot", r: 4, visibility: "hidden" });
  picture.append(dot);
  const curve = find(".curve:not(.null)", picture).getAttribute("d").slice(1).split("L");
  picture.addEventListener("pointermove", (event) => {
    const place = picture.getBoundingClientRect();
    const x = (event.clientX - place.left) * WIDE / place.width;
    const distance = points.map(([index]) => Math.abs(across.at(index) - x));
    const nearest = distance.indexOf(Math.min(...distance));
    const [cx, cy] = curve[nearest].split(" ");
    for (const [key, value] of Object.entries({ cx, cy, visibility: "visible" })) dot.setAttribute(key, value);
    told.textContent = `Number ${points[nearest][0]}: σ = ${brief(points[nearest][1])}`;
  });
};

const histogram = ([low, high, counts], side) => {
  if (!counts.length || low === null) return null;
  const edges = Array.from({ length: counts.length + 1 }, (_, k) => low + (high - low) * k / counts.length);
  const across = axis(edges, LEFT, WIDE - RIGHT, false), up = axis([0, 1.06 * Math.max(...counts)], HIGH - BOTTOM, TOP, false);
  const picture = box(`${capital(side)} norms`, across, up, `norm of a ${side}`);
  counts.forEach((count, k) => {
    const x = across.at(edges[k]), y = up.at(count);
    picture.append(make("rect", {
      class: "bar-of", x: x + 0.5, y, width: Math.max(1, across.at(edges[k + 1]) - x - 1), height: HIGH - BOTTOM - y,
    }));
  });
  const total = counts.reduce((a, b) => a + b, 0);
  return figure(picture, [], `${total} ${side}s, norms from ${brief(low)} to ${brief(high)}`);
};

// One matrix, opened on demand

const dialog = find("#matrix");
const table = find(".vitals");
const rows = all("tr[data-place]", table);
let current = null;

const wide = (text) => text.length > 34;
const snippet = (text) => copyable(make("pre", {}, make("code", {}, text)));

const told = (finding) => {
  const [severity, rule, evidence, advice, code] = finding.map((place) => data.shelf[place]);
  return make("article", { class: "rule", "data-severity": severity },
    make("h3", {}, make("span", { class: "badge", "data-severity": severity }, severity), " ", capital(rule.replaceAll("-", " "))),
    make("p", {}, capital(evidence)), make("p", { class: "advice" }, advice), ...(code ? [snippet(code)] : []));
};

const order = () => [...table.tBodies[0].rows].filter((row) => chosen.has(row)).map((row) => Number(row.dataset.place));

const open = (place) => {
  const matrix = data.matrices[place], plot = matrix.plot;
  current = place;
  find("h2", dialog).replaceChildren(make("bdi", {}, matrix.name));
  const drawn = plot ? [spectrum(plot), histogram(plot.bars[0], "row"), histogram(plot.bars[1], "column")].filter(Boolean) : [];
  const why = rows.length > data.plotted && !plot
    ? `Plots are kept for the ${data.plotted} worst matrices only, so that the page stays small.`
    : "No spectrum was kept for this matrix.";
  find(".charts", dialog).replaceChildren(...(drawn.length ? drawn : [make("p", { class: "absent" }, why)]));
  find(".own", dialog).replaceChildren(...matrix.findings.map(told));
  find(".facts", dialog).replaceChildren(...matrix.facts.map(([label, text, reason]) => {
    const because = data.shelf[reason] ?? "";
    return make("div", wide(text) ? { class: "wide" } : {}, make("dt", {}, data.shelf[label]),
      make("dd", {}, text, ...(because ? [make("small", {}, because)] : [])));
  }));
  const places = order(), at = places.indexOf(place);
  find(".note", dialog).textContent = at < 0 ? "" : `${at + 1} of ${places.length}`;
  for (const button of all("[data-step]", dialog)) button.disabled = at < 0 || !(at + Number(button.dataset.step) in places);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  address(`#matrix=${encodeURIComponent(matrix.name)}`);
};

// The address names the open matrix, so that a link leads to it; a frame may forbid that.
const address = (hash) => {
  try { history.replaceState(null, "", hash || location.pathname + location.search); } catch { /* no harm */ }
};
const linked = () => {
  if (!location.hash.startsWith("#matrix=")) return;
  let name = location.hash.slice(8);
  try { name = decodeURIComponent(name); } catch { /* as it is */ }
  const at = data.matrices.findIndex((matrix) => matrix.name === name || matrix.name === `${name}.weight`);
  if (at >= 0) open(at);
};
dialog.addEventListener("close", () => { if (location.hash.startsWith("#matrix=")) address(""); });

const step = (by) => {
  const places = order(), next = places[places.indexOf(current) + by];
  if (current !== null && next !== undefined) open(next);
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-open]");
  if (button) open(Number(button.dataset.open));
});
for (const button of all("[data-step]", dialog)) button.addEventListener("click", () => step(Number(button.dataset.step)));
find("[data-close]", dialog).addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) step(by);
});

// Snippets

function copyable(pre) {
  const button = make("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    const text = find("code", pre).textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch {
      getSelection().selectAllChildren(find("code", pre)); // no right to the clipboard: ready for the keys
      button.textContent = "Selected";
    }
  });
  pre.prepend(button);
  return pre;
}
all("pre").forEach(copyable);

// The table: filters, and a page at a time

const controls = find("#matrices .controls");
const field = (name) => find(`[data-filter=${name}]`, controls);
let chosen = new Set(rows), limit = data.rows;

const lay = () => {
  let shown = 0;
  for (const row of table.tBodies[0].rows) row.hidden = rows.length > 0 && !(chosen.has(row) && shown++ < limit);
  find("#matrices .more").hidden = chosen.size <= limit;
};

const filter = () => {
  const severities = all("[aria-pressed=true]", controls).map((button) => button.dataset.severity);
  const kind = field("kind").value, depth = field("depth").value;
  const text = field("text").value.trim().toLowerCase();
  chosen = new Set(rows.filter((row) =>
    (!severities.length || severities.includes(row.dataset.severity))
    && (!kind || row.dataset.kind === kind) && (!depth || row.dataset.depth === depth)
    && data.matrices[row.dataset.place].name.toLowerCase().includes(text)));
  limit = data.rows;
  find("output", controls).textContent = `${chosen.size} of ${rows.length} matrices`;
  lay();
};

for (const button of all(".tally button", controls)) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    filter();
  });
}
for (const input of all("[data-filter]", controls)) input.addEventListener("input", filter);
find("#matrices .more button").addEventListener("click", () => { limit += 10 * data.rows; lay(); });
table.addEventListener("sorted", lay);
addEventListener("beforeprint", () => { limit = Infinity; lay(); }); // paper has no button for more
addEventListener("afterprint", () => { limit = data.rows; lay(); });
offer(find("[data-sort]", controls), table);
controls.hidden = rows.length === 0;
for (const row of rows) row.classList.remove("later"); // from here on the script hides and shows
filter();

// The map: a button a matrix; arrows move about, a switch chooses the number that is shown

const map = find("#glance .heat");
const reading = find(".reading");

const neighbour = (cell, key) => {
  const [right, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key] ?? [];
  if (right === undefined) return null;
  const lines = [...map.tBodies[0].rows], line = cell.closest("tr");
  if (right) {
    const own = all("button", line);
    return own[own.indexOf(cell) + right] ?? cell;
  }
  const x = cell.closest("td").cellIndex;
  for (let y = lines.indexOf(line) + down; lines[y]; y += down) {
    const found = find("button", lines[y].cells[x]);
    if (found) return found;
  }
  return cell;
};

if (map) {
  const cells = all("button", map), heads = [...map.tHead.rows[0].cells].map((head) => head.textContent);
  const said = (cell) => {
    const td = cell.closest("td"), layer = cell.closest("tr").cells[0].textContent;
    return `layer ${layer}, ${heads[td.cellIndex]}: ${cell.title}`;
  };
  cells.forEach((cell, k) => {
    cell.tabIndex = k ? -1 : 0; // one stop for the tabulator, arrows inside
    cell.setAttribute("aria-label", said(cell));
  });
  const read = (event) => {
    const cell = event.target.closest("button");
    if (cell) reading.textContent = cell.getAttribute("aria-label");
  };
  map.addEventListener("pointerover", read);
  map.addEventListener("focusin", read);
  map.addEventListener("keydown", (event) => {
    const next = event.target.closest("button") && neighbour(event.target, event.key);
    if (!next) return;
    event.preventDefault();
    for (const cell of cells) cell.tabIndex = cell === next ? 0 : -1;
    next.focus();
  });
  const choice = find("#glance .switch");
  choice.hidden = false;
  choice.addEventListener("change", (event) => {
    const k = data.keys.findIndex(([key]) => key === event.target.value);
    for (const cell of cells) {
      const [text, level] = data.matrices[cell.dataset.open].metrics.slice(2 * k);
      cell.dataset.level = level ?? "";
      find("span", cell).textContent = text;
      cell.toggleAttribute("data-unresolved", k === 0 && cell.title.includes("not resolved by its dtype"));
    }
    find(".legend .meaning").textContent = `${capital(data.keys[k][1])}. The fuller the colour, the farther from usual.`;
  });
}

// Spectra as small multiples on shared axes: values over the edge of chance, and the band of chance

const MANY = 12, SMALL = { wide: 220, high: 130, left: 34, right: 6, top: 18, bottom: 18 };
const drawable = data.worst.filter((at) => data.matrices[at].plot?.spectrum && data.matrices[at].plot.null);
let shownSpectra = MANY, fromLargest = true;

const relative = (plot) => {
  const edge = data.shelf[plot.null[1]][0] * plot.null[2];
  const points = positive(zip(data.shelf[plot.spectrum[0]], plot.spectrum[1], 1 / edge));
  const chance = positive(zip(data.shelf[plot.null[0]], data.shelf[plot.null[1]], plot.null[2] / edge));
  const last = Math.max(...points.map(([x]) => x), ...chance.map(([x]) => x), 1);
  const turn = (line) => fromLargest ? line : line.map(([x, y]) => [last + 1 - x, y]).reverse();
  const at = (x) => { // of chance at any index, by interpolation
    if (x > last) return chance.at(-1)?.[1] > 0.02 ? chance.at(-1)[1] : 0; // a square one may be singular
    const k = chance.findIndex(([there]) => there >= x);
    if (k <= 0) return chance[0]?.[1] ?? 0;
    const [[x0, y0], [x1, y1]] = [chance[k - 1], chance[k]];
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
  };
  // places of the values of a random matrix stray by about one: two to either side hold nearly all
  return { points: turn(points), high: turn(chance.map(([x]) => [x, at(x - 2)])), low: turn(chance.map(([x]) => [x, at(x + 2)])), last };
};

const multiples = () => {
  const holder = find(".multiples"), told = find(".spectra-told");
  const chosen = drawable.slice(0, shownSpectra).map((at) => [data.matrices[at], at, relative(data.matrices[at].plot)])
    .filter(([, , drawn]) => drawn.points.length > 1);
  const heights = chosen.flatMap(([, , drawn]) => drawn.points.map(([, y]) => y));
  if (!heights.length) {
    holder.replaceChildren(make("p", { class: "absent" }, "No spectrum was kept."));
    return;
  }
  const floor = SMALL.high - SMALL.bottom;
  const up = axis([Math.max(1e-6, Math.min(...heights)), Math.max(...heights, 1)], floor, SMALL.top, true);
  const across = axis([1, Math.max(...chosen.map(([, , drawn]) => drawn.last))], SMALL.left, SMALL.wide - SMALL.right, true);
  for (const one of [up, across]) one.ticks = one.ticks.filter((_, k, every) => every.length < 4 || k % 2 === 0);
  const clipped = (y) => Math.min(Math.max(y, up.low), up.high);
  holder.replaceChildren(...chosen.map(([matrix, at, drawn]) => {
    const short = matrix.name.replace(/\.weight$/, "");
    const picture = box("", across, up, "", SMALL);
    const edge = (line) => line.map(([x, y]) => [x, clipped(y)]);
    const rim = [...edge(drawn.high), ...edge(drawn.low).reverse()];
    if (rim.length > 2) picture.append(make("path", { class: "band", d: `${line(rim, across, up, "").getAttribute("d")}Z` }));
    picture.append(line(edge(drawn.points), across, up, "curve"));
    const button = make("button", { type: "button", "data-open": at, class: matrix.alarm ? "multiple alarm" : "multiple", "aria-label": `Spectrum of ${matrix.name}` },
      make("span", {}, short.length > 34 ? `…${short.slice(-33)}` : short), picture);
    button.addEventListener("pointermove", (event) => {
      const place = picture.getBoundingClientRect(), x = (event.clientX - place.left) * SMALL.wide / place.width;
      const distance = drawn.points.map(([index]) => Math.abs(across.at(index) - x));
      const [index, y] = drawn.points[distance.indexOf(Math.min(...distance))];
      told.textContent = `${matrix.name}: number ${index} from the ${fromLargest ? "largest" : "smallest"} is ${brief(y)} of the edge`;
    });
    return button;
  }));
  find(".spectra-more").hidden = drawable.length <= shownSpectra;
};
find("#spectra .switch").hidden = !drawable.length;
find("#spectra .switch").addEventListener("change", (event) => { fromLargest = event.target.value === "largest"; multiples(); });
find(".spectra-more button").addEventListener("click", () => { shownSpectra += 4 * MANY; multiples(); });
multiples();

// Trajectories, from the tables of their numbers

const path = (source) => {
  const lines = [...source.tBodies[0].rows].map((row) => [row.cells[0].textContent,
    positive([...row.cells].slice(1).map((cell, k) => [k + 1, parseFloat(cell.dataset.value)]))]);
  const points = lines.flatMap(([, found]) => found);
  if (!points.length) return make("p", { class: "absent" }, `${source.dataset.title}: not known at any checkpoint.`);
  const names = [...source.tHead.rows[0].cells].slice(1).map((cell) => cell.textContent);
  const many = names.length, edge = Math.max(0.5, many / 10); // room for half a name at either end
  const across = axis([1 - edge, many + edge], LEFT, WIDE - RIGHT, false);
  const every = Math.ceil(many / 5);
  across.ticks = names.map((name, k) => [k + 1, name.length > 12 ? `…${name.slice(-11)}` : name])
    .filter((_, k) => k % every === 0);
  const up = axis(points.map(([, y]) => y), HIGH - BOTTOM, TOP, true);
  const picture = box(`${source.dataset.title}, median of each kind`, across, up, "checkpoint");
  lines.forEach(([, found], k) => picture.append(make("g", { class: tint(k) }, line(found, across, up, "curve"),
    ...found.map(([x, y]) => make("circle", { class: "dot", cx: across.at(x), cy: up.at(y), r: 2.5 })))));
  return figure(picture, lines.map(([kind], k) => [kind, tint(k)]));
};

addEventListener("hashchange", linked);
linked();

find("#trajectory .charts")?.append(...all("#trajectory .path").map(path));
