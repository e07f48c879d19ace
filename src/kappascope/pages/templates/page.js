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
  table.dispatchEvent(new Event("sorted"));
};

const next = { "": "ascending", ascending: "descending", descending: "" };

for (const table of document.querySelectorAll("table.sortable")) {
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...[...head.childNodes].filter((node) => node.className !== "about"));
    button.addEventListener("click", () =>
      sort(table, head.cellIndex, next[head.getAttribute("aria-sort") ?? ""]));
    head.prepend(button);
  }
}

// A phone shows cards without a head to press: a menu sorts them.
const offer = (menu, table) => {
  for (const head of table.tHead.rows[0].cells) menu.add(new Option((head.querySelector("button") ?? head).textContent, head.cellIndex));
  menu.addEventListener("change", () => {
    const column = Number(menu.value), numeric = table.tHead.rows[0].cells[column].className === "number";
    sort(table, column, menu.value === "" ? "" : numeric && menu.dataset.sort || "ascending");
  });
};

