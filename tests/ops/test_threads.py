"""Several threads at once: the reference stages and compiled kernels; the interpreter has one."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from linattn_edu import chunk_gated_delta_rule, chunk_kda
from linattn_edu.testing import gdn_inputs, kda_inputs

THREADS, CALLS = 8, 3
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled there")


def passes(operator, seed: int, device: str, impl: str) -> list[torch.Tensor]:
    """The output, the final state and the gradients of one call."""
    inputs = gdn_inputs if operator is chunk_gated_delta_rule else kda_inputs
    i = inputs(1, 150, 1, 2, 16, 16, seed=seed, device=device)
    x = [t.requires_grad_() for t in (i.q, i.k, i.v, i.g, i.beta)]
    o, state = operator(*x, output_final_state=True, impl=impl)
    return [o, state, *torch.autograd.grad(o.square().sum() + state.sum(), x)]


@pytest.mark.parametrize("operator", [chunk_gated_delta_rule, chunk_kda])
@pytest.mark.parametrize(
    ("device", "impl"), [("cpu", "reference"), pytest.param("cuda", "triton", marks=needs_gpu)]
)
def test_threads_at_once_compute_what_one_computes(operator, device, impl):
    together = Barrier(THREADS)

    def work(seed: int) -> list[list[torch.Tensor]]:
        together.wait()
        return [passes(operator, seed, device, impl) for _ in range(CALLS)]

    with ThreadPoolExecutor(THREADS) as pool:
        got = list(pool.map(work, range(THREADS)))
    for seed, calls in enumerate(got):
        alone = passes(operator, seed, device, impl)
        for call in calls:
            assert all(torch.equal(x, y) for x, y in zip(call, alone, strict=True))
