// A tag of the code shows its equation: by hovering, focus, or a tap; Escape closes the box.
document.addEventListener("DOMContentLoaded", () => {
  const tags = document.querySelectorAll("a.eq-tag");
  if (!tags.length) return;
  const box = document.createElement("div");
  box.id = "eq-box";
  box.setAttribute("role", "status");
  box.hidden = true;
  document.body.append(box);
  let owner = null;
  let closing = 0;

  const place = () => {
    const tag = owner.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    box.style.left = `${scrollX + Math.max(8, Math.min(tag.left, width - box.offsetWidth - 8))}px`;
    const below = tag.bottom + box.offsetHeight + 4 < innerHeight;
    const top = below ? tag.bottom + 4 : Math.max(4, tag.top - box.offsetHeight - 4);
    box.style.top = `${scrollY + top}px`;
  };
  const close = () => {
    clearTimeout(closing);
    owner = null;
    box.hidden = true;
  };
  const later = () => {
    clearTimeout(closing);
    closing = setTimeout(close, 250);
  };
  const open = (tag) => {
    clearTimeout(closing);
    if (owner === tag) return;
    owner = tag;
    const tex = tag.dataset.tex;
    const bare = /\\\\|&/.test(tex) && !tex.includes("\\begin");
    const formula = document.createElement("div");
    formula.className = "math";
    formula.textContent = bare ? `\\[\\begin{split}${tex}\\end{split}\\]` : `\\[${tex}\\]`;
    const link = document.createElement("a");
    link.href = tag.getAttribute("href");
    link.textContent = tag.dataset.where;
    box.replaceChildren(formula, link);
    box.hidden = false;
    place();
    window.MathJax?.typesetPromise?.([formula]).then(() => owner === tag && place());
  };

  for (const tag of tags) {
    let touched = false;
    tag.addEventListener("pointerdown", (e) => (touched = e.pointerType === "touch"));
    tag.addEventListener("pointerenter", (e) => e.pointerType === "mouse" && open(tag));
    tag.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && later());
    tag.addEventListener("focus", () => open(tag));
    tag.addEventListener("blur", later);
    // a tap shows the equation; the link in the box leads on
    tag.addEventListener("click", (e) => {
      if (touched) e.preventDefault();
      touched ? open(tag) : close();
    });
  }
  box.addEventListener("pointerenter", () => clearTimeout(closing));
  box.addEventListener("pointerleave", (e) => e.pointerType === "mouse" && later());
  box.addEventListener("click", close);
  document.addEventListener("keydown", (e) => e.key === "Escape" && close());
  document.addEventListener("pointerdown", (e) => {
    if (owner && !box.contains(e.target) && e.target !== owner) close();
  });
});
