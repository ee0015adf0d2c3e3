"""Measurements of one callable: time, memory, error, rates of the GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import RATES, Case
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import GDNInputs, gdn_inputs, relative_rms

PREFIX = 2048  # tokens of the float64 recurrence
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


def synchronize() -> None:
    torch.cuda.synchronize()


def peak_mib(f: Callable[[], object]) -> float:
    """Memory that a call allocates at most, its outputs included, beside what is there before."""
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def rates() -> tuple[float, float]:
    """(bytes a second of a copy, operations a second of a dense bfloat16 product)."""
    known = RATES.get(gpu_name())
    if known:
        return known
    x = torch.empty(2**28, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.numel() * 4 / time_ms(lambda: y.copy_(x)) * 1e3
    n = 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    product = 2 * n**3 / time_ms(lambda: a @ a) * 1e3
    return copy, product


def inputs(case: Case, device: str = "cuda") -> GDNInputs:
    """The inputs of a case, the same in every run."""
    return gdn_inputs(*case.shape, dtype=DTYPES[case.size], device=device)


class Oracle:
    """The float64 recurrence of the first tokens, on the first and the last q/k head."""

    def __init__(self, i: GDNInputs, tokens: int = PREFIX):
        H, HV = i.q.shape[2], i.v.shape[2]
        heads = sorted({0, H - 1})
        group = HV // H
        self.heads = [h * group + j for h in heads for j in range(group)]
        self.tokens = min(tokens, i.q.shape[1])
        q, k = (x[:1, : self.tokens, heads].double() for x in (i.q, i.k))
        v, g, beta = (x[:1, : self.tokens, self.heads].double() for x in (i.v, i.g, i.beta))
        self.o = recurrent(q, k, v, g, beta)[0]

    def error(self, o: Tensor) -> float:
        """Relative RMS error of o on that slice."""
        tokens = min(self.tokens, o.shape[1])
        return relative_rms(o[:1, :tokens, self.heads], self.o[:, :tokens])
