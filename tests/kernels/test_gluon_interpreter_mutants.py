"""Mistakes in each kernel in Gluon: the interpreter finds them, or the comparison does.

Of each kind where a kernel has it: a sign, a phase, a wait or a barrier left out, a ring that is
too short, a number of bytes.
"""

import re

import pytest
import torch
from kernels.gluon_cases import CASES, file_of

from linattn_edu.gluon_interpreter import ByteCount, Deadlock, Race, Unfinished

Wrong = AssertionError  # the result is not the reference's
OUTSIDE = IndexError  # a place that a ring does not have
LEFT_OUT = "pass"
# texts of several mistakes
FENCE = "        fence_async_shared()\n        barrier()\n"
WAIT_EMPTY = "mbarrier.wait(chunks.empty.index(i), (i_t // STAGES & 1) ^ 1)"
FENCED, BARRIER = "fence_async_shared()\n    ", "barrier()\n    "
HAND_OVER = FENCED + BARRIER + "mbarrier.arrive(bar, count=1)"
TAKEN_OTHERS = "mbarrier.arrive(made.bars.index(3), count=1)"
ARRIVE_FULL = "        mbarrier.arrive(bar, count=1)"

# case -> file of its kernel -> (the error, what it names, the text, what stands there instead)
MISTAKES = {
    ("gdn_scan", "gdn_scan"): [
        (Wrong, "output 0", "- b_e * b_W", "+ b_e * b_W"),
        (Wrong, "output 0", "b_r = gates.index(3 * i + 1)", "b_r = gates.index(3 * i)"),
        (Wrong, "output 0", "chunks.first + i_t * BT, c_v", "chunks.first + i * BT, c_v"),
        (Race, "ks[1] is", "i_next // STAGES & 1", "(i_next // STAGES & 1) ^ 1"),
        (Race, "ks[0] is", "mbarrier.wait(full.index(0), 0)", LEFT_OUT),
        (Race, "by a copy of part 1", "barrier()  # no warp reads", "pass  # no warp reads"),
        (Race, "out[0] is written", "tma.store_wait(0)\n        barrier()  # no", "barrier()  # no"),
        (Race, "out[0] is read by a copy out", FENCE, "        barrier()\n"),
        (Deadlock, "empty[0]", "mbarrier.arrive(empty.index(i), count=1)", LEFT_OUT),
        (OUTSIDE, "place 2 of", "ring(R_desc, STAGES)", "ring(R_desc, STAGES - 1)"),
        (Unfinished, "product", "wait(HALVES - 1, [b_new])", "wait(HALVES, [b_new])"),
    ],
    ("gdn_scan", "scan_frame"): [
        (Wrong, "output 0", "gl.exp2(b_last - b_gc)", "gl.exp2(b_gc - b_last)"),
        (ByteCount, "full[0] expects", "expect(bar, chunks.BYTES)", "expect(bar, chunks.BYTES - 8)"),
        (ByteCount, "full[0] expects", "expect(bar, chunks.BYTES)", "expect(bar, chunks.BYTES + 8)"),
        (Race, "ks[0] is", WAIT_EMPTY, LEFT_OUT),
        (Deadlock, "empty[0]", WAIT_EMPTY, WAIT_EMPTY.replace(" ^ 1", "")),
        (Race, "gates[0] is", "        barrier()\n" + ARRIVE_FULL, ARRIVE_FULL),
        (Deadlock, "full[0]", "        barrier()\n" + ARRIVE_FULL, "        barrier()\n"),
        (Deadlock, "full[0]", "bar_pairs(STAGES, 2, WORKERS)", "bar_pairs(STAGES, 3, WORKERS)"),
        (Race, "gates[0] is", "bar_pairs(STAGES, 2, WORKERS)", "bar_pairs(STAGES, 1, WORKERS)"),
    ],
    ("gdn_scans, forth", "scan_frame"): [
        (Wrong, "output 0", "i + K // 2, made.c_S", "i, made.c_S"),
        (Race, "halves[0][0] is read by a copy out", HAND_OVER, HAND_OVER.replace(FENCED, "")),
        (Race, "halves[0][0] is read by a copy out", HAND_OVER, HAND_OVER.replace(BARRIER, "")),
        (Race, "halves[0][0] is", "mbarrier.wait(made.bars.index(0), i_t & 1)", LEFT_OUT),
        (Race, "others[0][0] is", "mbarrier.wait(made.bars.index(2), i_t & 1)", LEFT_OUT),
        (Race, "others[0][0] is", "bars.index(2), i_t & 1", "bars.index(2), i_t & 1 ^ 1"),
        (Race, "halves[0][0] is", "tma.store_wait(len(made.others))", LEFT_OUT),
        (Race, "others[0][0] is", "tma.store_wait(len(made.halves))", LEFT_OUT),
        (Race, "others[0][0] is", "barrier()\n        " + TAKEN_OTHERS, TAKEN_OTHERS),
        (Deadlock, "bars[3]", TAKEN_OTHERS, LEFT_OUT),
        (Deadlock, "bars[1]", "mbarrier.arrive(made.bars.index(1), count=1)", LEFT_OUT),
        (Unfinished, "store_chunks", "    tma.store_wait(0)", "    pass"),
    ],
    ("gdn_scans, forth", "gdn_scans"): [
        (Wrong, "output", "gates.index(3 * i).load(along)[None, :] * b_W", "b_W"),
        (Wrong, "output", "b_x = operand(b_new * b_r", "b_x = operand(-b_new * b_r"),
        (OUTSIDE, "place 3", "rings = ring(k_desc, STAGES)", "rings = ring(k_desc, STAGES - 1)"),
    ],
    ("gdn_scans, back", "gdn_scans"): [
        (Wrong, "output", "operand(-b_e * b_dv", "operand(b_e * b_dv"),
        (Wrong, "output", "operand(b_do, dtype, mma), Ps.index(i)", "operand(b_do, dtype, mma), AGs.index(i)"),
        (OUTSIDE, "place 2", "ks, qs, dos = ring(k_desc, STAGES)", "ks, qs, dos = ring(k_desc, STAGES - 1)"),
        (Unfinished, "product", "b_dv = warpgroup_mma_wait(1, [b_dv])", "b_dv = warpgroup_mma_wait(2, [b_dv])"),
    ],
    ("gdn_intra", "gdn_intra"): [
        (Wrong, "output", "gl.minimum(o_t, n_t - 1)", "gl.minimum(o_t, n_t - 2)"),
        (Race, "k_s is", "    async_copy.wait_group(0)\n", ""),
        (Race, "fence_async_shared", "async_copy.wait_group(0)\n    fence_async_shared()\n", "async_copy.wait_group(0)\n"),
        (Race, "k_s is read by a product", "wait_group(0)\n    fence_async_shared()\n    barrier()", "wait_group(0)\n    fence_async_shared()"),
        (Race, "X_s is written", "GATED).to(dtype)\n        barrier()\n        A_s", "GATED).to(dtype)\n        A_s"),
    ],
    ("gdn_intra", "gdn_solve"): [
        (Wrong, "output", "gl.where(blocks_beside(z) < 0, -b_u, 0.0)", "gl.where(blocks_beside(z) < 0, b_u, 0.0)"),
        (Wrong, "output", "D_s.store(b_D * -b_beta", "D_s.store(b_D * b_beta"),
        (Wrong, "output", "b_d = b_i - gl.where", "b_d = -b_i - gl.where"),
        (Race, "fence_async_shared", "X_s, z)\n    fence_async_shared()\n    barrier()", "X_s, z)\n    barrier()"),
        (Race, "k_s[0] is read by a product", "N_s.store(b_N.to(gl.float16))\n    fence_async_shared()\n    barrier()", "N_s.store(b_N.to(gl.float16))\n    fence_async_shared()"),
        (Unfinished, "product", "b_N = warpgroup_mma_wait(0, [b_N])", "b_N = warpgroup_mma_wait(1, [b_N])"),
    ],
    ("gdn_intra, ring", "gdn_intra"): [
        (ByteCount, "m.full expects", "mbarrier.expect(m.full, 2 * BT * K * 2)", "mbarrier.expect(m.full, BT * K * 2)"),
        (ByteCount, "m.full expects", "mbarrier.expect(m.full, 2 * BT * K * 2)", "mbarrier.expect(m.full, 4 * BT * K * 2)"),
        (Race, "m.gates", "mbarrier.wait(m.gates_full, n & 1)", LEFT_OUT),
        (Race, "m.ks[0] is", "mbarrier.wait(m.full, n // G & 1)", LEFT_OUT),
        (Race, "m.ks[0] is", "mbarrier.wait(m.empty, (n & 1) ^ 1)", LEFT_OUT),
        (Deadlock, "m.empty", "(n & 1) ^ 1", "n & 1"),
        (Deadlock, "m.empty", "mbarrier.arrive(m.empty, count=1)", LEFT_OUT),
        (Deadlock, "m.full", "n // G & 1", "n & 1"),
        (Race, "read by a copy out", "barrier()  # no warp reads", "pass  # no warp reads"),
        (Race, "m.", "tma.store_wait(0)\n        barrier()  # no", "barrier()  # no"),
        (Race, "m.gates", "barrier()\n        mbarrier.arrive(m.gates_full, count=1)", "mbarrier.arrive(m.gates_full, count=1)"),
        (Race, "is read by a copy out", "fence_async_shared()\n        barrier()\n        at", "barrier()\n        at"),
        (OUTSIDE, "place 2", "[3, BT, BT]", "[2, BT, BT]"),
        (OUTSIDE, "place 2", "numbers([4, BT])", "numbers([2, BT])"),
        (Wrong, "output", "async_store(R_desc, at, R_s)", "async_store(R_desc, at, P_s)"),
    ],
    ("gdn_intra_bwd", "gdn_intra_bwd"): [
        (Wrong, "output", "b_P = gl.where(below, -b_P, 0.0)", "b_P = gl.where(below, b_P, 0.0)"),
        (Wrong, "output", "b_F * -b_e", "b_F * b_e"),
        (Wrong, "output", "b_dgc -= own_sums(b_k * b_dk)", "b_dgc += own_sums(b_k * b_dk)"),
        (ByteCount, "b.full_Z expects", "expect(bars.full_Z, 2 * BT * V * 2)", "expect(bars.full_Z, BT * V * 2)"),
        (ByteCount, "full_new[0] expects", "expect(full, 2 * BT * V * 2)", "expect(full, 4 * BT * V * 2)"),
        (ByteCount, "b.full_k expects", "expect(bars.full_k, 2 * BT * K * 2)", "expect(bars.full_k, BT * K * 2)"),
        (Race, "m.news[0] is", "mbarrier.wait(bars.full_new.index(i), n // 2 & 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.full_Z, n & 1)", LEFT_OUT),
        (Race, "m.hs[0] is", "mbarrier.wait(bars.full_h, n & 1)", LEFT_OUT),
        (Race, "m.dhs[0] is", "mbarrier.wait(bars.full_dh, n & 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.full_k, n // G & 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.ready, n & 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.used, (n & 1) ^ 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.empty_h, n & 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.empty_k, ((n - 1) // G & 1) ^ 1)", LEFT_OUT),
        (Deadlock, "b.empty_k", "((n - 1) // G & 1) ^ 1", "(n - 1) // G & 1"),
        (Race, "m.", "bars.full_new.index(i), n // 2 & 1", "bars.full_new.index(i), n // 2 & 1 ^ 1"),
        (Deadlock, "b.used", "mbarrier.arrive(bars.used, count=1)", LEFT_OUT),
        (Deadlock, "b.empty_h", "mbarrier.arrive(bars.empty_h, count=1)", LEFT_OUT),
        (Race, "m.", "barrier()\n        mbarrier.arrive(bars.empty_h, count=1)", "mbarrier.arrive(bars.empty_h, count=1)"),
        (Race, "m.inner", "fence_async_shared()\n        barrier()\n        mbarrier.arrive(bars.ready", "barrier()\n        mbarrier.arrive(bars.ready"),
        (Race, "m.", "barrier()  # no warp reads what", "pass  # no warp reads what"),
        (OUTSIDE, "place 1", "ring(v_new_desc, 2)", "ring(v_new_desc, 1)"),
        (Deadlock, "nobody answers", "bar(1), bar(1), bar(1), bar(1), bar(2)", "bar(1), bar(1), bar(1), bar(1), bar(3)"),
        (Unfinished, "ends", "N - 1, ROW, H, G, BT)\n    tma.store_wait(0)", "N - 1, ROW, H, G, BT)"),
    ],
    ("kda_scan, two", "kda_scan"): [
        (Wrong, "output 0", "b_v.to(gl.float32) - b_W", "b_v.to(gl.float32) + b_W"),
        (Wrong, "output 0", "b_S2 *= gates.index(3 * i + 1)", "b_S2 *= gates.index(3 * i)"),
        (Deadlock, "full[1]", "i_next // STAGES & 1", "(i_next // STAGES & 1) ^ 1"),
        (Race, "kds[0] is", "mbarrier.wait(full.index(0), 0, pred=NT > 0)", LEFT_OUT),
        (Race, "by a copy of part 2", "barrier()  # no warp reads", "pass  # no warp reads"),
        (Race, "out[1] is read by a copy out", FENCE, "        barrier()\n"),
        (Deadlock, "empty[0]", "mbarrier.arrive(empty.index(i), count=1)", LEFT_OUT),
        (OUTSIDE, "place 1 of", "ring(kg_desc, STAGES)", "ring(kg_desc, STAGES - 1)"),
        (Unfinished, "product", "b_new = warpgroup_mma_wait(1, [b_new])", "b_new = warpgroup_mma_wait(2, [b_new])"),
    ],
    ("kda_scan, two", "scan_frame"): [
        (ByteCount, "full[0] expects", "expect(bar, chunks.BYTES)", "expect(bar, chunks.BYTES - 8)"),
        (Race, "by a copy of part 2", "bar_pairs(STAGES, 2, WORKERS)", "bar_pairs(STAGES, 2, 1)"),
        (Wrong, "output", "b_a2 = gl.load(last_ptr + 64", "b_a2 = gl.load(last_ptr"),
    ],
    ("kda_scans, both", "kda_scans"): [
        (Wrong, "output", "b_v.to(gl.float32) - b_W", "b_v.to(gl.float32) + b_W"),
        (Wrong, "output", "operand(-b_dv", "operand(b_dv"),
        (OUTSIDE, "place 2 of", "kds, kgs = ring(kd_desc, STAGES), ring(kg_desc, STAGES)\n    vs", "kds, kgs = ring(kd_desc, STAGES - 1), ring(kg_desc, STAGES)\n    vs"),
        (OUTSIDE, "place 1 of", "dos, As, Ps = ring(do_desc, STAGES)", "dos, As, Ps = ring(do_desc, STAGES - 1)"),
        (Unfinished, "product", "b_Z = warpgroup_mma_wait(2, [b_Z])", "b_Z = warpgroup_mma_wait(3, [b_Z])"),
    ],
    ("kda_scans, both", "scan_frame"): [
        (ByteCount, "full[0] expects", "expect(bar, chunks.BYTES)", "expect(bar, chunks.BYTES + 8)"),
    ],
    ("kda_intra_bwd", "kda_intra_bwd"): [
        (Wrong, "output", "b_P = gl.where(below, -b_P, 0.0)", "b_P = gl.where(below, b_P, 0.0)"),
        (Wrong, "output", "b_y *= -gl.exp2(b_ga)[:, None]", "b_y *= gl.exp2(b_ga)[:, None]"),
        (Wrong, "output", "k.permute((1, 0)).store((-b_y).to(dtype))", "k.permute((1, 0)).store(b_y.to(dtype))"),
        (Wrong, "output", "i_h * K + c * (K // 2)]", "i_h * K + (1 - c) * (K // 2)]"),
        (ByteCount, "b.full_new expects", "expect(bars.full_new, 4 * BT * V * 2)", "expect(bars.full_new, 3 * BT * V * 2)"),
        (ByteCount, "b.full_k expects", "expect(bars.full_k, BT * K * 8)", "expect(bars.full_k, BT * K * 12)"),
        (Race, "m.", "mbarrier.wait(bars.full_new, n & 1)", LEFT_OUT),
        (Race, "m.hs[0] is", "mbarrier.wait(bars.full_h, n & 1)", LEFT_OUT),
        (Race, "m.dhs[0] is", "mbarrier.wait(bars.full_dh, n & 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.full_k, n & 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.gates_full, n & 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.used, (n & 1) ^ 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.empty_h, (n & 1) ^ 1)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.empty_k, (n & 1) ^ 1)", LEFT_OUT),
        (Deadlock, "b.empty_h", "bars.empty_h, (n & 1) ^ 1", "bars.empty_h, n & 1"),
        (Deadlock, "b.used", "mbarrier.arrive(bars.used, count=1)", LEFT_OUT),
        (Deadlock, "b.empty_k", "mbarrier.arrive(bars.empty_k, count=1)", LEFT_OUT),
        (Race, "m.", "barrier()\n        mbarrier.arrive(bars.empty_h, count=1)", "mbarrier.arrive(bars.empty_h, count=1)"),
        (Race, "m.", "tma.store_wait(0)\n            barrier()", "barrier()"),
        (Race, "m.", "fence_async_shared()\n        barrier()\n        mbarrier.arrive(bars.ready", "barrier()\n        mbarrier.arrive(bars.ready"),
        (Race, "m.gcs", "fence_async_shared()\n        barrier()\n        mbarrier.arrive(bars.used", "barrier()\n        mbarrier.arrive(bars.used"),
        (OUTSIDE, "place 1", "ring(gc_desc, 2)", "ring(gc_desc, 1)"),
        (Unfinished, "ends", "N - 1, HV, BT)\n    tma.store_wait(0)", "N - 1, HV, BT)"),
    ],
}  # fmt: skip


def _cases():
    for (case, file), mistakes in MISTAKES.items():
        for i, mistake in enumerate(mistakes):
            yield pytest.param(case, file, *mistake, id=f"{case}-{file}-{i}-{mistake[0].__name__}")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("case", "file", "error", "named", "before", "after"), [*_cases()])
def test_a_mistake_is_found(case, file, error, named, before, after):
    changes = ((file_of(file), before, after),)
    with pytest.raises(error, match=re.escape(named)):
        CASES[case].check(torch.device("cpu"), changes=changes)
