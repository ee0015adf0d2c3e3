"""fused_recurrent_gated_delta_rule: its chunked form, what may be left out, what it keeps."""

import pytest
import torch
from gdn_checks import boundaries
from recurrent_cases import case, run

from linattn_edu import fused_recurrent_gated_delta_rule

IMPLS = ("triton", "reference")


def rec(**arguments):
    return fused_recurrent_gated_delta_rule(**arguments)


@pytest.mark.parametrize("impl", IMPLS)
def test_beta_left_out_is_one(impl, device):
    x = case(5, beta=False, device=device)
    one = torch.ones_like(x["v"][..., 0])
    for f in (lambda **a: rec(**a, impl=impl), lambda **a: run(rec, a, impl=impl)[0]):
        assert torch.equal(f(**x)[0], f(**{**x, "beta": one})[0])


def test_packed_sequences_keep_no_more_states_than_a_batch(device, monkeypatch):
    """States of blocks are kept by the length of a sequence, not of them all."""
    original, sizes = torch.Tensor.new_empty, []

    def new_empty(self, *shape, **options):
        y = original(self, *shape, **options)
        sizes.append(y.numel())
        return y

    largest = []
    for B, T, lengths in ((9, 4, None), (1, 36, [4] * 9)):
        x = case(T, B=B, N=9, device=device)
        x = {name: y for name, y in x.items() if y is not None}
        x["v"].requires_grad_()
        cu_seqlens = None if lengths is None else boundaries(lengths, device, torch.int64)
        o, _ = rec(**x, cu_seqlens=cu_seqlens, impl="triton")
        with monkeypatch.context() as m:
            m.setattr(torch.Tensor, "new_empty", new_empty)
            o.sum().backward()
        largest.append(max(sizes))
        sizes.clear()
    in_a_batch, packed = largest
    assert packed <= 2 * in_a_batch
