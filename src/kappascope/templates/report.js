"use strict";

const value = (row, column) => {
  const cell = row.cells[column];
  const number = parseFloat(cell.dataset.value);
  return { number, text: cell.textContent.trim(), measured: "value" in cell.dataset };
};

// Numbers rise or fall; a cell without its number comes last in both directions.
const compare = (column, sign) => (left, right) => {
  const a = value(left, column), b = value(right, column);
  if (!a.measured) return sign * a.text.localeCompare(b.text, "en", { numeric: true });
  if (Number.isNaN(a.number) || Number.isNaN(b.number)) {
    return Number.isNaN(a.number) - Number.isNaN(b.number);
  }
  return sign * (a.number - b.number);
};

const sort = (table, column, direction) => {
  const body = table.tBodies[0];
  table.original ??= [...body.rows];
  const rows = [...table.original];
  if (direction) rows.sort(compare(column, direction === "ascending" ? 1 : -1));
  body.append(...rows);
  for (const head of table.tHead.rows[0].cells) head.removeAttribute("aria-sort");
  if (direction) table.tHead.rows[0].cells[column].setAttribute("aria-sort", direction);
};

const next = { "": "ascending", ascending: "descending", descending: "" };

for (const table of document.querySelectorAll("table.sortable")) {
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () =>
      sort(table, head.cellIndex, next[head.getAttribute("aria-sort") ?? ""]));
    head.append(button);
  }
}

const controls = document.querySelector(".controls");
const table = document.querySelector("[data-filtered]");
const rows = [...table.tBodies[0].rows].filter((row) => row.dataset.outcome);

const filter = () => {
  const pressed = [...controls.querySelectorAll("[aria-pressed=true]")].map((b) => b.dataset.outcome);
  const experiment = controls.querySelector("[data-filter=experiment]").value;
  const text = controls.querySelector("[data-filter=text]").value.trim().toLowerCase();
  for (const row of rows) {
    row.hidden = (pressed.length > 0 && !pressed.includes(row.dataset.outcome))
      || (experiment !== "" && row.dataset.experiment !== experiment)
      || !row.textContent.toLowerCase().includes(text);
  }
  const shown = rows.filter((row) => !row.hidden).length;
  controls.querySelector("output").textContent = `${shown} of ${rows.length} claims`;
};

for (const button of controls.querySelectorAll(".tally button")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    filter();
  });
}
for (const field of controls.querySelectorAll("[data-filter]")) field.addEventListener("input", filter);

const sorter = controls.querySelector("[data-sort]");
for (const head of table.tHead.rows[0].cells) sorter.add(new Option(head.textContent, head.cellIndex));
sorter.addEventListener("change", () =>
  sort(table, Number(sorter.value), sorter.value === "" ? "" : "ascending"));

controls.hidden = rows.length === 0;
filter();
