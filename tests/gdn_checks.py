"""The chunked operators as a whole: inputs, gradients by autograd and in float64, tolerances.

The inputs are those of chunk_gated_delta_rule; kda_checks has those of chunk_kda. What should come
out is told from the shape of the gates.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.kernels.host import plan
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.kernels.routes.choosing import first
from linattn_edu.kernels.rows import device_of
from linattn_edu.ops import gdn, kda
from linattn_edu.reference.delta.recurrent import recurrent, recurrent_bwd
from linattn_edu.testing import assert_close

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# relative RMS against float64: (o, final state), (dq, dk, dv, dh0), (dbeta, dg and its parameters)
TOLERANCES = {
    torch.float32: (1e-5, 1e-5, 3e-5),
    torch.float16: (5e-3, 8e-3, 2e-2),
    torch.bfloat16: (5e-3, 8e-3, 2e-2),
}
TINY = 1e-6
# a row of a kernel's table is right only on the generation it is for; the interpreter has none
GENERATIONS = (
    [device_of(torch.empty(0, device="cuda"))[0]]
    if torch.cuda.is_available()
    else ["turing", "ampere"]
)
# kernels in Gluon wherever they run, however short a call
PAYS = {"ENOUGH": 0, "CROWDED": 0, "LONG": 0}
SCALARS = ("dg", "dbeta", "dA_log", "ddt_bias")


def holds(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the fused stages of the delta rule hold such heads where they are."""
    return by_kind.gdn_backward_stages(kind_of(q, *v.shape[2:], 64, None)).takes == "fused"


def without_gluon(device: str | torch.device) -> str | None:
    """Why no kernel in Gluon runs on a device, for `pytest.skip`; None: they run."""
    kind = kind_of(torch.empty(1, 1, 1, 1, device=device), 1, 1, 64, None)
    return first(by_kind.GLUON, kind)


def halves_run(device: str | torch.device) -> None:
    """Skip where no kernel keeps numbers in halves."""
    if device_of(torch.empty(1, device=device))[0] != "hopper":
        pytest.skip("needs a Hopper GPU: no other has kernels in halves")


def by_key_head(name: str, x: Tensor, heads: int) -> Tensor:
    """[sequence, q/k head, ...] of an output, or of a gradient, by its name."""
    axis = 1 if name in ("ht", "dinitial_state") else 2
    return x.movedim(axis, 1).unflatten(1, (heads, -1))


def some_forget(g: Tensor, gates: str) -> None:
    """Gates [B, T, 4] of which the heads that are "slow" never forget; "mixed": the first forgets
    in a chunk, the second at one place, the third never, the fourth in two chunks.
    """
    g.fill_(-0.01 if gates == "slow" else -3.0)
    if gates == "mixed":
        g[..., 1:] = torch.tensor([-0.01, -0.01, -0.25], device=g.device)
        g[:, 500:510, 1] = -40.0


def pretend(monkeypatch: pytest.MonkeyPatch, generation: str) -> None:
    """The kernels take the rows of this generation, for a GPU of one multiprocessor."""
    for operator in (gdn, kda):
        operator.stages("triton")  # loads them all
    for name, module in list(sys.modules.items()):
        if name.startswith("linattn_edu.kernels") and hasattr(module, "device_of"):
            monkeypatch.setattr(module, "device_of", lambda x: (generation, 1))


def tolerance(name: str, dtype: torch.dtype) -> float:
    """The tolerance of an output ("o", "ht") or of a gradient ("dq", ...)."""
    kind = 0 if name in ("o", "ht") else 2 if name in SCALARS else 1
    return TOLERANCES[dtype][kind]


def inputs(
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    norm: float = 1.0,
    mask: float = 0.0,
    raw_qk: bool = False,
    raw_beta: bool = False,
    raw_gate: bool = False,
    dt_bias: bool = True,
    state: bool = True,
    N: int | None = None,
) -> dict[str, Tensor]:
    """Tensor arguments by name; the gate is logsigmoid(normal) / norm, open at a share `mask`.

    raw_*: before the l2norm, the sigmoid, the gate of a layer. N: initial states, B if None.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    x = {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, HV, V)}
    if not raw_qk:
        x |= {n: F.normalize(x[n], dim=-1) for n in ("q", "k")}
    x = {n: t.to(dtype) for n, t in x.items()}
    x["beta"] = randn(B, T, HV) if raw_beta else randn(B, T, HV).sigmoid()
    drawn = torch.rand(B, T, HV, generator=generator, device=device)
    x["g"] = randn(B, T, HV) if raw_gate else F.logsigmoid(randn(B, T, HV)) / norm * (drawn > mask)
    if raw_gate:
        x["A_log"] = randn(HV)
        x |= {"dt_bias": randn(HV)} if dt_bias else {}
    if state:
        x["initial_state"] = randn(B if N is None else N, HV, K, V)
    return x


def gated(x: dict[str, Tensor], seed: int = 3, most: float = 1.0) -> dict[str, Tensor]:
    """The arguments with gates of channels for what is erased, up to `most`, and written: GDN-2's b
    and w in the place of beta.
    """
    x = {**x}
    generator = torch.Generator(device=x["q"].device).manual_seed(seed)
    options = {"generator": generator, "device": x["q"].device, "dtype": x.pop("beta").dtype}
    shape = x["v"].shape[:3]
    b = torch.randn(*shape, x["q"].shape[-1], **options).sigmoid()
    return x | {"b": most * b, "w": torch.randn(x["v"].shape, **options).sigmoid()}


def cotangents(x: dict[str, Tensor], N: int | None = None, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random gradients of o and of the final state."""
    v, K = x["v"], x["q"].shape[-1]
    generator = torch.Generator(device=v.device).manual_seed(seed)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    options = {"generator": generator, "device": v.device, "dtype": wide}
    do = torch.randn(v.shape, **options).to(v.dtype)
    return do, torch.randn(N or v.shape[0], v.shape[2], K, v.shape[3], **options)


def run(
    x: dict[str, Tensor], do: Tensor | None, dht: Tensor | None, f=chunk_gated_delta_rule, **options
) -> dict[str, Tensor]:
    """Outputs of f and, by autograd, the gradient of every tensor of x but integers; None: no
    gradient in.
    """
    integers = {n: t for n, t in x.items() if not t.is_floating_point()}
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items() if n not in integers}
    o, ht = f(**leaves, **integers, **options)
    pairs = [(y, dy) for y, dy in ((o, do), (ht, dht)) if dy is not None]
    outputs, given = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, leaves.values(), given)
    got = {"o": o.detach()} | ({} if ht is None else {"ht": ht.detach()})
    return got | {f"d{n}": dx for n, dx in zip(leaves, gradients, strict=True)}


def triton(x: dict[str, Tensor], do: Tensor | None, dht: Tensor | None, **options):
    """`run` with the kernels, returning the final state."""
    return run(x, do, dht, output_final_state=True, impl="triton", **options)


def log_decay(x: dict[str, Tensor], lower_bound: float | None) -> Tensor:
    """The gates of fla-core 0.6.0, by their formulas."""
    a, rate = x["g"], x["A_log"].exp() if "A_log" in x else torch.ones_like(x["g"][0, 0, :, ..., 0])
    a = a + x["dt_bias"].view(a.shape[2:]) if "dt_bias" in x else a
    rate = rate.view(-1, *(1,) * (a.ndim - 3))
    if lower_bound is None:
        return -rate * torch.logaddexp(a, torch.zeros_like(a))
    return lower_bound * torch.sigmoid(rate * a)


def recurrence_arguments(
    x: dict[str, Tensor],
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    state_v_first: bool = False,
) -> list[Tensor | None]:
    """q, k, v, g, beta, or b and w, and the initial state of the plain recurrence, as the flags
    define them.
    """
    names = ("q", "k", "v", "g", *(("beta",) if "beta" in x else ("b", "w")))
    q, k, v, g, beta, *write = (x[n] for n in names)
    if use_qk_l2norm_in_kernel:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    if use_gate_in_kernel:
        g = log_decay(x, lower_bound)
    state = x.get("initial_state")
    return [q, k, v, g, beta, *write, state.mT if state_v_first and state is not None else state]


def exact(
    x: dict[str, Tensor],
    do: Tensor,
    dht: Tensor | None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    **flags: bool | float | None,
) -> dict[str, Tensor]:
    """What `run` should give, in float64: the recurrence, its adjoint, autograd of the flags."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    arguments = recurrence_arguments(leaves, **flags)
    do = do.double()
    dht = dht if dht is None else dht.double()
    if flags.get("state_v_first") and dht is not None:
        dht = dht.mT
    given = [y if y is None else y.detach() for y in arguments]
    o, ht, *gradients = _packed(given, do, dht, scale, cu_seqlens)
    pairs = [(y, dy) for y, dy in zip(arguments, gradients, strict=True) if y is not None]
    values, gradients = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(values, leaves.values(), gradients)
    want = {"o": o, "ht": ht.mT if flags.get("state_v_first") else ht}
    return want | {f"d{n}": dx for n, dx in zip(leaves, gradients, strict=True)}


def _packed(arguments, do, dht, scale, cu_seqlens) -> list[Tensor]:
    """o, the final state, dq, dk, dv, dg, dbeta, dwrite if given, dh0 of the sequences, each by
    itself.
    """
    if cu_seqlens is None:
        return _alone(arguments, do, dht, scale)
    *tokens, state = arguments
    parts = []
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        one = [y[:, a:b] for y in tokens] + [None if state is None else state[n : n + 1]]
        parts.append(_alone(one, do[:, a:b], None if dht is None else dht[n : n + 1], scale))
    sequence_axis = (1, 0, *(1 for _ in tokens), 0)
    return [torch.cat(p, d) for p, d in zip(zip(*parts, strict=True), sequence_axis, strict=True)]


def _alone(arguments, do, dht, scale) -> list[Tensor]:
    q, k, v, g, beta, *write, state = arguments
    if not q.shape[1]:
        zero = v.new_zeros(1, v.shape[2], q.shape[-1], v.shape[-1])
        ht, dh0 = (zero if y is None else y for y in (state, dht))
        return [
            do,
            ht,
            q,
            k,
            v,
            g,
            beta,
            *write,
            dh0,
        ]  # no tokens: empty, and the state goes through
    g, gk = (g, None) if g.ndim == 3 else (None, g)
    options = {"gk": gk, "scale": scale, "initial_state": state}
    options |= dict(zip(("write",), write, strict=False))
    o, ht = recurrent(q, k, v, g, beta, **options)
    results = recurrent_bwd(q, k, v, g, beta, do, dht, **options)
    dq, dk, dv, dg, dbeta, dgk, _, dh0, *dwrite = results
    return [o, ht, dq, dk, dv, dg if gk is None else dgk, dbeta, *dwrite, dh0]


def check(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    dtype: torch.dtype,
    every: float = 0.0,
    *,
    tolerance: Callable[[str, torch.dtype], float] = tolerance,
    **at_least: float,
) -> None:
    """Compare every output and gradient by name; all errors are in the one report.

    every, at_least: what the tolerance is at least, of all and of the named ones. What is smaller
    than TINY in rms, as the gradient of a state behind closed gates, is compared as if it were of
    that size: numbers of float16 and decays below 2^-150 end there.
    """
    failed = []
    for name, y in got.items():
        tol = max(tolerance(name, dtype), every, at_least.get(name, 0))
        rms = want[name].square().mean().sqrt().item() if want[name].numel() else 0
        shift = TINY if rms < TINY else 0
        try:
            assert_close(name, y + shift, want[name] + shift, tol)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n" + "\n".join(failed)


def spacing(g: Tensor, chunk_size: int = 64) -> float:
    """How well float32 tells apart the decays of a chunk: they are differences of sums of g."""
    sums = torch.stack([x.sum(1).abs().max() for x in g.double().split(chunk_size, 1)])
    return 2**-24 * sums.max().item()


def boundaries(lengths, device="cpu", dtype=torch.int32) -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor], *without: str):
    """Assert that all but the named ones are equal to the bit."""
    different = [n for n in want if n not in without and not torch.equal(got[n], want[n])]
    assert not different, f"other bits: {different}"


def refused(f, change: tuple, x: dict[str, Tensor], options: dict) -> bool:
    """Call f with a change that it must refuse, (error, message, arguments -> other arguments),
    before any kernel runs; False if the change needs an argument that is not there.
    """
    error, message, changes = change
    given = {n: v for n, v in (x | options).items() if v is not None}
    try:
        changed = given | changes(given)
    except KeyError:
        return False
    with launches() as ran, pytest.raises(error, match=message):
        f(**changed)
    assert not ran
    return True


@contextmanager
def fused_backward() -> Iterator[None]:
    """chunk_gated_delta_rule runs its backward pass in the fused stages, whatever the inputs."""
    module = sys.modules["linattn_edu.ops.gdn.chunk"]
    operator = module.chunk

    def call(*args, save: str, **more):  # without A the staged backward pass cannot run
        kept = [n for n in save.split() if n not in ("A", "P", "AG")]
        return operator(*args, save=" ".join((*kept, "P", "AG")), **more)

    with (
        mock.patch.object(operator, "stages", gdn.fused_stages),
        mock.patch.object(module, "chunk", call),
    ):
        yield


@contextmanager
def no_wait() -> Iterator[None]:
    """Any wait of the host for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def launches() -> Iterator[list]:
    """The list of the kernels launched meanwhile."""
    ran, kinds = [], (InterpretedFunction, JITFunction)
    originals = [kind.run for kind in kinds]

    def counted(original):
        def run(self, *args, **kwargs):
            ran.append(self)
            return original(self, *args, **kwargs)

        return run

    try:
        for kind, original in zip(kinds, originals, strict=True):
            kind.run = counted(original)
        with plan.off():  # a program launches past Triton's front
            yield ran
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.run = original


def by_value(monkeypatch) -> None:
    """PyTorch's sigmoid and softplus of a number alone, wherever in a tensor it stands.

    A CPU computes what is left beside whole vectors by another formula, so that last bits depend on
    the batch. In float64 both round to the same number of float32.
    """
    for module, name in ((torch, "sigmoid"), (F, "sigmoid"), (F, "softplus")):
        original = getattr(module, name)

        def rounded(x: Tensor, *args, original=original, **options) -> Tensor:
            return original(x.double(), *args, **options).to(x.dtype)

        monkeypatch.setattr(module, name, rounded)


def exact_products(monkeypatch) -> None:
    """The interpreter's products of 16-bit numbers, in whatever order a BLAS sums them."""
    original = np.matmul

    def exact(a, b, dtype):
        return original(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", exact)
