const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// Text is only ever appended as text, never read as markup.
const make = (name, attributes = {}, ...children) => {
  const space = MARKS.has(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
const MARKS = new Set(["svg", "g", "path", "line", "rect", "text", "circle", "title"]);

// Charts: a box with two axes, each linear or logarithmic, from data to places.

const WIDE = 480, HIGH = 300, LEFT = 58, RIGHT = 12, TOP = 26, BOTTOM = 40;
const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => "10" + [...String(exponent)].map((c) => RAISED[c]).join("");
const brief = (x) => {
  if (x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5)) return String(Number(x.toPrecision(3)));
  const [mantissa, exponent] = x.toExponential(2).split("e");
  return `${Number(mantissa)}×${power(Number(exponent))}`;
};

const steps = (low, high, many = 5) => {
  const rough = (high - low) / many, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((k) => k * unit >= rough) * unit;
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return Array.from({ length: last - first + 1 }, (_, k) => [(first + k) * step, brief((first + k) * step)]);
};

const decades = (low, high) => {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  if (last - first < 1) {
    const near = [1, 2, 3, 5, 7].flatMap((k) => [k * 10 ** (first - 1), k * 10 ** first, k * 10 ** (first + 1)]);
    const inside = near.filter((x) => x >= low && x <= high);
    return inside.length > 1 ? inside.map((x) => [x, brief(x)]) : steps(low, high, 4);
  }
  const every = Math.ceil((last - first + 1) / 7);
  const found = [];
  for (let k = first; k <= last; k += every) found.push([10 ** k, Math.abs(k) < 4 ? brief(10 ** k) : power(k)]);
  return found;
};

const axis = (values, from, to, logarithmic) => {
  let low = Math.min(...values), high = Math.max(...values);
  if (logarithmic) [low, high] = low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
  else if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const scale = logarithmic ? Math.log10 : (x) => x;
  const a = scale(low), b = scale(high);
  return {
    low, high,
    at: (x) => from + (to - from) * (scale(x) - a) / (b - a),
    ticks: (logarithmic ? decades : steps)(low, high),
  };
};

const FRAME = { wide: WIDE, high: HIGH, left: LEFT, right: RIGHT, top: TOP, bottom: BOTTOM };

const box = (title, across, up, labels, { wide, high, left, right, top, bottom } = FRAME) => {
  const floor = high - bottom, end = wide - right;
  const picture = make("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": title });
  if (title) picture.append(make("text", { x: left, y: 14, class: "heading" }, title));
  for (const [x, text] of across.ticks) picture.append(
    make("line", { class: "axis", x1: across.at(x), x2: across.at(x), y1: top, y2: floor }),
    make("text", { x: across.at(x), y: floor + 16, "text-anchor": "middle" }, text));
  for (const [y, text] of up.ticks) picture.append(
    make("line", { class: "axis", x1: left, x2: end, y1: up.at(y), y2: up.at(y) }),
    make("text", { x: left - 6, y: up.at(y) + 4, "text-anchor": "end" }, text));
  picture.append(make("text", { x: end, y: high - 4, "text-anchor": "end" }, labels));
  return picture;
};

const line = (points, across, up, kind) => make("path", {
  class: kind,
  d: points.map(([x, y], k) => `${k ? "L" : "M"}${across.at(x).toFixed(1)} ${up.at(y).toFixed(1)}`).join(""),
});

const figure = (picture, keys, told = "") => make("figure", {}, picture, make("figcaption", {},
  make("div", { class: "keys" }, ...keys.map(([text, kind]) => make("span", { class: kind }, text))),
  make("output", {}, told)));

const positive = (points) => points.filter(([x, y]) => x > 0 && y > 0 && y < Infinity);
const tint = (k) => `tint-${k % 8}${k < 8 ? "" : " again"}`; // eight colours, then the same dashed
