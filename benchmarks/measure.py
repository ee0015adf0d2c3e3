"""Measurements of one callable: time, memory, error, rates of the GPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import dplr, mamba
from benchmarks.cases import BEYOND, RATES, SAFE_BOUND, TRAINING, Case
from linattn_edu.kernels.routes import forced
from linattn_edu.reference.delta.recurrent import recurrent, recurrent_bwd
from linattn_edu.testing import GDNInputs, gdn_inputs, kda_inputs, relative_rms

Inputs = GDNInputs | mamba.Inputs


@dataclass
class GatedInputs(GDNInputs):
    """Those of GDN-2: beta is its erase gate, of the shape of k, and there is a write gate."""

    write: Tensor | None = None


PREFIX = 2048  # tokens of the float64 recurrence
SHORT_H = 2  # q/k heads of the inputs on which gradients are compared
ALIKE, ALIKE_T = (0.5, 0.97), 1024  # cosines between keys that are alike, and tokens of them
WARMUP_MS, REPEAT_MS = 30, 150
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def usable_gpu() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    try:
        import triton.testing  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


def gpu_name() -> str:
    return torch.cuda.get_device_name()


def time_ms(f: Callable[[], object]) -> float:
    """Median time of a call, L2 emptied before each, measured with events on the GPU."""
    from triton.testing import do_bench

    return do_bench(f, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="median")


def captured(f: Callable[[], object], **options) -> Callable[[], object]:
    """f as a CUDA graph, which a server launches for each token: its kernels without the host.

    options: Of torch.cuda.graph.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        f()
    return graph.replay


def synchronize() -> None:
    torch.cuda.synchronize()


def peak_mib(f: Callable[[], object]) -> float:
    """Memory that a call allocates at most, its outputs included, beside what is there before.

    For a training step the gradients of the step before are there: it frees them first.
    """
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_rate() -> float:
    """Bytes a second that a copy reads and writes now: it tells the state of the card."""
    x = torch.empty(2**28, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / time_ms(lambda: y.copy_(x)) * 1e3


def rates() -> tuple[float, float]:
    """(bytes a second of a copy, operations a second of a dense bfloat16 product)."""
    known = RATES.get(gpu_name())
    if known:
        return known
    copy, n = copy_rate(), 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    product = 2 * n**3 / time_ms(lambda: a @ a) * 1e3
    return copy, product


def inputs(case: Case, device: str = "cuda") -> Inputs:
    """The inputs of a case, the same in every run.

    Those of KDA keep the bound that some libraries are promised, so that all have the same.
    """
    if case.operator == "ssd":
        return mamba.inputs(case, DTYPES[case.size], device)
    if case.operator == "dplr":
        return dplr.inputs(case, DTYPES[case.size], device)
    decode = case.op.endswith("_decode")
    i = drawn(case, device, initial_state=decode)
    if case.op.endswith(BEYOND):
        i.beta.mul_(2)
    if case.cosine:
        i = alike(i, case.cosine)
    return replace(i, initial_state=0.1 * i.initial_state) if decode else i


def drawn(case: Case, device: str, *, initial_state: bool) -> GDNInputs:
    """Random inputs of a case's operator, with a gate like that of a trained layer."""
    options = {"dtype": DTYPES[case.size], "device": device, "initial_state": initial_state}
    if case.operator == "gdn":
        return gdn_inputs(*case.shape, **options)
    i = kda_inputs(*case.shape, **options)
    i.g.clamp_(min=SAFE_BOUND)
    if case.operator == "gdn2":
        b, w = (gradient(x.float()).sigmoid().to(i.v.dtype) for x in (i.g, i.v))
        return GatedInputs(**i.asdict() | {"beta": b, "write": w})
    return i


def reference(i: Inputs, **kwargs) -> tuple[Tensor, Tensor | None]:
    """The recurrence, whose g is a gate for each channel if it has an axis for them."""
    if isinstance(i, mamba.Inputs):
        return i.recurrence()
    g, gk = (i.g, None) if i.g.ndim == 3 else (None, i.g)
    return recurrent(i.q, i.k, i.v, g, i.beta, gk=gk, **written(i), **kwargs)


def written(i: GDNInputs) -> dict[str, Tensor]:
    """The write gate, where there is one."""
    return {"write": i.write} if isinstance(i, GatedInputs) else {}


def reference_gradients(i: Inputs, do: Tensor) -> dict[str, Tensor]:
    """Gradients of the recurrence by the name of the input."""
    if isinstance(i, mamba.Inputs):
        return i.gradients(do)
    g, gk = (i.g, None) if i.g.ndim == 3 else (None, i.g)
    dq, dk, dv, dg, dbeta, dgk, _, _, *dwrite = recurrent_bwd(
        i.q, i.k, i.v, g, i.beta, do, gk=gk, **written(i)
    )
    found = {"q": dq, "k": dk, "v": dv, "g": dg if gk is None else dgk, "beta": dbeta}
    return found | dict(zip(written(i), dwrite, strict=True))


def gradient(x: Tensor) -> Tensor:
    """A gradient of x from which a backward pass starts, the same in every run."""
    generator = torch.Generator(device=x.device).manual_seed(1)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


class TrainingStep:
    """Forward and backward pass of a function o = f(inputs), all float inputs requiring grad."""

    def __init__(self, i: Inputs):
        tensors = {n: x.detach().clone() for n, x in i.asdict().items() if x is not None}
        self.i = type(i)(**{n: x.requires_grad_() for n, x in tensors.items()})
        self.do = gradient(i.x if hasattr(i, "x") else i.v)  # o is like it

    def __call__(self, f: Callable[[Inputs], Tensor]) -> Tensor:
        for x in self.i.asdict().values():
            if x is not None:
                x.grad = None
        with torch.enable_grad():
            o = f(self.i)
            o.backward(self.do)
        return o


def prepare(what: str, i: Inputs) -> Callable[[Callable], object]:
    """The call `what` as a function of a library's adapter, its inputs made beforehand."""
    return TrainingStep(i) if what == TRAINING else lambda f: f(i)


class Oracle:
    """The float64 recurrence of the first tokens, on the first and the last q/k head; of the
    operators with inputs of their own on all heads."""

    def __init__(self, i: Inputs, tokens: int = PREFIX):
        if isinstance(i, mamba.Inputs):
            self.heads, self.tokens = slice(None), tokens
            self.o, self.final_state = i.first(tokens).double().recurrence()
            return
        H, HV = i.q.shape[2], i.v.shape[2]
        heads = sorted({0, H - 1})
        group = HV // H
        self.heads = [h * group + j for h in heads for j in range(group)]
        self.tokens = min(tokens, i.q.shape[1])
        q, k = (x[:1, : self.tokens, heads].double() for x in (i.q, i.k))
        v, g, beta = (x[:1, : self.tokens, self.heads].double() for x in (i.v, i.g, i.beta))
        S = i.initial_state
        S = S if S is None else S[:1, self.heads].double()
        own = {n: x[:1, : self.tokens, self.heads].double() for n, x in written(i).items()}
        self.o, self.final_state = reference(type(i)(q, k, v, g, beta, **own), initial_state=S)

    def error(self, o: Tensor) -> float:
        """Relative RMS error of o on that slice."""
        tokens = min(self.tokens, o.shape[1])
        return relative_rms(o[:1, :tokens, self.heads], self.o[:, :tokens])

    def state_error(self, final_state: Tensor) -> float:
        """Relative RMS error of the final state on that slice; of all tokens only."""
        return relative_rms(final_state[:1, self.heads], self.final_state)


def short(case: Case) -> Case:
    """The case with few tokens and heads, so that the float64 gradients are quick."""
    H = min(case.H, SHORT_H)
    return replace(case, B=1, T=min(case.T, PREFIX), H=H, HV=H * case.HV // case.H)


def alike(i: GDNInputs, cosine: float) -> GDNInputs:
    """The inputs with keys of a head that have this cosine with each other, on average."""
    unit = torch.nn.functional.normalize
    one, own = (unit(x, dim=-1) for x in (gradient(i.k[:1, :1].float()), i.k.float()))
    k = cosine**0.5 * one + (1 - cosine) ** 0.5 * own
    return replace(i, k=unit(k, dim=-1).to(i.k.dtype))


class GradientOracle:
    """Output and gradients of the float64 recurrence on the inputs of short(case); with a cosine,
    of fewer tokens and with keys that are alike. Few as they are, they run the kernels of the calls
    that are timed.
    """

    def __init__(self, case: Case, device: str = "cuda", cosine: float | None = None):
        case = short(case)
        if cosine is None:
            i = inputs(case, device)
        else:
            i = alike(inputs(replace(case, T=min(case.T, ALIKE_T)), device), cosine)
        self.step = TrainingStep(i)
        with torch.no_grad():
            self.o = reference(i.double())[0]
            self.gradients = reference_gradients(i.double(), self.step.do.double())

    def errors(self, f: Callable[[Inputs], Tensor]) -> dict[str, float]:
        """Relative RMS errors of o, as "error", and of the gradients, as "error_dq" and so on."""
        with forced(ENOUGH=1):
            errors = {"error": relative_rms(self.step(f), self.o)}
        for name, reference in self.gradients.items():
            gradient = getattr(self.step.i, name).grad
            if gradient is None:
                raise ArithmeticError(f"no gradient came back for {name}")
            errors[f"error_d{name}"] = relative_rms(gradient, reference)
        return errors


def alike_errors(oracles: dict[float, GradientOracle], f: Callable[[Inputs], Tensor]) -> dict:
    """Errors with keys alike, by cosine: "rho97_o", "rho97_dq" and so on; None: NaN or inf."""
    found = {}
    for cosine, oracle in oracles.items():
        for key, x in oracle.errors(f).items():
            name = key.removeprefix("error_").replace("error", "o")
            found[f"rho{100 * cosine:.0f}_{name}"] = x if math.isfinite(x) else None
    return found
