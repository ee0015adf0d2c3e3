"""The rules of the book as one tree: what is dropped on the way from one to the next."""

from linattn_edu.figures.drawing import BLUE, GRAY

# name, rule, what is dropped on the way to the next; rows of keys, D the decay of each row
TRUNK = (
    ("DPLR", r"$S \leftarrow D S - c^\top r\, S + k^\top v$", "erase under $k$ too: $c = k$"),
    (
        "GDN-2",
        r"$S \leftarrow (I - k^\top (b \odot k))\, D S + k^\top (\omega \odot v)$",
        r"one number $\beta$ for both gates",
    ),
    (
        "KDA",
        r"$S \leftarrow (I - \beta\, k^\top k)\, D S + \beta\, k^\top v$",
        r"one decay $\alpha$ for all rows",
    ),
    (
        "Gated DeltaNet",
        r"$S \leftarrow \alpha\, (I - \beta\, k^\top k)\, S + \beta\, k^\top v$",
        "nothing is erased",
    ),
    ("Mamba-2, simple GLA", r"$S \leftarrow \alpha\, S + k^\top v$", "no key: one row"),
    ("EMA", r"$S \leftarrow \alpha\, S + \omega\, v$", ""),
)
# where a branch leaves -> its name, rule, what is dropped
BRANCHES = {
    "DPLR": ("RWKV-7", r"$r = \kappa,\ c = a \odot \kappa$", "one key\nfor both"),
    "Gated DeltaNet": ("DeltaNet", r"$\alpha = 1$", "no decay"),
}
_STEP, _HEIGHT, _WIDTH, _LEFT = 1.9, 1.2, 6.6, 7.3


def draw(ax) -> None:
    """Draw the tree on a matplotlib axes of about 4.3 by 5 inches, legible on a phone."""
    from matplotlib.patches import Rectangle

    def box(x: float, top: float, width: float, name: str, rule: str) -> None:
        place = (x, top - _HEIGHT), width, _HEIGHT
        ax.add_patch(Rectangle(*place, fc=BLUE, ec=BLUE, alpha=0.16))
        style = {"ha": "center", "va": "center", "size": 9}
        ax.text(x + width / 2, top - 0.36, name, weight="bold", **style)
        ax.text(x + width / 2, top - 0.86, rule, **style)

    head = {"arrowstyle": "-|>", "color": GRAY, "shrinkA": 0, "shrinkB": 0}
    corner = head | {"connectionstyle": "angle,angleA=0,angleB=90"}
    ax.set(xlim=(0, 10), ylim=(-_STEP * (len(TRUNK) - 1) - _HEIGHT, 0.1))
    ax.set_axis_off()
    for i, (name, rule, dropped) in enumerate(TRUNK):
        top = -_STEP * i
        box(0, top, _WIDTH, name, rule)
        if dropped:
            ax.annotate("", (1.2, top - _STEP), (1.2, top - _HEIGHT), arrowprops=head)
            ax.text(1.6, top - (_STEP + _HEIGHT) / 2, dropped, va="center", size=9)
        if name in BRANCHES:
            other, rule, dropped = BRANCHES[name]
            box(_LEFT, top - 1.5, 10 - _LEFT, other, rule)
            ax.annotate("", (8.65, top - 1.5), (_WIDTH, top - 0.75), arrowprops=corner)
            ax.text(8.65, top - 0.35, dropped, ha="center", va="center", size=9)
