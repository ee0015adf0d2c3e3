// A link to an appendix, or to a place in it, opens its fold; printing opens all of them.
// Without this script a fold still opens by a click, by the keyboard and by find in page.
document.addEventListener("DOMContentLoaded", () => {
  const folds = [...document.querySelectorAll("details.appendix")];
  if (!folds.length) return;

  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const fold = folds.find((f) => f.parentElement.contains(target));
    if (!fold || fold.open) return;
    fold.open = true;
    target.scrollIntoView();
  };
  reveal();
  addEventListener("hashchange", reveal);
  // a second click on the same link changes no hash
  document.addEventListener("click", (e) => e.target.closest("a[href*='#']") && setTimeout(reveal));

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = folds.filter((f) => !f.open);
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of opened) fold.open = false;
  });
});
