"""A figure that is gone through step by step: its frames, and a script that shows one of them."""

import hashlib
import html
from collections.abc import Sequence

_STYLE = (
    ".la-steps{max-width:620px;margin:0.5em auto}"
    ".la-steps figure{margin:0 0 1em}"
    ".la-steps svg{display:block;max-width:100%;height:auto;margin:0 auto}"
    ".la-steps figcaption{min-height:3em;text-align:left;color:inherit;font-weight:normal}"
    ".la-steps .la-moves{display:none;flex-wrap:wrap;gap:0.4em 0.8em;align-items:center;"
    "padding:0.3em 0}"
    ".la-steps button,.la-steps select{font:inherit;min-height:2em}"
    ".la-steps button[aria-disabled=true]{opacity:0.5}"
    ".la-steps input{flex:1;min-width:6em}"
    ".la-steps .la-said{position:absolute;width:1px;height:1px;overflow:hidden;"
    "clip-path:inset(50%)}"
)
# $ is the element's id; without a script all frames stand one below the other
_SCRIPT = """(function () {
  const box = document.getElementById("$");
  if (!box) return;
  const frames = box.querySelectorAll("figure"), moves = box.querySelector(".la-moves");
  const choice = box.querySelector("select"), slider = box.querySelector("input");
  const [back, on] = box.querySelectorAll("button"), said = box.querySelector(".la-said");
  const each = choice ? frames.length / choice.length : frames.length;
  const show = function (i, say) {
    i = Math.max(0, Math.min(each - 1, i));
    const now = i + (choice ? each * choice.selectedIndex : 0);
    frames.forEach(function (f, j) { f.style.display = now === j ? "" : "none"; });
    if (slider) {
      slider.value = i;
      slider.setAttribute("aria-valuetext", i + 1 + " of " + each);
      back.setAttribute("aria-disabled", i === 0);
      on.setAttribute("aria-disabled", i === each - 1);
    }
    if (say) said.textContent = frames[now].querySelector("figcaption").textContent;
  };
  const by = function (n) { show(+slider.value + n, true); };
  if (choice) choice.oninput = function () { show(slider ? +slider.value : 0, true); };
  if (slider) {
    back.onclick = function () { by(-1); };
    on.onclick = function () { by(1); };
    slider.oninput = function () { by(0); };
    back.onkeydown = on.onkeydown = function (e) {
      const n = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
      if (n) { by(n); e.preventDefault(); }
    };
  }
  moves.style.display = "flex";
  show(0, false);
})();"""


def steps_html(
    frames: Sequence[tuple[str, str]],
    label: str,
    choices: tuple[str, Sequence[str]] | None = None,
) -> str:
    """HTML of a figure of several frames, which needs nothing but itself.

    Args:
        frames: SVG text and caption of each.  label: What a screen reader calls the slider.
        choices: What is chosen, and the names to choose from.  The frames are then those of the
            first name, those of the second, ..., as many for each.
    Returns:
        A slider and two buttons over one frame, and a list of the choices; where no script runs,
        all frames.
    """
    if not frames:
        raise ValueError("frames must have at least one frame, got none")
    what, names = choices or ("", [""])
    each, rest = divmod(len(frames), len(names))
    if rest:
        raise ValueError(f"frames must be as many for each of {list(names)}, got {len(frames)}")
    figures = ""
    for i, (svg, caption) in enumerate(frames):
        step = ([names[i // each]] if choices else []) + ([str(i % each + 1)] if each > 1 else [])
        step = ", ".join(step)
        if "aria-label" not in svg.split(">", 1)[0]:
            named = html.escape(f"{label}, {step}")
            svg = svg.replace("<svg", f'<svg aria-label="{named}"', 1)
        caption = html.escape(f"{step}. {caption}")
        figures += f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"
    name = "la-steps-" + hashlib.sha256(figures.encode()).hexdigest()[:10]
    moves = ""
    if choices:
        options = "".join(f"<option>{html.escape(n)}</option>" for n in names)
        moves = f'<label for="{name}-of">{html.escape(what)}</label>'
        moves += f'<select id="{name}-of">{options}</select>'
    if each > 1:
        slider = (
            f'<input type="range" min="0" max="{each - 1}" value="0" step="1" '
            f'aria-label="{html.escape(label)}">'
        )
        back, on = (f'<button type="button">{text}</button>' for text in ("back", "on"))
        moves += back + slider + on
    return (
        f'<div class="la-steps" id="{name}"><style>{_STYLE}</style>'
        f'<div class="la-moves" role="group" aria-label="{html.escape(label)}">{moves}</div>'
        f'{figures}<p class="la-said" role="status"></p>'
        f"<script>{_SCRIPT.replace('$', name)}</script></div>"
    )
