"""A figure that is gone through step by step: its frames, and a script that shows one of them."""

import hashlib
import html
from collections.abc import Sequence

_STYLE = (
    ".la-steps{max-width:620px;margin:0.5em auto}"
    ".la-steps figure{margin:0 0 1em}"
    ".la-steps svg{display:block;width:100%;height:auto}"
    ".la-steps figcaption{min-height:3em;text-align:left;color:inherit;font-weight:normal}"
    ".la-steps nav{display:none;gap:0.8em;align-items:center;padding:0.3em 0}"
    ".la-steps nav input{flex:1;min-width:0}"
)
# $ is the element's id; without a script all frames stand one below the other
_SCRIPT = """(function () {
  const box = document.getElementById("$");
  if (!box) return;
  const frames = box.querySelectorAll("figure"), nav = box.querySelector("nav");
  const [back, on] = nav.querySelectorAll("button"), slider = nav.querySelector("input");
  const show = function (i) {
    i = Math.max(0, Math.min(frames.length - 1, i));
    frames.forEach(function (f, j) { f.style.display = i === j ? "" : "none"; });
    slider.value = i;
    back.disabled = i === 0;
    on.disabled = i === frames.length - 1;
  };
  back.onclick = function () { show(+slider.value - 1); };
  on.onclick = function () { show(+slider.value + 1); };
  slider.oninput = function () { show(+slider.value); };
  nav.style.display = "flex";
  show(0);
})();"""


def steps_html(frames: Sequence[tuple[str, str]], label: str) -> str:
    """HTML of a figure of several frames, which needs nothing but itself.

    Args:
        frames: SVG text and caption of each.  label: What a screen reader calls the slider.
    Returns:
        A slider and two buttons over one frame; where no script runs, all frames.
    """
    if not frames:
        raise ValueError("frames must have at least one frame, got none")
    figures = "".join(
        f"<figure>{svg}<figcaption>{i}. {html.escape(caption)}</figcaption></figure>"
        for i, (svg, caption) in enumerate(frames, 1)
    )
    name = "la-steps-" + hashlib.sha256(figures.encode()).hexdigest()[:10]
    slider = (
        f'<input type="range" min="0" max="{len(frames) - 1}" value="0" step="1" '
        f'aria-label="{html.escape(label)}">'
    )
    buttons = [f'<button type="button">{text}</button>' for text in ("back", "on")]
    return (
        f'<div class="la-steps" id="{name}"><style>{_STYLE}</style>'
        f"<nav>{buttons[0]}{slider}{buttons[1]}</nav>{figures}"
        f"<script>{_SCRIPT.replace('$', name)}</script></div>"
    )
