// What scrolls sideways can be reached by the keyboard, on every browser.
document.addEventListener("DOMContentLoaded", () => {
  const wide = ".bd-article :is(div, pre, mjx-container, table, figure)";
  const mark = () => {
    for (const box of document.querySelectorAll(wide)) {
      const scrolls =
        box.scrollWidth > box.clientWidth && /auto|scroll/.test(getComputedStyle(box).overflowX);
      if (scrolls && !box.hasAttribute("tabindex")) {
        box.tabIndex = 0;
        box.dataset.scrolls = "";
      } else if (!scrolls && "scrolls" in box.dataset) {
        box.removeAttribute("tabindex");
        delete box.dataset.scrolls;
      }
    }
  };
  let waiting = 0;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(mark, 100);
  };
  addEventListener("resize", soon);
  addEventListener("load", () => {
    mark();
    // formulas are set after the page has loaded
    window.formulas?.done.then(mark);
  });
  document.addEventListener("toggle", soon, true);
  document.addEventListener("click", soon);
});
