"use strict";

// Without this script everything is there: details open by a click, links lead to the case.

/** Opens whatever hides the place that the address names, and goes there. */
function follow() {
  const place = document.getElementById(location.hash.slice(1));
  if (!place) return;
  for (let around = place; around; around = around.parentElement) {
    if (around instanceof HTMLDetailsElement) around.open = true;
  }
  place.scrollIntoView();
  (place.querySelector(":scope > summary") ?? place).focus({ preventScroll: true });
}

addEventListener("hashchange", follow);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  const address = link?.getAttribute("href");
  if (address?.startsWith("#") && address === location.hash) follow();  // no hashchange follows
});
follow();

for (const buttons of document.querySelectorAll(".buttons")) {
  buttons.hidden = false;
  buttons.addEventListener("click", (event) => {
    const fold = event.target.dataset.fold;
    if (!fold) return;
    for (const part of document.querySelectorAll("main details")) part.open = fold === "open";
  });
}

/** In the matrix, arrows go from case to case. */
document.querySelector(".matrix")?.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const cell = event.target.closest("td");
  if (!step || !cell) return;
  const rows = event.currentTarget.rows;
  let [row, column] = [cell.parentElement.rowIndex, cell.cellIndex];
  for (;;) {
    [row, column] = [row + step[0], column + step[1]];
    const next = rows[row]?.cells[column];
    if (!next || next.tagName !== "TD") return;
    const link = next.querySelector("a");
    if (!link) continue;
    link.focus();
    event.preventDefault();
    return;
  }
});
