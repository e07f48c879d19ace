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

offer(controls.querySelector("[data-sort]"), table);

controls.hidden = rows.length === 0;
filter();
