"use strict";
// Sorts a table by a column, and says where a table or figure goes on to the right. The page is complete without scripts.
for (const head of document.querySelectorAll("section > .table thead th")) {
  const button = document.createElement("span");  // browsers do not repeat a real button on a table's second printed page
  button.append(...head.childNodes);
  button.role = "button";
  button.tabIndex = 0;
  head.replaceChildren(button);
  button.addEventListener("keydown", event => { if (event.key === "Enter") button.click(); });
  button.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0], up = head.getAttribute("aria-sort") === "descending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => {
      const text = row.cells[head.cellIndex].textContent.replaceAll(",", "").replace("<", "");
      const number = parseFloat(text);
      return Number.isNaN(number) ? text : number;
    };
    const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
      : typeof a === typeof b ? a.localeCompare(b) : typeof a === "number" ? 1 : -1;
    body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(value(a), value(b))));
  });
}

// A frame around an element that scrolls, with a hint while something is hidden at its right. `samples.js` uses it, too.
const framed = scroller => {
  const frame = document.createElement("div"), hint = document.createElement("div");
  frame.className = "frame";
  hint.className = "hint";
  hint.textContent = "scroll sideways for more \u2192";
  scroller.replaceWith(frame);
  frame.append(hint, scroller);
  const look = () => {
    const hidden = scroller.scrollWidth - scroller.clientWidth;
    frame.classList.toggle("wide", hidden > 1);
    frame.classList.toggle("more", hidden - scroller.scrollLeft > 1);
  };
  scroller.addEventListener("scroll", look, {passive: true});
  look();
  const observer = new ResizeObserver(look);
  observer.observe(scroller);
  if (scroller.firstElementChild) observer.observe(scroller.firstElementChild);
  return frame;
};
document.querySelectorAll(".scroller").forEach(framed);
