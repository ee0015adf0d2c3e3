// Formulas are set as they come near the window, and the others in between, so that a page with
// hundreds of them can be read at once. What is set above the window does not move what is in it.
// formulas.all() sets those that are left; formulas.done is kept when none is.
(() => {
  if (!window.MathJax) return; // a page without formulas
  const AT_ONCE = 40; // formulas a turn, in which the page does not answer
  const todo = new Set();
  const near = new Set();
  let watch = null;
  let finish;
  const done = new Promise((resolve) => (finish = resolve));

  const take = (elements) => {
    for (const e of elements) {
      todo.delete(e);
      near.delete(e);
      watch.unobserve(e);
    }
    if (!todo.size) watch.disconnect();
    return elements;
  };
  // the first thing that begins in the window stays where it is: browsers differ in that
  const first = () => {
    const left = document.querySelector("article")?.getBoundingClientRect().left ?? 0;
    for (let y = 1; scrollY > 0 && y < innerHeight; y += 20) {
      const e = document.elementFromPoint(left + 30, y);
      if (e?.closest("article") && e.getBoundingClientRect().top >= 0) return e;
    }
    return null;
  };
  const held = (work) => {
    const e = first();
    const before = e?.getBoundingClientRect().top;
    work();
    const moved = e?.isConnected && e.getBoundingClientRect().top - before;
    if (moved) scrollBy({ top: moved, behavior: "instant" });
  };
  const set = (elements) => {
    if (elements.length) held(() => MathJax.typeset(take(elements)));
  };
  const all = () => {
    set([...todo]);
    return done;
  };
  const turn = () => {
    set([...(near.size ? near : todo)].slice(0, AT_ONCE));
    if (todo.size) return setTimeout(turn);
    document.documentElement.style.overflowAnchor = "";
    MathJax.typeset(); // those that no .math holds
    finish();
  };

  const begin = () => {
    document.documentElement.style.overflowAnchor = "none";
    for (const e of document.querySelectorAll(".math")) todo.add(e);
    const place = (e) => e.getBoundingClientRect();
    const seen = (r) => r.height && r.bottom > -innerHeight && r.top < 2 * innerHeight;
    watch = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries)
          if (todo.has(target)) isIntersecting ? near.add(target) : near.delete(target);
      },
      { rootMargin: "100% 0px" },
    );
    for (const e of todo) watch.observe(e);
    const here = () => set([...todo].filter((e) => seen(place(e))));
    here();
    // an address may be gone to only once the images before it are there
    if (document.readyState != "complete") addEventListener("load", here);
    setTimeout(turn);
    addEventListener("beforeprint", () => set([...todo]));
  };
  window.formulas = { all, done };
  MathJax.startup.pageReady = () => Promise.resolve(begin());
})();
