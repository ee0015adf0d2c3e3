"""Stage causal_conv1d_update: kernel against reference, and token by token as the whole at once."""

import pytest
import torch
from delta.stage_checks import DTYPES
from grids import few, parametrize
from ssd.ssd_checks import check_stage

from linattn_edu.kernels.delta.causal_conv1d import causal_conv1d
from linattn_edu.kernels.delta.causal_conv1d_update import causal_conv1d_update as kernel
from linattn_edu.reference.delta.causal_conv1d_update import causal_conv1d_update as reference

pytestmark = pytest.mark.usefixtures("poison")

ROOMS = pytest.mark.parametrize("f", [kernel, reference], ids=["kernel", "reference"])
STATES = ("ordered", "ring")


def draw(T, D, W, S, B=3, dtype=torch.float32, state=None, device="cpu", ring=False, slots=None):
    """state, x, weight, bias, and the tokens before each sequence where the state is a ring."""
    generator = torch.Generator().manual_seed(100 * T + 10 * D + W)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    lengths = torch.tensor([S * n + n for n in range(B)], device=device) if ring else None
    tensors = randn(slots or B, D, S, dtype=state or dtype), randn(B, T, D)
    return *tensors, randn(D, W, dtype=torch.float32), randn(D, dtype=torch.float32), lengths


def run(f):
    """f on a copy of its state, which it then returns too."""

    def both(state, *rest, **options):
        state = state.clone(memory_format=torch.preserve_format)
        return f(state, *rest, **options), state

    return both


@parametrize(
    T=few(1, 5, 12, more=(2,)), W=few(1, 4, 8, more=(2,)), D=few(33, 130, more=(1,)),
    extra=few(0, 3, 40, more=(1,)), dtype=DTYPES, state=DTYPES, kind=STATES, bias=(False, True),
    activation=(None, "silu"),
)  # fmt: skip
def test_kernel(T, W, D, extra, dtype, state, kind, bias, activation, device):
    S = max(W - 1, 1) + extra
    args = list(draw(T, D, W, S, dtype=dtype, state=state, device=device, ring=kind == "ring"))
    if not bias:
        args[3] = None
    check_stage(run(kernel), run(reference), args, activation=activation)


@ROOMS
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("steps", few((3, 1, 5), (9,), more=((1,) * 9,)), ids=str)
def test_token_by_token_as_all_at_once(f, steps, kind, device):
    """The kernels to the bit, and the state is the last tokens."""
    W, S, D = 4, 5, 33
    _, x, weight, bias, _ = draw(9, D, W, S, device=device)
    want, last = causal_conv1d(x, weight, bias, activation="silu", output_final_state=True)
    state, done = torch.zeros(3, D, S, device=device), 0
    got = []
    for n in steps:
        lengths = torch.full((3,), done, device=device) if kind == "ring" else None
        part = x[:, done : done + n].contiguous()
        got.append(f(state, part, weight, bias, lengths, activation="silu"))
        done += n
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=0 if f is kernel else 1e-5)
    if kind == "ring":
        state = state.roll(-done % S, 2)
    assert torch.equal(state, x[:, -S:].mT) and torch.equal(state[..., 1:], last)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", STATES)
def test_slots_of_a_pool(kind, dtype, device):
    """Outside of the pool zeros come out; what is not named keeps its bits."""
    state, x, *rest, lengths = draw(2, 33, 4, 4, B=4, device=device, ring=kind == "ring", slots=7)
    indices = torch.tensor([5, -1, 0, 7], dtype=dtype, device=device)
    x[[1, 3]] = torch.nan
    check_stage(run(kernel), run(reference), (state, x, *rest, lengths, indices))
    for f in (kernel, reference):
        y, after = run(f)(state, x, *rest, lengths, indices)
        assert not y[[1, 3]].any()
        assert torch.equal(after[[1, 2, 3, 4, 6]], state[[1, 2, 3, 4, 6]])
        for n, slot in ((0, 5), (2, 0)):
            own = None if lengths is None else lengths[n : n + 1]
            want, alone = run(f)(state[slot : slot + 1], x[n : n + 1], *rest, own)
            assert torch.equal(y[n : n + 1], want) and torch.equal(after[slot], alone[0])


@pytest.mark.parametrize("transposed", [False, True])
def test_states_and_rows_may_lie_apart(transposed, device):
    """As pages of a cache, of either order; what is between them is left as it is."""
    state, x, *rest, _ = draw(1, 33, 4, 4, device=device)
    want = run(kernel)(state, x, *rest)
    pages = torch.full((3, 2, 4, 33) if transposed else (3, 2, 33, 4), 7.0, device=device)
    rows = torch.full((3, 2, 33), 7.0, device=device)
    own = pages[:, 0].mT if transposed else pages[:, 0]
    own.copy_(state)
    rows[:, :1] = x
    y = kernel(own, rows[:, :1], *rest)
    assert torch.equal(y, want[0]) and torch.equal(own, want[1])
    assert (pages[:, 1] == 7).all()
