"""Stage selective_state_update: kernel against reference, and in float64."""

import itertools

import pytest
import torch
from delta.stage_checks import DIMS, DTYPES
from grids import parametrize
from ssd.ssd_checks import check_stage

from linattn_edu.kernels.ssd import selective_state_update as module
from linattn_edu.kernels.ssd.selective_state_update import selective_state_update as kernel
from linattn_edu.reference.ssd.selective_state_update import selective_state_update as reference
from linattn_edu.testing import assert_close, ssd_inputs

pytestmark = pytest.mark.usefixtures("poison")

TIED = ("A", "dt", "D", "dt_bias")
TOKENS = ("x", "dt", "B", "C", "z")
NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "indices")
SIZES = (*DIMS, 1, 8, 256)


def arguments(P, N, *, tied=TIED, without=(), dtype=torch.float32, state=torch.float32, B=2, H=4,
              G=2, device="cpu"):  # fmt: skip
    """Arguments of the stage, two heads on each group; those `tied` have one number a head."""
    seed = hash((P, N)) % 2**31
    x = ssd_inputs(B, 1, H, G, P, N, dtype=dtype, device=device, seed=seed)
    generator = torch.Generator(device=device).manual_seed(seed)

    def spread(y, *sizes):
        """y, and around it another number for each row or entry of a state."""
        shape = (*y.shape, *sizes)
        y = y[(...,) + (None,) * len(sizes)]
        return y * (1 + 0.1 * torch.rand(shape, generator=generator, device=device).to(y))

    given = {"state": x.initial_states.to(state), "x": x.x[:, 0], "B": x.B[:, 0], "C": x.C[:, 0]}
    given |= {"z": x.z[:, 0], "indices": None}
    for name, y, sizes in (
        ("A", x.A, (P, N)), ("dt", x.dt[:, 0], (P,)), ("D", x.D, (P,)), ("dt_bias", x.dt_bias, (P,))
    ):  # fmt: skip
        given[name] = spread(y, *((1,) * len(sizes) if name in tied else sizes))
    return tuple(None if n in without else given[n] for n in NAMES)


def run(f):
    """f on a copy of its state, which it then returns too."""

    def both(state, *rest, **options):
        state = state.clone()
        return f(state, *rest, **options), state

    return both


def check(args, *, softplus=True):
    """In float32 against float64 too."""
    check_stage(run(kernel), run(reference), args, softplus=softplus)
    if all(x is None or not x.is_floating_point() or x.element_size() == 4 for x in args):
        wide = (x.double() if x is not None and x.is_floating_point() else x for x in args)
        want = run(reference)(*wide, softplus=softplus)
        for name, x, ref in zip(("out", "state"), run(kernel)(*args, softplus=softplus), want,
                                strict=True):  # fmt: skip
            assert_close(name, x, ref, 1e-6)


@parametrize(
    P=SIZES, N=SIZES, dtype=DTYPES, state=DTYPES, tied=(TIED, ()),
    without=((), ("D", "z", "dt_bias"), ("z",)), softplus=(True, False),
)  # fmt: skip
def test_kernel(P, N, dtype, state, tied, without, softplus, device):
    args = arguments(P, N, dtype=dtype, state=state, tied=tied, without=without, device=device)
    if not softplus:  # steps as they are: positive
        args = [y.abs() if y is not None and i in (2, 8) else y for i, y in enumerate(args)]
    check(args, softplus=softplus)


@pytest.mark.parametrize("tied", [t for n in range(5) for t in itertools.combinations(TIED, n)])
def test_each_may_have_one_number_a_head(tied, device):
    check(arguments(20, 24, tied=tied, device=device))


@pytest.mark.parametrize("axis", [1, 2], ids=["rows", "columns"])
def test_a_rate_for_each_row_or_column(axis, device):
    args = list(arguments(20, 24, tied=("D",), device=device))
    args[3] = args[3].narrow(axis, 0, 1).contiguous()
    check(args)


@pytest.mark.parametrize(("H", "G"), [(1, 1), (6, 1), (6, 2), (6, 6)])
def test_groups(H, G, device):
    check(arguments(16, 16, H=H, G=G, device=device))


def part(args, rows):
    """The arguments of some sequences, with the whole of the state."""
    return [
        y if y is None or n not in TOKENS else y[rows] for n, y in zip(NAMES, args, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_of_a_pool(dtype, device):
    """Outside of the pool zeros come out; what is not named keeps its bits."""
    whole = arguments(20, 24, B=7, device=device)
    args = [*part(whole, slice(4))[:-1], torch.tensor([5, -1, 0, 7], dtype=dtype, device=device)]
    check(args)
    for f in (kernel, reference):
        out, state = run(f)(*args, softplus=True)
        assert not out[[1, 3]].any()
        assert torch.equal(state[[1, 2, 3, 4, 6]], args[0][[1, 2, 3, 4, 6]])
        for n, slot in ((0, 5), (2, 0)):
            alone = [args[0][slot : slot + 1], *part(whole, slice(n, n + 1))[1:]]
            want, S = run(f)(*alone, softplus=True)
            # PyTorch's silu has other bits in other places
            assert_close("out", out[n : n + 1], want, 0 if f is kernel else 1e-6)
            assert_close("state", state[slot : slot + 1], S, 0 if f is kernel else 1e-6)


def test_padding_reads_nothing(device):
    """Not even NaN and inf of its tokens come through."""
    args = list(arguments(20, 24, device=device))
    args[1][1] = args[2][1] = float("nan")
    args[4][1] = args[7][1] = float("inf")
    args[9] = torch.tensor([1, -5], device=device)
    for f in (kernel, reference):
        out, state = run(f)(*args, softplus=True)
        assert out.isfinite().all() and not out[1].any() and state.isfinite().all()


def test_slots_of_others_hold_no_number(device):
    """vllm #56524: states that are not named, and those of padding, are NaN and stay it; what is
    named is finite.
    """
    whole = arguments(20, 24, B=6, device=device)
    args = [*part(whole, slice(4))[:-1], torch.tensor([2, -1, 4, -1], device=device)]
    args[0] = args[0].clone()
    args[0][[0, 1, 3, 5]] = torch.nan
    for f in (kernel, reference):
        out, state = run(f)(*args, softplus=True)
        assert out.isfinite().all() and not out[[1, 3]].any()
        assert state[[2, 4]].isfinite().all() and state[[0, 1, 3, 5]].isnan().all()


@pytest.mark.parametrize("P", [17, 64])
def test_rows_and_states_may_lie_apart(P, device):
    """As slices of a projection, and pages of a cache; what is between them is left as it is."""
    args = arguments(P, 32, tied=("A", "D", "dt_bias"), device=device)
    want = run(kernel)(*args, softplus=True)

    def apart(y, gap):
        rows = y.new_full((len(y), y[0].numel() + gap), 7.0)
        rows[:, : y[0].numel()] = y.flatten(1)
        return rows, rows[:, : y[0].numel()].view(y.shape)

    gaps = {0: 24, 1: 8, 2: 16, 4: 40, 5: 8, 7: 3}
    moved = [apart(y, gaps[i])[1] if i in gaps else y for i, y in enumerate(args)]
    pages, moved[0] = apart(args[0], 24)
    out = kernel(*moved, softplus=True)
    assert_close("out", out, want[0], 1e-6)  # narrower loads make another kernel
    assert_close("state", moved[0], want[1], 1e-6)
    assert (pages[:, -24:] == 7).all()


@pytest.mark.parametrize("generation", ["turing", "ampere", "blackwell"])
def test_rows_of_the_table(generation, monkeypatch, device):
    """With programs enough, and with few: the same bits of the state."""
    if device.type == "cuda":
        pytest.skip("a row is right on the generation it is for")
    args = arguments(40, 100, device=device)
    states = []
    for processors in (1, 10**6):
        monkeypatch.setattr(module, "device_of", lambda x, n=processors: (generation, n))
        check(args)
        states.append(run(kernel)(*args, softplus=True)[1])
    assert torch.equal(*states)


@pytest.mark.parametrize("f", [kernel, reference])
def test_extremes(f, device):
    """Steps of which e^x overflows, and one that is zero: states that are closed, and kept."""
    args = list(arguments(16, 16, B=3, device=device))
    args[2] = torch.tensor([1e4, 200.0, -1e4], device=device)[:, None, None].repeat(1, 4, 1)
    out, state = run(f)(*args, softplus=True)
    assert out.isfinite().all() and torch.equal(state[2], args[0][2])
    step = args[2][:2].double() + args[8]
    B = args[4][:2].double().repeat_interleave(2, 1)
    assert_close("state", state[:2], (step * args[1][:2])[..., None] * B[:, :, None], 1e-6)
