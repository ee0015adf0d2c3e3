"""What mamba_chunk_scan_combined refuses, before any kernel runs, and what it takes."""

import pytest
import torch
from gdn_checks import refused
from ops.ssd.ssd_cases import inputs
from ops.test_contract_refused import other

from linattn_edu import mamba_chunk_scan_combined

T, H, G, P, N = 20, 4, 2, 16, 24


def everything(device, packed=True):
    """(tensors, options) of a call that uses every argument."""
    x, options = inputs(1, T, H, G, P, N, device=device, states=3 if packed else 1)
    options |= {"chunk_size": 64, "return_final_states": True}
    if packed:
        bounds = torch.tensor([0, 5, 5, T])
        options |= {"cu_seqlens": bounds.to(device), "cu_seqlens_cpu": bounds}
        options["return_varlen_states"] = True
    return x, options


def longer(name, axis):
    """Changes: one more along an axis."""
    return other(name, lambda t: torch.cat([t, t.narrow(axis, 0, 1)], axis))


def to(name, where):
    return other(name, lambda t: t.to(where))


def wide(axis_of_states):
    """Changes: P (2) or N (3) of 257."""
    names = ("x", "z") if axis_of_states == 2 else ("B", "C")
    grow = lambda t: t[..., :1].expand(*t.shape[:3], 257)
    return lambda a: {"initial_states": None} | {n: grow(a[n]) for n in names}


def empty(name, axis):
    names = {"H": ("x", "dt", "z"), "B": ("x", "dt", "z", "B", "C", "seq_idx")}.get(axis, (name,))
    place = {"B": 0, "H": 2, "G": 2, "P": 3, "N": 3}[axis]

    def change(a):
        changed = {n: a[n].narrow(place, 0, 0) for n in names if place < a[n].ndim}
        if axis == "H":
            changed |= {n: a[n][:0] for n in ("A", "D", "dt_bias")}
        if axis in ("G", "N"):
            changed["C"] = a["C"].narrow(place, 0, 0)
        if axis == "P":
            changed["z"] = a["z"].narrow(place, 0, 0)
        return (
            {"initial_states": None, "cu_seqlens": None, "cu_seqlens_cpu": None}
            | {"return_varlen_states": False}
            | changed
        )

    return change


# what is wrong: the error, its message, the changes to a valid call
CASES = {
    "x of a token more": (ValueError, r"dt must have shape \[B=1, T=21, H=4\], got \(1, 20, 4\): "
                          "T=21 is that of x", longer("x", 1)),
    "dt heads": (ValueError, r"dt must have shape \[B=1, T=20, H=4\], got \(1, 20, 5\)",
                 longer("dt", 2)),
    "dt of channels": (ValueError, r"dt must have 3 dimensions \[B, T, H\], got 4",
                       other("dt", lambda t: t[..., None])),
    "A heads": (ValueError, r"A must have shape \[H=4\], got \(5,\)", longer("A", 0)),
    "A of Mamba-1": (ValueError, r"A must have 1 dimensions \[H\], got 2",
                     other("A", lambda t: t[:, None])),
    "B without groups": (ValueError, r"B must have 4 dimensions", other("B", lambda t: t[:, :, 0])),
    "C groups": (ValueError, r"C must have shape .*G=2.*, got \(1, 20, 3, 24\)", longer("C", 2)),
    "C size": (ValueError, r"C must have shape .*, got \(1, 20, 2, 25\)", longer("C", 3)),
    "groups": (ValueError, "number of groups G that divides H=4, got G=3",
               lambda a: longer("B", 2)(a) | longer("C", 2)(a)),
    "D heads": (ValueError, r"D must have shape \[H=4\], got \(5,\)", longer("D", 0)),
    "D channels": (ValueError, r"D must have shape \[H=4, P=16\], got \(4, 17\)",
                   other("D", lambda t: t[:, None].repeat(1, 17))),
    "D rank": (ValueError, r"D must have 1 dimensions \[H\], got 3",
               other("D", lambda t: t[:, None, None])),
    "z": (ValueError, r"z must have shape \[B=1, T=20, H=4, P=16\], got", longer("z", 3)),
    "dt_bias": (ValueError, r"dt_bias must have shape \[H=4\], got \(5,\)", longer("dt_bias", 0)),
    "states": (ValueError, r"initial_states must have shape \[N=3, H=4, P=16, .*\], got \(4, ",
               longer("initial_states", 0)),
    "states turned": (ValueError, r"initial_states must have shape .*, got \(3, 4, 24, 16\)",
                      other("initial_states", lambda t: t.mT)),
    "seq_idx rank": (ValueError, r"seq_idx must have shape \[B, T\] = \(1, 20\), got \(20,\)",
                     other("seq_idx", lambda t: t[0])),
    "seq_idx dtype": (TypeError, "seq_idx must be a tensor of int32 or int64, got torch.float32",
                      to("seq_idx", torch.float32)),
    "seq_idx narrow": (TypeError, "seq_idx must be a tensor of int32 or int64, got torch.int16",
                       to("seq_idx", torch.int16)),
    "long x": (ValueError, "x's last axis must be <= 256, got 257", wide(2)),
    "long B": (ValueError, "B's last axis must be <= 256, got 257", wide(3)),
    **{f"no {axis}": (ValueError, rf"{n} must have no empty axis but T, got \w=0", empty(n, axis))
       for n, axis in (("x", "B"), ("x", "H"), ("x", "P"), ("B", "G"), ("B", "N"))},
    **{f"chunk_size {value}": (error, message, lambda a, value=value: {"chunk_size": value})
       for value, error, message in (
           (0, ValueError, "chunk_size must be at least 1, got 0"),
           (-64, ValueError, "chunk_size must be at least 1, got -64"),
           (64.0, TypeError, "chunk_size must be an integer, got 64.0"),
           (True, TypeError, "chunk_size must be an integer, got True"),
           (None, TypeError, "chunk_size must be an integer, got None"),
       )},
    **{f"dt_limit {value}": (error, message, lambda a, value=value: {"dt_limit": value})
       for value, error, message in (
           (None, TypeError, "dt_limit must be two numbers, got None"),
           (1.0, TypeError, "dt_limit must be two numbers, got 1.0"),
           ((1.0,), TypeError, "dt_limit must be two numbers"),
           ((0.0, 1.0, 2.0), TypeError, "dt_limit must be two numbers"),
           ((0.0, "inf?"), TypeError, "dt_limit must be two numbers"),
           ((1.0, 0.5), ValueError, r"dt_limit must be \(least, largest\), got \(1.0, 0.5\)"),
           ((0.0, float("nan")), ValueError, r"dt_limit must be \(least, largest\)"),
       )},
    **{f"{flag} {value!r}": (TypeError, f"{flag} must be True or False, got {value!r}",
                             lambda a, flag=flag, value=value: {flag: value})
       for flag, value in (("dt_softplus", 2), ("return_final_states", "yes"),
                           ("return_varlen_states", 1.0))},
    "float64 in a kernel": (ValueError, "impl='triton' cannot run here: .* float64 was given",
                            lambda a: {"impl": "triton", "dt": a["dt"].double()}),
    "varlen states of a batch": (ValueError, "return_varlen_states=True needs cu_seqlens or",
                                 lambda a: {"cu_seqlens": None, "cu_seqlens_cpu": None,
                                            "initial_states": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_before_any_kernel(case, device):
    assert refused(mamba_chunk_scan_combined, CASES[case], *everything(device))


@pytest.mark.parametrize("impl", ("reference", "triton"))
def test_b_and_c_may_be_wider_than_x(impl, device):
    """As mamba_ssm is called: products round them, and their gradients have their dtype."""
    x, options = everything(device)
    x["x"] = x["x"].bfloat16()

    def both(x):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items() if n in "xBC"}
        out = mamba_chunk_scan_combined(**x | leaves, **options, impl=impl)[0]
        generator = torch.Generator().manual_seed(1)
        dout = torch.randn(out.shape, generator=generator).to(out)
        return out, dict(zip(leaves, torch.autograd.grad(out, leaves.values(), dout), strict=True))

    out, got = both(x)
    rounded, want = both(x | {n: x[n].bfloat16() for n in "BC"})
    assert out.dtype == torch.bfloat16 and torch.equal(out, rounded)
    for n, t in want.items():
        assert got[n].dtype == x[n].dtype and torch.equal(got[n], t.to(x[n].dtype))


@pytest.mark.parametrize(
    ("given", "taken"), ((1, 16), (8, 16), (16, 16), (48, 64), (100, 128), (1000, 1024))
)
def test_a_chunk_of_any_size_is_rounded_up(given, taken, device):
    x, options = everything(device)
    got, want = (
        mamba_chunk_scan_combined(**x, **options | {"chunk_size": n}) for n in (given, taken)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_other_ways_to_write_an_argument(device):
    """A flag as 0 or 1, limits as a list of integers or an infinity, x and chunk_size by name."""
    x, options = everything(device)
    want = mamba_chunk_scan_combined(**x, **options)
    options |= {"dt_softplus": 1, "dt_limit": [0, float("inf")], "return_final_states": 1}
    tokens = (x.pop(n) for n in ("x", "dt", "A", "B", "C"))
    got = mamba_chunk_scan_combined(*tokens, options.pop("chunk_size"), **x, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
