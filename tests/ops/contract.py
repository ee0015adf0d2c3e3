"""The operators over sequences, a record a form: what the tests of the contract need of each.

test_contract has what every operator keeps, test_contract_packed what holds of packed sequences,
test_contract_refused what is refused. A property that an operator cannot have is in its record,
with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from zlib import crc32

import gdn_checks
import kda_checks
import pytest
import torch
from dplr import dplr_checks
from gdn_checks import DTYPES
from grids import FULL, combinations, few, name, pairs
from ops.conv import conv_cases
from ops.ema import ema_cases
from ops.ssd import ssd_cases
from recurrent_cases import case, double, kda_case
from torch import Tensor

from linattn_edu import (
    causal_conv1d,
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    ema_scan,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
    mamba_chunk_scan_combined,
)
from linattn_edu.kernels.ssd import ema as ema_kernels
from linattn_edu.kernels.ssd import ema_bwd as ema_bwd_kernels
from linattn_edu.reference.delta.recurrent import recurrent

GPU = torch.cuda.is_available()
IMPLS = ("reference", "triton")
HALF = DTYPES[1:]
GATE = ("A_log", "dt_bias")
STATES = ("ht", "initial_state", "dinitial_state")
NAMES = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel")
FLAGS = (*NAMES, "allow_neg_eigval", "output_final_state", "state_v_first")
OF_KDA = (*FLAGS, "safe_gate", "disable_recompute", "return_intermediate_states")
# of beta's sigmoid: GDN-2 has no such flags token by token, and the first not in chunks
NEITHER = ("use_beta_sigmoid_in_kernel", "allow_neg_eigval")
RAW = dict.fromkeys(("raw_qk", "raw_beta", "raw_gate"), True)


@dataclass(frozen=True, eq=False)
class Form:
    """An operator, and what makes it take one of its ways.

    `f(**tensors, **options)` returns the output and the final state, or None for it. `make(B, T,
    sizes, dtype, device, N=, raw=, strong=, state=, seed=)` returns the tensors by name and the
    options that say how they are meant. raw: before the gate of a layer, with its parameters.
    strong: gates as strong as they may be, or numbers as far from others. N: initial states, if not
    B; state: whether there are any. `exact(x, do, dht, **options)` is what `run` should give, in
    float64; `check(got, want, dtype)` compares. `cotangents(x, N)`: gradients of both outputs.
    """

    name: str
    f: Callable
    make: Callable
    cotangents: Callable
    exact: Callable
    check: Callable
    T: int  # a short sequence, of more than a chunk
    sizes: tuple  # of heads and channels
    tokens: tuple  # tensors of the shape [B, T, ...]
    gate: str  # a number of a token and a head that the whole state depends on
    wide: tuple  # what may be float32 beside 16 bits
    alone: tuple  # what may be the only one that needs a gradient, if raw
    summed: tuple = ()  # parameters: their gradients are sums over all tokens
    same: tuple = ()  # gradients that have the bits of the prefix whose outputs are used
    but: tuple = ()  # (gradient, dtype) that have not
    options: dict = field(default_factory=dict)
    dtypes: tuple = DTYPES
    # length of a chunk -> number of tokens, and where others begin
    cuts: dict = field(default_factory=dict)
    lengths: tuple = (15, 0, 64, 1, 65, 0)  # of packed sequences
    # (T, sizes) in which a row of the tables takes more than a tile, and more for its outputs
    rows: tuple = ()
    crowd: tuple = ()  # B, T, sizes on a GPU: more programs than it runs at once
    exactly: bool = False  # the reference, too, has the bits of other batches
    chunk: int | None = 16  # length of the chunks of `chunk_indices`
    known: tuple = ("cu_seqlens_cpu", "chunk_indices")  # what else says where sequences begin
    patches: tuple = ()  # (module, name, value) that hold for the form
    required: tuple = ()  # tensors
    alike: tuple = ()  # tensors of the dtype of the first
    flags: tuple = ("output_final_state",)
    decay: tuple = ()  # log decays
    lacks: dict = field(default_factory=dict)  # property -> why there is none

    def __str__(self) -> str:
        return self.name

    def draw(self, B, T, dtype, device, **kinds) -> tuple[dict[str, Tensor], dict]:
        return self.make(B, T, kinds.pop("sizes", self.sizes), dtype, device, **kinds)

    def short(self, dtype, device, **kinds):
        """(tensors, do, dht, options) of one short sequence."""
        x, options = self.draw(1, self.T, dtype, device, **kinds)
        return x, *self.cotangents(x), options

    def packed(self, lengths, dtype, device, **kinds):
        """(tensors, do, dht, options) of packed sequences of these lengths, with a state each."""
        N = len(lengths)
        x, options = self.draw(1, sum(lengths), dtype, device, N=N, **kinds)
        return x, *self.cotangents(x, N), options

    def __call__(self, x, **options):
        return self.f(**x, **self.options | options)

    def run(self, x, do, dht, f=None, **options) -> dict[str, Tensor]:
        """Outputs and gradients by name, as gdn_checks.run has them."""
        options = {"output_final_state": True} | self.options | options
        return gdn_checks.run(x, do, dht, f or self.f, **options)

    def part(self, x, n, tokens) -> dict[str, Tensor]:
        """Sequence n of packed tensors, outputs or gradients."""
        return {
            m: t[n : n + 1] if m in STATES
            else t if m.removeprefix("d") in self.summed or m in self.summed
            else t[:, tokens]
            for m, t in x.items()
        }  # fmt: skip

    def of_batch(self, x, n) -> dict[str, Tensor]:
        """Sequence n of a batch; of gradients without those that are sums over all sequences."""
        return {
            m: t if m in self.summed else t[n : n + 1]
            for m, t in x.items()
            if not (m[0] == "d" and m[1:] in self.summed)
        }

    def sums(self) -> list[str]:
        return [f"d{n}" for n in self.summed]


def strengthen(x, least):
    """Some gates as strong as they may be, some open."""
    g, drawn = x["g"], x["v"][..., :1] if x["g"].ndim == 4 else x["v"][..., 0]
    return x | {"g": torch.where(drawn > 0.5, least, torch.where(drawn < -0.8, 0, g))}


def chunked(checks, safe=False):
    """`make` of a chunked delta rule; `safe`: log decays of at least -5."""

    def make(B, T, sizes, dtype, device, *, raw=False, strong=False, **kinds):
        kinds |= {"safe": True} if safe else {}
        x = checks.inputs(B, T, *sizes, dtype, device, **kinds, **RAW if raw else {})
        options = dict.fromkeys(NAMES, True) if raw else {}
        if raw and safe:
            options["lower_bound"] = -5.0
        return (strengthen(x, -5.0 if safe else -1000.0) if strong else x), options

    return make


def by_token(channels):
    """`make` of a delta rule token by token, with every gate that it takes."""

    def make(B, T, sizes, dtype, device, *, raw=False, strong=False, **kinds):
        heads, K, V = sizes
        flags = ("norm", "sigmoid") if raw else ()
        kinds |= {"B": B, "dtype": dtype, "device": device}
        if channels:
            gate = "softplus" if raw else "log"
            x, _ = kda_case(T, heads, K, V, gate=gate, flags=flags, **kinds)
        else:
            flags = (*flags, "gate") if raw else ()
            x = case(T, heads, K, V, gates="g gk gv", flags=flags, **kinds)
        x = {n: t for n, t in x.items() if t is not None}
        options = dict.fromkeys(NAMES, True) if raw else {}
        return (strengthen(x, -1000.0) if strong else x), options

    return make


def gated(make):
    """`make` with the gates of GDN-2 in the place of beta."""

    def gates(*args, **kinds):
        x, options = make(*args, **kinds)
        options.pop("use_beta_sigmoid_in_kernel", None)
        return gdn_checks.gated(x), options

    return gates


def recurrence(x, do, dht, **options):
    """What fused_recurrent_* give: autograd of the recurrence in float64."""

    def f(*, gk=None, gv=None, **x):
        q, k, v, g, beta, *write, S = gdn_checks.recurrence_arguments(x, **options)
        g, gk = (g, gk) if g.ndim == 3 else (None, g)
        write = dict(zip(("write",), write, strict=False))
        return recurrent(q, k, v, g, beta, gk=gk, gv=gv, initial_state=S, **write)

    do, dht = (y if y is None else y.double() for y in (do, dht))
    return gdn_checks.run(double(x), do, dht, f)


def tolerance(n, dtype):
    kind = 0 if n in ("o", "ht") else 2 if n in ("dgk", "dgv", *gdn_checks.SCALARS) else 1
    return gdn_checks.TOLERANCES[dtype][kind]


def mamba(*, initial_state=None, output_final_state=False, cu_seqlens=None, **arguments):
    """mamba_chunk_scan_combined under the others' names: out, and the states that are asked for."""
    asked = "return_final_states" if cu_seqlens is None else "return_varlen_states"
    y = mamba_chunk_scan_combined(
        **arguments, initial_states=initial_state, cu_seqlens=cu_seqlens,
        **{asked: output_final_state},
    )  # fmt: skip
    return y if output_final_state else (y, None)


def renamed(x, old, new):
    return {n.replace(old, new): t for n, t in x.items()}


def of_mamba(B, T, sizes, dtype, device, *, raw=False, strong=False, N=None, state=True, **kinds):
    """`make` of Mamba-2: everything, with documents, if raw; else with D for each channel."""
    kinds |= {"decay": "reset"} if strong else {}
    given = "all" if raw else "channels"
    x, options = ssd_cases.inputs(B, T, *sizes, dtype, device, given, states=N, **kinds)
    x = renamed(x, "initial_states", "initial_state")
    return {n: t for n, t in x.items() if state or n != "initial_state"}, options


def exact_mamba(x, do, dht, **options):
    want = ssd_cases.exact(renamed(x, "initial_state", "initial_states"), do, dht, **options)
    return renamed(want, "initial_states", "initial_state")


def of_ema(B, T, sizes, dtype, device, *, raw=False, strong=False, N=None, state=True, **kinds):
    H, D = sizes
    gate, given = "reset" if strong else "trained", "both" if state else "weight"
    x = ema_cases.tensors(T, D, given, gate, dtype, device, B=B, H=H, **kinds)
    if strong:
        x["weight"] = 100 * x["weight"]
    if N and state:
        x["initial_state"] = torch.randn(N, H, D, device=device, dtype=x["g"].dtype)
    return x, {}


def of_conv(B, T, sizes, dtype, device, *, raw=False, strong=False, state=True, seed=0, **kinds):
    D, W = sizes
    without = () if state else ("initial_state",)
    x = conv_cases.tensors(T, D, W, dtype, device, B=B, seed=seed, without=without, **kinds)
    if strong:  # what is no number, too
        x["x"][:] = torch.nan
    return x, {"activation": "silu"}


def of_dplr(B, T, sizes, dtype, device, *, raw=False, **kinds):
    return dplr_checks.inputs(B, T, *sizes, dtype, device, **kinds), {}


CHUNKED = {
    "cotangents": gdn_checks.cotangents,
    "exact": gdn_checks.exact,
    "tokens": ("q", "k", "v", "g", "beta"),
    "gate": "g",
    "wide": ("g", "beta", "initial_state"),
    "alone": ("q", "initial_state", *GATE),
    "summed": GATE,
    "required": ("q", "k", "v", "g", "beta"),
    "alike": ("k", "v"),
    "flags": FLAGS,
    "decay": ("g",),
}
gdn = Form(
    "gdn", chunk_gated_delta_rule, chunked(gdn_checks), **CHUNKED, check=gdn_checks.check,
    T=80, sizes=(1, 2, 24, 40), same=("q", "v"), cuts={64: (130, (1, 40, 64, 100))},
    lengths=(15, 0, 64, 1, 65, 100, 0),
    rows=((40, (1, 2, 72, 100)), (70, (1, 2, 100, 40)), (70, (1, 2, 200, 16))),
    crowd=(40, 300, (2, 4, 64, 128)),
)  # fmt: skip
# in the interpreter one cut before the middle of a block of 16, one in another block or chunk
CUTS = dict.fromkeys((32, 64), (130, (1, 5, 15, 16, 17, 31, 33, 47, 64, 65, 77, 96)))
CUTS = CUTS if GPU else {32: (36, (16, 5, 33)), 64: (20, (5, 17))}
kda = Form(
    "kda", chunk_kda, chunked(kda_checks), **CHUNKED | {"flags": OF_KDA}, check=kda_checks.check,
    T=20, sizes=(1, 2, 12, 8), same=("q", "v"), options={"chunk_size": 16}, cuts=CUTS,
    lengths=(15, 0, 64, 1, 65, 100, 0) if GPU else (15, 0, 1, 17, 0),
    # where a chunk has one anchor, later gates choose it: the last bits of dq follow
    but=(("q", torch.bfloat16),),
    rows=((9, (1, 1, 40, 72)),), crowd=(40, 300, (2, 4, 64, 128)),
)  # fmt: skip
safe = replace(
    kda, name="kda, safe, all kept", make=chunked(kda_checks, safe=True),
    options=kda.options | {"safe_gate": True, "disable_recompute": True},
)  # fmt: skip
# what has b and w in the place of beta
GATED = {
    "tokens": ("q", "k", "v", "g", "b", "w"),
    "wide": ("g", "b", "w", "initial_state"),
    "required": ("q", "k", "v", "g", "b", "w"),
}
gdn2 = replace(
    kda, name="gdn2", f=chunk_gdn2, make=gated(chunked(kda_checks)), **GATED,
    flags=tuple(n for n in OF_KDA if n not in NEITHER[:1]),
)  # fmt: skip
BY_TOKEN = {
    "cotangents": gdn_checks.cotangents,
    "exact": recurrence,
    "check": partial(gdn_checks.check, tolerance=tolerance),
    "T": 5,
    "sizes": ((1, 2), 16, 12),
    "tokens": ("q", "k", "v", "g", "gk", "gv", "beta"),
    "gate": "g",
    "wide": ("g", "beta", "initial_state"),
    "alone": ("v", "initial_state", *GATE),
    "summed": GATE,
    "cuts": {None: (6, (1, 4))},
    "lengths": (2, 0, 3, 1),
    "crowd": (300, 50, ((2, 4), 64, 128)),
    "known": (),
    "chunk": None,
    "required": ("q", "k", "v"),
    "flags": (*FLAGS, "inplace_final_state"),
    "decay": ("g",),
    "lacks": {
        "test_rows_of_a_generation": "its tiles are of any generation: no table",
        "test_no_wait_for_the_device": "it takes cu_seqlens alone, and reads it on a GPU never",
    },
}
recurrent_gdn = Form(
    "gdn, token by token", fused_recurrent_gated_delta_rule, by_token(False),
    **BY_TOKEN | {"wide": ("g", "gk", "gv", "beta", "initial_state"), "decay": ("g", "gk", "gv")},
)  # fmt: skip
recurrent_kda = Form(
    "kda, token by token",
    fused_recurrent_kda,
    by_token(True),
    **BY_TOKEN | {"required": ("q", "k", "v", "g", "beta")},
)
recurrent_gdn2 = replace(
    recurrent_kda,
    name="gdn2, token by token",
    f=fused_recurrent_gdn2,
    make=gated(by_token(True)),
    **GATED,
    flags=tuple(n for n in recurrent_kda.flags if n not in NEITHER),
)
dplr = Form(
    "dplr, token by token", fused_recurrent_dplr_delta_rule, of_dplr,
    **BY_TOKEN
    | {
        "exact": dplr_checks.exact,
        "check": partial(gdn_checks.check, tolerance=dplr_checks.tolerance),
        "sizes": (2, 16, 12),
        "tokens": dplr_checks.NAMES,
        "gate": "gk",
        "wide": ("gk", "initial_state"),
        "alone": ("v", "a", "initial_state"),
        "summed": (),
        "crowd": (300, 50, (4, 64, 128)),
        "required": dplr_checks.NAMES,
        "alike": ("k", "v", "a", "b"),
        "flags": ("output_final_state", "reverse"),
        "decay": ("gk",),
    },
)  # fmt: skip
dplr_chunks = replace(
    dplr, name="dplr", f=chunk_dplr_delta_rule, T=20, options={"chunk_size": 16}, cuts=CUTS,
    lengths=(15, 0, 64, 1, 65, 100, 0) if GPU else (15, 0, 1, 17, 0), chunk=16,
    known=("cu_seqlens_cpu",), rows=((9, (1, 40, 72)),), crowd=(40, 300, (4, 64, 128)),
    flags=("output_final_state", "safe_gate", "disable_recompute"), lacks={},
)  # fmt: skip
SSD = {
    "f": mamba,
    "make": of_mamba,
    "cotangents": ssd_cases.cotangents,
    "exact": exact_mamba,
    "check": ssd_cases.check,
    "T": 70,
    "tokens": ("x", "dt", "B", "C", "z", "seq_idx"),
    "gate": "dt",
    "wide": ("dt", "A", "D", "z", "dt_bias", "initial_state"),
    "alone": ("x", "dt", "A", "D", "z", "dt_bias", "initial_state"),
    "summed": ("A", "D", "dt_bias"),
    "options": {"chunk_size": 64},
    "known": ("cu_seqlens_cpu",),
    "required": ("x", "dt", "A", "B", "C"),
    "flags": ("dt_softplus",),
    "decay": ("A",),
    "cuts": {128: (140, (1, 40, 64, 128))},
}
ssd = [
    Form(
        f"ssd, {form}", **SSD, sizes=(2, 1, P, N), dtypes=dtypes, crowd=(8, 300, (2, 1, P, N)),
        rows=((70, (2, 1, 40, max(N, 72))),),
    )
    for form, P, N, dtypes in (
        ("fused", 24, 40, HALF),
        ("staged", 24, 130, few(torch.bfloat16, more=HALF[:1])),
        ("float32", 24, 40, DTYPES[:1]),
    )
]  # fmt: skip
ema = Form(
    "ema", ema_scan, of_ema, ema_cases.cotangents, ema_cases.exact, ema_cases.check,
    T=40, sizes=(3, 20), tokens=("x", "g", "weight"), gate="g",
    required=("x", "g"), decay=("g",),
    wide=("g", "weight", "initial_state"), alone=("x", "weight", "initial_state"), same=("x",),
    options={"chunk_size": 16}, cuts={64: (130, (1, 40, 64, 100))},
    lengths=(15, 0, 64, 1, 81, 0), rows=((70, (3, 140)),), crowd=(8, 300, (3, 140)),
)  # fmt: skip
in_pieces = replace(
    ema, name="ema, in pieces", dtypes=DTYPES[:1],
    patches=((ema_kernels, "PIECE", 2), (ema_bwd_kernels, "PIECE", 2)),
)  # fmt: skip
conv = Form(
    "conv", causal_conv1d, of_conv, conv_cases.cotangents, conv_cases.exact, conv_cases.check,
    T=20, sizes=(20, 4), tokens=("x", "residual"), gate="x",
    required=("x", "weight"),
    wide=("weight", "bias", "residual", "initial_state"),
    alone=("x", "bias", "residual", "initial_state"), summed=("weight", "bias"),
    same=("x", "residual"), cuts={None: (70, (1, 63, 66))}, lengths=(2, 0, 64, 1, 70, 0),
    crowd=(8, 300, (200, 4)), exactly=True, chunk=64,
    lacks={
        "test_rows_of_a_generation": "one tile for all generations",
        "test_a_nan_shows": "a token reaches W - 1 others and no state",
    },
)  # fmt: skip
BY_CHANNEL = (gdn2, recurrent_gdn2)
FORMS = (
    gdn,
    kda,
    safe,
    recurrent_gdn,
    recurrent_kda,
    *BY_CHANNEL,
    dplr,
    dplr_chunks,
    *ssd,
    ema,
    conv,
)
DELTA = (gdn, kda, safe, recurrent_gdn, recurrent_kda, *BY_CHANNEL)


def forms(property: str, *among: Form, dtypes=DTYPES, **axes):
    """A mark: `property` for each form that has it, with dtypes and axes; a form that has not a
    dtype takes the last one that it has instead.

    On a GPU every pair, in the full suite every combination. In the interpreter each form once:
    every pair of the other values meets in some form, and where they begin is another place for
    each property. Two of three run the kernels.
    """
    having = [f for f in among or FORMS if property not in f.lacks]
    having = [f for f in having if any(d in f.dtypes for d in dtypes)]
    if FULL or GPU:
        found = combinations(form=having, dtype=dtypes, **axes)
    else:
        kernels = {"impl": (*IMPLS[1:], *IMPLS)} if axes.get("impl") == IMPLS else {}
        rest, turn = pairs(dtype=dtypes, **axes | kernels), crc32(property.encode())
        count = max(len(having), len(rest))
        found = [(having[i % len(having)], *rest[(i + turn) % len(rest)]) for i in range(count)]
    rows = {}
    for form, dtype, *rest in found:
        own = [d for d in dtypes if d in form.dtypes]
        rows[(form, dtype if dtype in own else own[-1], *rest)] = None
    return pytest.mark.parametrize(("form", "dtype", *axes), list(rows), ids=name)
