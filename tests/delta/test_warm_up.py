"""Stage warm_up: the bound, what it leaves out, and the kernels."""

from itertools import pairwise

import pytest
import torch

from linattn_edu.kernels.delta import warm_up as kernels
from linattn_edu.packing import pack
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.warm_up import bound, warm_up
from linattn_edu.reference.fused.gdn_fwd import scan, scan_map
from linattn_edu.reference.fused.gdn_intra import intra_chunk
from linattn_edu.testing import assert_close, gdn_inputs

C = 16


def drawn(T, dtype=torch.float64, device="cpu", length=1.0, beta=1.0, K=24, B=2):
    """Keys of this length, write strengths up to beta, gates between -1 and 0."""
    x = gdn_inputs(B, T, 2, 4, K, 20, dtype=dtype, device=device, initial_state=True)
    x.k.mul_(length / x.k.norm(dim=-1, keepdim=True))
    x.beta.copy_(torch.rand_like(x.beta) * beta)
    x.g.copy_(-torch.rand_like(x.g))
    return x, gate_cumsum(x.g, chunk_size=C)


@pytest.mark.parametrize(("length", "beta"), [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (3.0, 2.0)])
@pytest.mark.parametrize("T", [C, 3, 3 * C])
def test_no_state_grows_past_the_bound(length, beta, T):
    x, gc = drawn(T, length=length, beta=beta)
    _, R, _ = intra_chunk(x.q, x.k, x.beta, gc, chunk_size=C)
    _, M = scan_map(x.k, x.v, gc, R)
    most = bound(x.k, x.beta, gc, chunk_size=C).sum(1)
    slack = most - torch.linalg.matrix_norm(M, 2).log2()
    assert (slack > -1e-9).all()
    assert length > 1 or T > 3 or (slack < 1).all()  # not much more


def test_the_bound_of_a_token_is_its_norm():
    x, gc = drawn(1, length=2.0, beta=2.0)
    M = torch.eye(24) - x.beta[..., None, None] * (
        x.k[..., None] * x.k[..., None, :]
    ).repeat_interleave(2, 2)
    norm = torch.linalg.matrix_norm(x.g.exp()[..., None, None] * M, 2).log2()
    assert_close("bound", bound(x.k, x.beta, gc, chunk_size=C), norm, 1e-12)


@pytest.mark.parametrize("back", [False, True])
def test_what_is_left_out_is_below_the_threshold(back):
    """The state that enters a piece, begun from zero so many chunks before, in float64."""
    x, gc = drawn(16 * C, B=1)
    piece, options = 4 * C, {"chunk_size": C}
    warmup = warm_up(x.k, x.beta, gc, piece=piece, reach=piece, back=back, **options)
    P, R, _ = intra_chunk(x.q, x.k, x.beta, gc, **options)
    assert (warmup[:, 3 if back else 0] == 0).all()
    assert (warmup >= 0).all() and len(warmup.unique()) > 1
    if back:  # the adjoint goes through the same matrices, transposed
        return
    given = x.q, x.k, x.v, gc, P, R

    def final(begin, end, S):
        """The state after these tokens, from S."""
        if begin == end:
            return S
        tokens = (z[:, begin:end] for z in given)
        return scan(*tokens, S, scale=1.0, output_final_state=True)[1]

    for p in range(1, 4):
        true = final(0, p * piece, x.initial_state)
        for h in range(4):
            begin = p * piece - int(warmup[0, p, h]) * C
            missing = (true - final(begin, p * piece, None))[0, h]
            early = final(0, begin, x.initial_state)[0, h]
            norm = torch.linalg.matrix_norm
            assert 0 < norm(missing, 2) <= 2.0**-32 * norm(early, 2)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 128, 128, 160, 400]])
@pytest.mark.parametrize(("diagonal", "processors"), [(False, 1), (True, 132)])
def test_kernels_match_the_reference(
    back, bounds, diagonal, processors, force, monkeypatch, device
):
    T = 208 if bounds is None else bounds[-1]
    force(PROGRAMS=0, PER_PROGRAM=16, MULTIPROCESSORS=1)  # four heads: pieces of 64 tokens
    monkeypatch.setattr(kernels, "REACH", 48)
    monkeypatch.setattr(kernels, "ROWS", 8)
    force(both_widths=int(processors > 1))
    x, _ = drawn(T, torch.float32, device, length=1.5, beta=1.5, B=2 if bounds is None else 1)
    x.g[..., 0] -= 1  # forgets in no time
    x.g[..., 1] *= 0.01  # not at all
    at, own = [(0, T)], {}
    if bounds is not None:
        own = {"packing": pack(torch.tensor(bounds, device=device), C)}
        at = list(pairwise(bounds))
    gc, want = torch.empty_like(x.g), []
    for a, b in at:
        gc[:, a:b] = gate_cumsum(x.g[:, a:b], chunk_size=C)
        one = (x.k[:, a:b], x.beta[:, a:b], gc[:, a:b])
        piece = 64 if b - a >= 128 else max(b - a, C)
        options = {"chunk_size": C, "piece": piece, "reach": 48, "back": back}
        want.append(warm_up(*one, **options) if b > a else one[1].new_zeros(1, 1, 4).int())
    beta = x.beta
    if diagonal:  # of each chunk the diagonal of R
        beta = torch.rand(*x.beta.shape, C, device=device)
        for a, b in at:
            i = torch.arange(a, b, device=device)
            beta[:, i, :, (i - a) % C] = x.beta[:, i].transpose(0, 1)
    own |= {"chunk_size": C, "back": back}
    found, (*wide, warmup) = kernels.warm_up(x.k, beta, gc, 20, **own)
    want = torch.cat([z.flatten(0, 1) for z in want])
    assert torch.equal(warmup[: len(want)], want)
    assert len(wide) == (processors > 1) and all((x < 0).all() for x in wide)
    if wide:
        _, (one,) = kernels.warm_up(x.k, beta, gc, 20, choice=False, **own)
        assert torch.equal(one, warmup)
    assert len(want) <= found.N and (want < 0).any() and (want > 1).any()


@pytest.mark.parametrize("rows", [8, 128])
def test_where_all_forget_the_first_launch_has_the_work(rows, force, monkeypatch, device):
    """Also where pieces and heads are no multiple of what a program takes."""
    force(PROGRAMS=0, PER_PROGRAM=16, MULTIPROCESSORS=1)
    monkeypatch.setattr(kernels, "ROWS", rows)
    x, _ = drawn(192, torch.float32, device)
    gc = gate_cumsum(x.g - 3, chunk_size=C)
    pieces, (first, second) = kernels.warm_up(x.k, x.beta, gc, 20, chunk_size=C, always=True)
    assert pieces.N % rows and (first >= 0).all() and (second < 0).all()
