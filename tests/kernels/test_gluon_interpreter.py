"""Every kernel in Gluon, interpreted, against its reference; and what the interpreter finds."""

import pytest
import stages
import torch
from delta.stage_checks import check_stage
from gdn_checks import PAYS
from kernels.gluon_cases import BF16, CASES, HEAD, NO_GPU, gates, in_halves, in_pairs
from kernels.gluon_small import double_gluon
from triton.experimental.gluon import language as gl

from linattn_edu.gluon_interpreter import interpreted
from linattn_edu.gluon_interpreter.values import Block, Number, Pointer
from linattn_edu.kernels.delta import warm_up
from linattn_edu.kernels.fused import gdn_bwd, gdn_fwd, gdn_intra, gdn_scans, kda_bwd, kda_scans
from linattn_edu.packing import pack
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.kda_intra import kda_intra
from linattn_edu.reference.fused import gdn_bwd as bwd_reference
from linattn_edu.reference.fused import gdn_fwd as fwd_reference
from linattn_edu.reference.fused import gdn_intra as intra_reference
from linattn_edu.reference.fused import gdn_scans as scans_reference
from linattn_edu.reference.fused import kda_bwd as bwd_of_channels
from linattn_edu.reference.fused import kda_scans as kda_reference
from linattn_edu.reference.fused.kda_fwd import kda_prepare
from linattn_edu.testing import gdn_inputs, relative_rms

pytestmark = [pytest.mark.usefixtures("poison"), NO_GPU]
CPU = torch.device("cpu")
CHUNKS, SCALED = {"chunk_size": 64}, {"scale": 0.3}


@pytest.mark.parametrize(("name", "seed"), [(n, i % 2) for i, n in enumerate(CASES)])
def test_kernel_matches_reference(name, seed):
    CASES[name].check(CPU, seed=seed)


def gdn_parts(x, gc):
    """P, R and the gated inverse of each chunk, by the reference."""
    chunks = {**CHUNKS, "return_inverse": True, "gated": True}
    return intra_reference.intra_chunk(x.q, x.k, x.beta, gc, **chunks)


def test_a_key_head_for_each_value_head(force):
    """intra_chunk, by chunks and with the ring, and its gradients."""
    x = gdn_inputs(1, 192, 2, 2, HEAD, HEAD, dtype=BF16, device=CPU, seed=0)
    gc = gate_cumsum(x.g, **CHUNKS)
    P, _, AG = gdn_parts(x, gc)
    do = torch.randn_like(x.v)
    scans = scans_reference.scans(x.q, x.k, x.v, x.beta, gc, P, AG, do, **SCALED)
    h, v_new, dh, Z, *_ = scans
    for ring in (0, 2):
        force(**PAYS, intra_chunk="gluon", intra_ring=ring, intra_chunk_bwd="gluon")
        with interpreted() as ran:
            check_stage(
                gdn_intra.intra_chunk, intra_reference.intra_chunk, (x.q, x.k, x.beta, gc),
                return_inverse=True, **CHUNKS,
            )  # fmt: skip
            check_stage(
                gdn_bwd.intra_chunk_bwd, bwd_reference.intra_chunk_bwd,
                (x.q, x.k, x.v, x.beta, gc, h, v_new, do, dh, Z), **CHUNKS, **SCALED,
            )  # fmt: skip
        assert len(ran) == 2


@pytest.mark.parametrize("most", [0.5, 2.0])
def test_low_halves(most, force):
    """Products have the bits of both halves; where beta is above 1/2, dbeta knows nothing of how
    the states were rounded, dgc little.
    """
    torch.manual_seed(0)
    r = stages.parts("gdn_fused", 192, HEAD, HEAD, 64, torch.float32, CPU, own=True)
    r.beta *= most / r.beta.max()
    r.beta[:, ::7] = 0 if most < 1 else 1
    r.q, r.k, r.v, r.do = (x.bfloat16().float() for x in (r.q, r.k, r.v, r.do))
    given = r.q, r.k, r.v, r.beta, r.gc, *gdn_parts(r, r.gc)[::2], r.do
    h, r.v_new, r.dh, r.Z, *_ = scans_reference.scans(*given, **SCALED)
    r.h = h
    in_halves(r)
    args = [r.q, r.k, r.v, r.beta, r.gc, r.h, r.v_new, r.do, r.dh, r.Z]
    force(**PAYS, intra_chunk_bwd="gluon")
    with interpreted() as ran:
        _, _, dbeta, dgc = gdn_bwd.intra_chunk_bwd(*args, r.low, **CHUNKS, **SCALED)
    assert len(ran) == 1
    if most > 1:
        args[5] = h
    exact, low = [x.double() for x in args], tuple(x.double() for x in r.low)
    want = bwd_reference.intra_chunk_bwd(*exact, low, **CHUNKS, **SCALED)[2:]
    assert relative_rms(dbeta, want[0]) < (2**-20 if most < 1 else 2**-13)
    assert relative_rms(dgc, want[1]) < (2**-17 if most < 1 else 2**-10)


def test_low_halves_of_channels(force):
    """The same of Kimi Delta Attention; of some tokens beta is 0, and dbeta from V."""
    torch.manual_seed(0)
    r = stages.parts("kda_fused", 192, HEAD, HEAD, 64, torch.float32, CPU, H=2, gate="open")
    r.beta[:, ::7], r.beta[:, 3::11] = 0, 1.9
    r.q, r.k, r.v, r.do = (x.bfloat16().float() for x in (r.q, r.k, r.v, r.do))
    P, A, *rows = kda_prepare(r.q, r.k, r.beta, r.gc, **CHUNKS)
    kd, kg, qg = rows
    given = qg, kg, kd, r.v, r.beta, r.gc, P, A, r.do
    h, r.v_new, dh, r.Z, *_ = kda_reference.kda_fused_scans(*given, **SCALED)
    r.h, r.dh = h, dh
    in_pairs(r)
    args = [r.q, r.k, r.v, r.beta, r.gc, r.h, r.v_new, r.do, r.dh, r.Z]
    force(**PAYS, kda_fused_intra_bwd="gluon")
    wide = [x.double() for x in args]
    wide[6], wide[9] = (sum(x.chunk(2, -1)) for x in (wide[6], wide[9]))
    with interpreted() as ran:
        _, _, dbeta, dgc = kda_bwd.kda_fused_intra_bwd(*args, fine=True, **CHUNKS, **SCALED)
    assert len(ran) == 1
    want = bwd_of_channels.kda_fused_intra_bwd(*wide, **CHUNKS, **SCALED)[3]
    assert relative_rms(dgc, want) < 2**-17
    wide[5] = h.double()
    want = bwd_of_channels.kda_fused_intra_bwd(*wide, **CHUNKS, **SCALED)[2]
    assert relative_rms(dbeta, want) < 2**-12


def test_intra_of_packed_sequences(force):
    """Each has the bits that it has alone; one is empty, some end inside a chunk."""
    bounds = [0, 100, 100, 164, 165, 230]
    packing = pack(torch.tensor(bounds), 64)
    x = gdn_inputs(1, 230, 1, 2, 64, 16, dtype=BF16, device=CPU, seed=0)
    gc, options = x.g.cumsum(1), {**CHUNKS, "return_inverse": True}
    force(**PAYS, intra_chunk="gluon")
    with interpreted() as ran:
        together = gdn_intra.intra_chunk(x.q, x.k, x.beta, gc, packing=packing, **options)
        for own in (slice(*bounds[n : n + 2]) for n in (0, 2, 3, 4)):
            args = (t[:, own].contiguous() for t in (x.q, x.k, x.beta, gc))
            for got, want in zip(together, gdn_intra.intra_chunk(*args, **options), strict=True):
                assert torch.equal(got[:, own], want)
    assert len(ran) == 5


@pytest.mark.parametrize(("go", "done"), [(-1, None), (0, None), (0, -1.0), (0, 0.0)])
def test_intra_with_the_ring_goes_home(go, done, force):
    """Where it is told to, with nothing written."""
    x = gdn_inputs(1, 192, 1, 2, 64, 16, dtype=BF16, device=CPU, seed=0)
    force(**PAYS, intra_ring=2)
    P, R, A = (torch.full((1, 192, 2, 64), torch.nan, dtype=BF16) for _ in range(3))
    with interpreted() as ran:
        given = x.q, x.k, x.beta, x.g.cumsum(1), P, R, A
        done_at = None if done is None else torch.tensor([done])
        both = torch.tensor([go], dtype=torch.int32), done_at
        gdn_intra.gdn_intra.intra_gluon(given, True, None, both)
    assert len(ran) == 1
    for written in (P, R, A):
        home = go < 0 or done == 0.0
        assert written.isnan().all() if home else written.isfinite().all()


# pieces of 128 tokens, found forgotten in 128, or entered by their maps
PIECES = {
    "warm-up": {"PROGRAMS": 0, "PER_PROGRAM": 32, "MULTIPROCESSORS": 1},
    "maps": {"LENGTH": 128, "LEAST": 2, "MULTIPROCESSORS": 1},
}


@pytest.mark.parametrize("by", PIECES)
def test_scans_in_pieces(by, force, monkeypatch):
    """Of the last, 64 tokens are left. Head 0 forgets in a chunk, head 1 at one place alone."""
    monkeypatch.setattr(warm_up, "REACH", 128)
    force(**PAYS, **PIECES[by], scan="gluon", scans="gluon", together=0)
    found = []

    def seen(*args, **options):
        pieces, warmup = warm_up.warm_up(*args, **options)
        found.extend(warmup)
        return pieces, warmup

    monkeypatch.setattr(gdn_fwd, "warm_up", seen)
    x = gdn_inputs(1, 448, 1, 2, HEAD, HEAD, dtype=BF16, device=CPU, seed=0)
    x.g.copy_(torch.tensor([-3.0, -0.01]))
    x.g[:, 150:170, 1] = -3.0
    gc, h0 = gate_cumsum(x.g, **CHUNKS), torch.randn(1, 2, HEAD, HEAD)
    P, R, AG = gdn_parts(x, gc)
    with interpreted() as ran:
        check_stage(
            gdn_fwd.scan, fwd_reference.scan, (x.q, x.k, x.v, gc, P, R, h0),
            output_final_state=True, **SCALED,
        )  # fmt: skip
        args = x.q, x.k, x.v, x.beta, gc, P, AG, torch.randn_like(x.v), h0, torch.randn_like(h0)
        check_stage(gdn_scans.scans, scans_reference.scans, args, **SCALED)
    assert len(ran) == 3
    if by == "warm-up":
        force(chunk_fwd="one", intra_ring=2)
        for gates in (x.g, x.g - 3.0):  # with the second all forget, and one kernel does all
            gc = gate_cumsum(gates, **CHUNKS)
            with interpreted() as ran:
                check_stage(
                    gdn_fwd.chunk_fwd, fwd_reference.chunk_fwd, (x.q, x.k, x.v, x.beta, gc, h0),
                    output_final_state=True, keep=True, **CHUNKS, **SCALED,
                )  # fmt: skip
            names = [kernel.__name__.removesuffix("_gluon_kernel") for kernel in ran]
            assert names == ["chunk_fwd", "intra_chunk_ring", "scan"]
    starts = {n for warmup in found for n in warmup.flatten().tolist()}
    assert starts == ({-1, 0, 1, 2} if by == "warm-up" else set())


def test_kda_scans_in_pieces(force):
    """By their maps."""
    force(**PAYS, **PIECES["maps"], kda_fused_scans="gluon", workers=1, together=1)
    x = gdn_inputs(1, 448, 2, 2, HEAD, HEAD, dtype=BF16, device=CPU, seed=0)
    gc = gate_cumsum(gates(448), **CHUNKS)
    P, A = kda_intra(x.q, x.k, x.beta, gc, **CHUNKS)
    kd, kg, qg = kda_reference.kda_gated(x.q, x.k, gc, **CHUNKS)
    states = torch.randn(2, 1, 2, HEAD, HEAD)
    args = qg, kg, kd, x.v, x.beta, gc, P, A, torch.randn_like(x.v), *states
    with interpreted() as ran:
        check_stage(kda_scans.kda_fused_scans, kda_reference.kda_fused_scans, args, **SCALED)
    assert len(ran) == 1


# -- the interpreter itself


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_of_one_idea(seed):
    """Whosever turn it is, also where the last tile hangs over the edge."""
    x = torch.randn(1, 5 * 64, 1, 64).bfloat16()
    with interpreted(seed=seed) as ran:
        assert torch.equal(double_gluon(x), 2 * x)
    assert [kernel.__name__ for kernel in ran] == ["double_gluon_kernel"]


def test_without_the_context_kernels_are_compiled():
    with interpreted(), pytest.raises(RuntimeError, match="inside"):
        raise RuntimeError("inside")
    with pytest.raises(Exception, match=r"active drivers|driver"):
        double_gluon(torch.zeros(1, 64, 1, 64).bfloat16())


def test_numbers_are_those_of_a_gpu():
    """Quotients of integers are cut off; 16 bit are rounded to the nearest, ties to even."""
    assert Number(-7) // 2 == -3 and Number(-7) % 2 == -1 and Number(7) // Number(2) == 3
    assert (7 // Number(-2), 7 % Number(2), type(Number(3) * 2)) == (-3, 1, Number)
    b = Block(torch.tensor([-7, 7], dtype=torch.int32))
    assert (b // 2).data.tolist() == [-3, 3] and (b % 2).data.tolist() == [-1, 1]
    fine = Block(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]))
    assert fine.to(gl.bfloat16).data.tolist() == [1, 1 + 2**-6]
    assert Number(0x3F800000).to(gl.float32, bitcast=True).data == 1
    assert (b.to(gl.float32) * 0.5).dtype == gl.float32


def test_a_pointer_of_a_view_and_beside_its_tensor():
    x = torch.arange(12.0).view(3, 4)
    pointer = Pointer.to_tensor(x[1:, 1:])
    at, _ = (pointer + Block(torch.tensor([0, 4]))).places(None)
    assert pointer.storage[at].tolist() == [5, 9]
    with pytest.raises(IndexError, match="place 12 of 12"):
        (pointer + 7).places(None)
    assert not (pointer + 7).places(False)[1]
