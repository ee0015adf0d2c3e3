"""The tree of rules: every box is what its parent is without what the arrow drops."""

import pytest
import torch

from linattn_edu.figures import family

RULES = {  # each as a map of D, r, c, b, omega, beta, alpha, k, v, S
    "DPLR": lambda x: x.D @ x.S - x.c.T @ x.r @ x.S + x.k.T @ x.v,
    "GDN-2": lambda x: (x.I - x.k.T @ (x.b * x.k)) @ x.D @ x.S + x.k.T @ (x.omega * x.v),
    "KDA": lambda x: (x.I - x.beta * x.k.T @ x.k) @ x.D @ x.S + x.beta * x.k.T @ x.v,
    "Gated DeltaNet": lambda x: x.alpha * (x.I - x.beta * x.k.T @ x.k) @ x.S + x.beta * x.k.T @ x.v,
    "DeltaNet": lambda x: (x.I - x.beta * x.k.T @ x.k) @ x.S + x.beta * x.k.T @ x.v,
}
DROPPED = {  # parent, child -> what makes the parent the child
    ("DPLR", "GDN-2"): lambda x: {"c": x.k, "r": (x.b * x.k) @ x.D, "v": x.omega * x.v},
    ("GDN-2", "KDA"): lambda x: {"b": x.beta, "omega": x.beta},
    ("KDA", "Gated DeltaNet"): lambda x: {"D": x.alpha * x.I},
    ("Gated DeltaNet", "DeltaNet"): lambda x: {"alpha": 1.0},
}


class Letters(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("parent, child", DROPPED)
def test_a_child_is_its_parent_with_something_dropped(parent, child):
    torch.manual_seed(0)
    r, c, b, k = torch.rand(4, 1, 3, dtype=torch.float64)
    v, omega = torch.rand(2, 1, 2, dtype=torch.float64)
    S, I = torch.rand(3, 2, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    x = Letters(
        r=r, c=c, b=b, k=k, v=v, omega=omega, S=S, I=I, D=torch.rand(3).double().diag(),
        beta=0.7, alpha=0.9,
    )  # fmt: skip
    small = Letters(x | DROPPED[parent, child](x))
    torch.testing.assert_close(RULES[parent](small), RULES[child](x))


def test_all_boxes_are_drawn_inside():
    ax = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    family.draw(ax)
    said = [text.get_text() for text in ax.texts]
    names = [name for name, *_ in (*family.TRUNK, *family.BRANCHES.values())]
    assert {*names} <= {*said} and {*RULES} <= {*names}
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    for text in ax.texts:
        assert left <= text.get_position()[0] <= right and low <= text.get_position()[1] <= high
