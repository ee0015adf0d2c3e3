"""Mistakes in each kernel in Gluon: the interpreter finds them, or the comparison does.

Of each kind where a kernel has it: a sign, a phase, a wait or a barrier left out, a ring that is
too short, a number of bytes.
"""

import inspect
import re
from collections import Counter
from importlib import import_module

import pytest
import torch
from grids import FULL
from kernels.gluon_cases import CASES, NO_GPU
from kernels.gluon_small import double_gluon

from linattn_edu.gluon_interpreter import ByteCount, Deadlock, Race, Unfinished, interpreted

pytestmark = [pytest.mark.usefixtures("poison"), NO_GPU]
Wrong = AssertionError  # the result is not the reference's
OUTSIDE = IndexError  # a place that a ring does not have
LEFT_OUT, LEFT = "pass", "pass\n"
STORED = "    tma.store_wait(0)\n"
# with what follows where a text alone is in a file twice
WAIT_OTHERS, HAND_OVER = "mbarrier.wait(out.index(3), i_t & 1)\n", "hand_over(out.index(2))"
BARRIER = "barrier()\n        "
WAIT_FULL = "mbarrier.wait(chunks.full.index(i), i_t // chunks.STAGES & 1)\n        "
FULL_H = "mbarrier.wait(bars.full_h.index(c), turn)\n"
USED = "mbarrier.arrive(bars.used.index(c), count=1)\n"
WAIT_DH = "mbarrier.wait(bars.full_dh, n & 1)\n            "
READY = (
    "fence_async_shared()\n            barrier()\n            mbarrier.arrive(bars.ready, count=1)"
)
STORE_NEW = "        store_transposed(b_new.to(dtype), new)"
STORE_Z = "        store_transposed(b_Z.to(dtype), others[0])"
STORE_Z_OF_GDN = STORE_Z.replace("others[0]", "Zs")

# case -> file of its kernel -> mistakes: the error, what it names, a text that the file has once,
# and what of it becomes what; else all of it is left out
MISTAKES = {
    ("double", "kernels.gluon_small"): [
        (Wrong, "not 2 x", "load(layout) * 2", "2", "3"),
        (Race, "xs[0] is", "mbarrier.wait(full.index(i), n // 2 & 1)"),
        (Race, "xs[0] is written by a copy", "mbarrier.wait(empty.index(i), (n // 2 & 1) ^ 1)"),
        (Deadlock, "load) waits for empty[0] (phase 0)", "(n // 2 & 1) ^ 1", " ^ 1", ""),
        (Deadlock, "double) waits for full[0]", "bar_pairs(2, 1, 1)", "2, 1, 1", "2, 2, 1"),
        (ByteCount, "full[0] expects 8184", "BYTES)\n        async_load", "BYTES", "BYTES - 8"),
        (ByteCount, "full[0] expects 8200", "BYTES)\n        async_load", "BYTES", "BYTES + 8"),
        (Race, "xs[0] is written by a copy", "barrier()  # all have read", "barrier()", "pass"),
        (Race, "out[0] is read by a copy out", "barrier()  # all have w", "barrier()", "pass"),
        (Race, "out[0] is written", STORED + "        barrier()", "tma.store_wait(0)", "pass"),
        (Race, "fence", "fence_async_shared()\n        barrier()", "fence_async_shared()", "pass"),
        (Race, "full[0]", "fence_async_shared()\n    gl.warp", "fence_async_shared()", "pass"),
        (Unfinished, "double) ends", "out.index(0))\n" + STORED, "tma.store_wait(0)", "pass"),
        (OUTSIDE, "place 1 of", "ring(x_desc, 2)", "2", "1"),
    ],
    ("gdn_scan", "gdn_scan"): [
        (Wrong, "output 0", "- b_e * b_W", "-", "+"),
        (Wrong, "output 0", "b_r = gates.index(3 * i + 1)", " + 1", ""),
        (Wrong, "output 0", "chunks.first + i_t * chunks.BT, c_v", "i_t", "i"),
        (Race, "ks[0] is", "mbarrier.wait(full.index(0), 0)"),
        (Race, "by a copy of part 1", "barrier()  # no warp reads", "barrier()", "pass"),
        (Race, "out[0] is written", "tma.store_wait(0)\n        barrier()  # no",
         "tma.store_wait(0)\n        ", ""),
        (Race, "out[0] is read by a copy out", "        fence_async_shared()\n        barrier()\n",
         "fence_async_shared()\n        ", ""),
        (Deadlock, "empty[0]", "mbarrier.arrive(empty.index(i), count=1)"),
        (OUTSIDE, "place 2 of", "ring(R_desc, STAGES)", "STAGES", "STAGES - 1"),
        (Unfinished, "product", "wait(HALVES - 1, [b_new])", " - 1", ""),
    ],
    ("gdn_scan", "scan_frame"): [
        (Race, "ks[1] is", "i_next // chunks.STAGES & 1", "& 1", "& 1 ^ 1"),
        (Wrong, "output 0", "gl.exp2(b_last - b_gc)", "b_last - b_gc", "b_gc - b_last"),
        (ByteCount, "full[0] expects", "expect(bar, chunks.BYTES)", "BYTES", "BYTES - 8"),
        (ByteCount, "full[0] expects", "expect(bar, chunks.BYTES)", "BYTES", "BYTES + 8"),
        (Race, "ks[0] is", "mbarrier.wait(chunks.empty.index(i), (i_t // chunks.STAGES & 1) ^ 1)"),
        (Deadlock, "empty[0]",
         "mbarrier.wait(chunks.empty.index(i), (i_t // chunks.STAGES & 1) ^ 1)", " ^ 1", ""),
        (Race, "gates[0] is", BARRIER + "mbarrier.arrive(chunks.full.index(i), count=1)",
         BARRIER, ""),
        (Deadlock, "full[0]", BARRIER + "mbarrier.arrive(chunks.full.index(i), count=1)",
         "mbarrier.arrive(chunks.full.index(i), count=1)", LEFT_OUT),
        (Deadlock, "full[0]", "bar_pairs(STAGES, 2, WORKERS)", "2", "3"),
        (Race, "gates[0] is", "bar_pairs(STAGES, 2, WORKERS)", "2", "1"),
    ],
    ("gdn_fwd", "gdn_fwd"): [
        (Wrong, "output 0", ".load(ALONG)[None, :] * b_W", " * b_W", ""),
        (Wrong, "output 2", "i_t * chunks.BT, c_t]", "i_t", "i"),
        (Race, "ks[0] is", "mbarrier.wait(chunks.full.index(0), 0)"),
        (Race, "ks[0] is", WAIT_FULL + "b_h", WAIT_FULL, ""),
        (Race, "inner[0] is written", "mbarrier.wait(made.full.index(j), i_t // 2 & 1)"),
        (Race, "is written", "mbarrier.wait(made.empty.index(j), (i_t // 2 & 1) ^ 1)"),
        (Deadlock, "empty[0]", "mbarrier.arrive(made.empty.index(j), count=1)"),
        (Deadlock, "empty[0]", "mbarrier.arrive(chunks.empty.index(i), count=1)"),
        (Race, "Xs[0] is", "hand_over(made.full.index(j))"),
        (Deadlock, "empty[0]", "bar_pairs(2, 1, WORKERS)", "WORKERS", "WORKERS + 1"),
        (Race, "read by a copy out", "tma.store_wait(0)  # the same"),
        (Race, "out", STORED + "        barrier()  # no", "tma.store_wait(0)\n        ", ""),
        (Race, "gcs[0] is", "self.gcs.index(i).store", "i)", "0)"),
        (OUTSIDE, "place 2", "ring(v_desc, STAGES)", "STAGES", "STAGES - 1"),
    ],
    ("gdn_fwd, V=64", "gdn_fwd"): [
        (Race, "Xs", "tma.store_wait(0)\n            barrier()  # what was", "tma.store_wait(0)",
         "pass"),
    ],
    ("gdn_fwd", "gdn_solve"): [
        (Wrong, "output", "layout), N_s.slice(32, 16), acc)", "32", "16"),
        (Wrong, "output", "L_s.slice(32, 32), b_N)", "32, 32", "0, 32"),
        (Wrong, "output", "gl.convert_layout(gl.split(last)[0], layout)", "0", "1"),
    ],
    ("gdn_fwd, nothing kept", "gdn_fwd"): [
        (Unfinished, "product", "        b_S = warpgroup_mma_wait(0, [b_S])\n", "0", "1"),
    ],
    ("gdn_fwd, V=64, no states", "gdn_fwd"): [
        (Wrong, "output 0", "chunks.first + n * chunks.BT, given, gates", "n *", "(n - 1) *"),
        (Wrong, "output 0", "given.of(n + 1, chunks.NT", " + 1", ""),
        (Race, "ks[0] is", "mbarrier.wait(chunks.empty.index(i), (n // chunks.STAGES & 1) ^ 1)"),
        (Race, "ks[0] is", "mbarrier.wait(chunks.full.index(0), 0)"),
        (Race, "gates[0] is", BARRIER + "    mbarrier.arrive(chunks.full.index(n", BARRIER + "    ",
         ""),
        (Deadlock, "full[0]", "mbarrier.arrive(chunks.full.index(n % chunks.STAGES), count=1)"),
        (Deadlock, "full[0]", "mbarrier.arrive(chunks.full.index(i), count=1)"),
        (Race, "ks[0] is", "(n // chunks.STAGES & 1) ^ 1)", " ^ 1", ""),
        (Unfinished, "product", "        b_P = warpgroup_mma_wait(0, [b_P])\n", "0", "1"),
        (Unfinished, "product", "        b_S = warpgroup_mma_wait(0, [b_S])\n", "0", "1"),
    ],
    ("gdn_scans, forth", "scan_frame"): [
        (Wrong, "output 0", "i + made.K // 2, made.c_S", " + made.K // 2", ""),
        (Race, "halves[0][0] is read by a copy out",
         "fence_async_shared()\n    barrier()\n    mbarrier.arrive(bar, count=1)",
         "fence_async_shared()\n    ", ""),
        (Race, "halves[0][0] is read by a copy out",
         "fence_async_shared()\n    barrier()\n    mbarrier.arrive(bar, count=1)",
         "barrier()\n    ", ""),
        (Race, "halves[0][0] is", "mbarrier.wait(made.bars.index(0), i_t & 1)"),
        (Race, "others[0][0] is", "mbarrier.wait(made.bars.index(2), i_t & 1)"),
        (Race, "others[0][0] is", "bars.index(2), i_t & 1", "1", "1 ^ 1"),
        (Race, "halves[0][0] is", "tma.store_wait(len(made.others))"),
        (Race, "others[0][0] is", "tma.store_wait(len(made.halves))"),
        (Race, "others[0][0] is",
         "barrier()\n        mbarrier.arrive(made.bars.index(3), count=1)", "barrier()\n        ",
         ""),
        (Deadlock, "bars[3]", "mbarrier.arrive(made.bars.index(3), count=1)"),
        (Deadlock, "bars[1]", "mbarrier.arrive(made.bars.index(1), count=1)"),
        (Unfinished, "store_chunks", "    tma.store_wait(0)", "tma.store_wait(0)", "pass"),
    ],
    ("gdn_scans, forth", "gdn_scans"): [
        (Wrong, "output", "gates.index(3 * i).load(ALONG)[None, :] * b_W",
         "gates.index(3 * i).load(ALONG)[None, :] * ", ""),
        (Wrong, "output", "b_x = operand(b_new * b_r", "(", "(-"),
        (Deadlock, "bars[3]", WAIT_OTHERS + STORE_NEW, "i_t & 1", "i_t & 1 ^ 1"),
        (Deadlock, "bars[2]", HAND_OVER + "\n        b_S1, b_S2, b_W", HAND_OVER, LEFT_OUT),
        (OUTSIDE, "place 3", "rings = ring(k_desc, STAGES)", "STAGES", "STAGES - 1"),
    ],
    ("gdn_scans, back", "gdn_scans"): [
        (Wrong, "output", "operand(-b_e * b_dv", "-", ""),
        (Wrong, "output", "operand(b_do, dtype), Ps.index(i)", "P", "AG"),
        (Deadlock, "bars[3]", WAIT_OTHERS + STORE_Z_OF_GDN, "i_t & 1", "i_t & 1 ^ 1"),
        (Deadlock, "bars[2]", HAND_OVER + "\n        b_S1, b_S2, b_dv", HAND_OVER, LEFT_OUT),
        (OUTSIDE, "place 2", "ks, qs, dos = ring(k_desc, STAGES)", "STAGES", "STAGES - 1"),
        (Unfinished, "product", "b_dv = warpgroup_mma_wait(1, [b_dv])", "1", "2"),
    ],
    ("gdn_intra", "gdn_intra"): [
        (Wrong, "output", "gl.minimum(o_t, n_t - 1)", "1", "2"),
        (Race, "k_s is", "    async_copy.wait_group(0)\n", "    async_copy.wait_group(0)\n", ""),
        (Race, "fence_async_shared", "async_copy.wait_group(0)\n    fence_async_shared()\n",
         "    fence_async_shared()\n", ""),
        (Race, "k_s is read by a product",
         "wait_group(0)\n    fence_async_shared()\n    barrier()", "\n    barrier()", ""),
        (Race, "X_s is written", "GATED).to(dtype)\n        barrier()\n        A_s",
         "barrier()\n        ", ""),
    ],
    ("gdn_intra", "gdn_solve"): [
        (Wrong, "output", "gl.where(blocks_beside(z) < 0, -b_u, 0.0)", "-", ""),
        (Wrong, "output", "D_s.store(b_D * -b_beta", "-", ""),
        (Wrong, "output", "b_d = b_i - gl.where", "= ", "= -"),
        (Race, "fence_async_shared", "X_s, z)\n    fence_async_shared()\n    barrier()",
         "fence_async_shared()\n    ", ""),
        (Race, "k_s[0] is read by a product",
         "N_s.store(b_N.to(gl.float16))\n    fence_async_shared()\n    barrier()",
         "\n    barrier()", ""),
        (Unfinished, "product", "b_N = warpgroup_mma_wait(0, [b_N])", "0", "1"),
    ],
    ("gdn_fwd, where heads cancel", "gdn_solve"): [
        (Wrong, "cancels", "if few == 0:", "== 0", "== 1"),
        (Unfinished, "product", "b_PR = warpgroup_mma_wait(0, [b_PR])", "0", "1"),
    ],
    ("gdn_fwd, where heads cancel", "gdn_fwd"): [
        (Wrong, "cancels", "made.Rs.index(j), gates.index(3 * i + 2))", "3 * i + 2", "3 * i"),
    ],
    ("gdn_fwd, either bound", "gdn_solve"): [
        (Wrong, "cancels", "few = (gl.sum(sums_s.load(VECTOR), 0) <= 0)", "<= 0", "* 0 <= 0"),
        (Wrong, "cancels", "& (gl.sum(b_x, 0) <= 0)", "<= 0", "* 0 <= 0"),
    ],
    ("kda_halves", "gdn_solve"): [
        (Wrong, "cancels", "gl.store(cancels_ptr + i_nh // G", "i_nh", "0 * i_nh"),
    ],
    ("kda_halves", "kda_intra"): [
        (Race, "fence_async_shared", "cancels_ptr is not None:\n        fence_async_shared()",
         "fence_async_shared()", "pass"),
    ],
    ("gdn_intra, ring", "gdn_intra"): [
        (ByteCount, "m.full expects", "mbarrier.expect(m.full, 2 * BT * K * 2)", "2 * ", ""),
        (ByteCount, "m.full expects", "mbarrier.expect(m.full, 2 * BT * K * 2)", ", 2", ", 4"),
        (Race, "m.gates", "mbarrier.wait(m.gates_full, n & 1)"),
        (Race, "m.ks[0] is", "mbarrier.wait(m.full, n // G & 1)"),
        (Race, "m.ks[0] is", "mbarrier.wait(m.empty, (n & 1) ^ 1)"),
        (Deadlock, "m.empty", "(n & 1) ^ 1", "(n & 1) ^", "n &"),
        (Deadlock, "m.empty", "mbarrier.arrive(m.empty, count=1)"),
        (Deadlock, "m.full", "n // G & 1", "// G ", ""),
        (Race, "read by a copy out", "barrier()  # no warp reads", "barrier()", "pass"),
        (Race, "m.", "tma.store_wait(0)\n        barrier()  # no", "tma.store_wait(0)\n        ",
         ""),
        (Race, "m.gates", "barrier()\n        mbarrier.arrive(m.gates_full, count=1)",
         "barrier()\n        ", ""),
        (Race, "is read by a copy out", "fence_async_shared()\n        barrier()\n        at",
         "fence_async_shared()\n        ", ""),
        (OUTSIDE, "place 2", "[3, BT, BT]", "3", "2"),
        (OUTSIDE, "place 2", "numbers([4, BT])", "4", "2"),
        (Wrong, "output", "async_store(R_desc, at, R_s)", " R", " P"),
    ],
    ("gdn_bwd", "gdn_bwd"): [
        (Wrong, "output", "operand(-b_e * b_dv", "-", ""),
        (Wrong, "output", "b_P = gl.where(below, -b_P, 0.0)", "-", ""),
        (Wrong, "output", "b_F * -(b_one", "-", ""),
        (Wrong, "output", "b_dgc - b_KD", "-", "+"),
        (Wrong, "output", "b_dgc += b_KF * b_two", "+=", "-="),
        (Wrong, "output", "b_dbeta += b_KF * (1.0 / b_one)", "(1.0 / b_one)", "b_two"),
        (ByteCount, "b.full_h[0] expects", "expect(full_h, 3 ", "3", "2"),
        (ByteCount, "b.full_do[0] expects", "expect(full, 2 * 64 * 64 * 2)\n    row", "2 ", "4 "),
        (Race, "m.qs[0] is", "bars.full_q, turn)\n        b_S1", "bars.full_q, turn",
         "bars.used.index(0), turn ^ 1"),
        (Race, "m.Ss[", FULL_H + "    mbarrier.wait(bars.full_M", FULL_H, LEFT),
        (Race, "m.Ss[0] is", FULL_H + "    b_F", FULL_H, LEFT),
        (Race, "m.inner[0] is", "mbarrier.wait(bars.full_M, turn)"),
        (Race, "m.dos[", "mbarrier.wait(bars.read_do, turn)"),
        (Race, "m.dos[", "mbarrier.wait(bars.empty_do.index(i), (n // 2 & 1) ^ 1)"),
        (Race, "m.news[0] is", "mbarrier.wait(bars.full_new, turn)"),
        (Race, "m.Ps[0] is", "mbarrier.wait(bars.full_P, turn)"),
        (Race, "m.Zs[0] is", "mbarrier.wait(bars.full_Z, turn)\n        b_P",
         "mbarrier.wait(bars.full_Z, turn)\n", LEFT),
        (Race, "m.Ps[", "mbarrier.wait(bars.full_Z, turn)  # both"),
        (Race, "m.", "mbarrier.wait(bars.updated, turn)"),
        (Race, "m.dSs[", "mbarrier.wait(bars.used.index(0), turn ^ 1)"),
        (Race, "m.", "mbarrier.wait(bars.used.index(1), turn ^ 1)"),
        (Race, "m.", "mbarrier.wait(bars.used.index(c), empty)"),
        (Race, "m.qs[", "mbarrier.wait(bars.used_q, empty)"),
        (Race, "m.Ps[", "mbarrier.wait(bars.empty_P, empty)"),
        (Deadlock, "b.used", USED + "    # eq", USED, LEFT),
        (Deadlock, "b.used", USED + "    b_dk", USED, LEFT),
        (Deadlock, "b.used_q", "mbarrier.arrive(bars.used_q, count=1)"),
        (Deadlock, "b.read_do", "mbarrier.arrive(bars.read_do, count=1)"),
        (Race, "m.dos[", "hand_over(bars.updated)"),
        (Deadlock, "b.full_M", "hand_over(bars.full_M)"),
        (Race, "m.Ps[1] is", "hand_over(bars.full_Z)"),
        (Race, "m.", "barrier()  # dk of the chunk after has left", "barrier()", "pass"),
        (Race, "m.", "barrier()  # no warp reads the half of S", "barrier()", "pass"),
        (Race, "m.", "barrier()  # no warp reads the half of k", "barrier()", "pass"),
        (OUTSIDE, "place 2", "ring(k_desc, 4)", "4", "2"),
        (Unfinished, "product", "b_Z = warpgroup_mma_wait(0, [b_Z])", "0", "1"),
    ],
    ("gdn_intra_bwd", "gdn_intra_bwd"): [
        (Wrong, "output", "b_P = gl.where(below, -b_P, 0.0)", "-", ""),
        (Wrong, "output", "b_F * -(b_one", "-", ""),
        (Wrong, "output", "b_dgc -= own_sums(b_k * b_dk)", "-", "+"),
        (Wrong, "output", "b_dgc += b_KF * b_twos", "b_twos", "b_ones"),
        (ByteCount, "b.full_Z expects", "expect(bars.full_Z, (3 if FINE else 2) *", "2", "1"),
        (ByteCount, "full_new[0] expects", "expect(full, (3 if FINE else 2) *", "2", "4"),
        (ByteCount, "b.full_k expects", "expect(bars.full_k, 2 * BT * K * 2)", "2 * ", ""),
        (Race, "m.news[0] is", "mbarrier.wait(bars.full_new.index(i), n // PLACES & 1)"),
        (Race, "m.", "mbarrier.wait(bars.full_Z, n & 1)"),
        (Race, "m.hs[0] is", "mbarrier.wait(bars.full_h, n & 1)"),
        (Race, "m.dhs[0] is", "mbarrier.wait(bars.full_dh, n & 1)"),
        (Race, "m.", "mbarrier.wait(bars.full_k, n // G & 1)"),
        (Race, "m.", "mbarrier.wait(bars.ready, n & 1)"),
        (Race, "m.", "mbarrier.wait(bars.used, (n & 1) ^ 1)"),
        (Race, "m.", "mbarrier.wait(bars.empty_h, (n + AHEAD & 1) ^ 1)"),
        (Race, "m.", "mbarrier.wait(bars.empty_k, ((n - AHEAD) // G & 1) ^ 1)"),
        (Deadlock, "b.empty_k", "((n - AHEAD) // G & 1) ^ 1", " ^ 1", ""),
        (Race, "m.", "bars.full_new.index(i), n // PLACES & 1", "1", "1 ^ 1"),
        (Deadlock, "b.used", "mbarrier.arrive(bars.used, count=1)"),
        (Deadlock, "b.empty_h", "mbarrier.arrive(bars.empty_h, count=1)"),
        (Race, "m.", "barrier()\n        mbarrier.arrive(bars.empty_h, count=1)",
         "barrier()\n        ", ""),
        (Race, "m.inner",
         "fence_async_shared()\n        barrier()\n        mbarrier.arrive(bars.ready",
         "fence_async_shared()\n        ", ""),
        (Race, "m.", "barrier()  # no warp reads what", "barrier()", "pass"),
        (OUTSIDE, "place 1", "ring(v_new_desc, PLACES)", "PLACES", "1"),
        (Deadlock, "nobody answers", "bar(1), bar(1), bar(1), bar(1), bar(GROUPS)", "S)", "S + 1)"),
        (Unfinished, "ends", "N - 1, ROW, H, G, BT, GROUPS)\n    tma.store_wait(0)",
         "\n    tma.store_wait(0)", ""),
    ],
    ("gdn_intra_bwd, halves", "gdn_intra_bwd"): [
        (Wrong, "output", "b_ones > 0.5, b_written - b_ones * b_dbeta", "- b_ones", "+ b_ones"),
        (ByteCount, "b.full_Z expects", "expect(bars.full_Z, (3 if FINE else 2) *", "3", "2"),
        (ByteCount, "full_new[0] expects", "expect(full, (3 if FINE else 2) *", "3", "2"),
        (Race, "Z_lows[0] is", "mbarrier.wait(bars.empty_h, (n + AHEAD & 1) ^ 1)"),
        (Unfinished, "product", "warpgroup_mma_wait(BEGUN + (2 - GROUPS)", "BEGUN", "BEGUN + 1"),
        (Unfinished, "product", "warpgroup_mma_wait(3 * MORE, [b_dq])", "3", "4"),
        (Unfinished, "product", "warpgroup_mma_wait(2 * MORE, [b_F])", "2", "3"),
    ],
    ("gdn_bwd, some cancel", "gdn_intra_bwd"): [
        (Wrong, "output", "NT * H if items_ptr is None else gl.load(items_ptr)",
         "gl.load(items_ptr)", "gl.load(items_ptr) - 1"),
        (Wrong, "output", "i_c, _, i_hv = item_at(n, H, G, out.items_ptr)", "out.items_ptr",
         "None"),
    ],
    ("kda_halves_bwd, both", "kda_intra_bwd"): [
        (Wrong, "output", "NT * HV if items_ptr is None else gl.load(items_ptr)",
         "gl.load(items_ptr)", "gl.load(items_ptr) - 1"),
        (Wrong, "output", "def store_sums(parts, out, n, HV: gl.constexpr, BT: gl.constexpr):\n"
         '    """Add what both halves left of dbeta of the n-th item."""\n'
         "    i_c, i_h, _ = item_at(n, HV, 1, out.items_ptr)", "out.items_ptr", "None"),
    ],
    ("kda_halves", "scan_frame"): [
        (OUTSIDE, "a pointer to", "some: gl.constexpr = warmup_ptr is not None",
         "warmup_ptr is not None", "False"),
    ],
    ("gdn_intra_bwd, K=64", "gdn_intra_bwd"): [
        (Wrong, "output", "b_dbeta = whole(parts, 1, GROUPS)", "1", "0"),
        (Wrong, "output", "if c == GROUPS - 1:\n            b_L = products(Z,", "Z", "do"),
        (Unfinished, "product", "warpgroup_mma_wait(BEGUN + (2 - GROUPS)", "2 - G", "3 - G"),
        (Unfinished, "product", "warpgroup_mma_wait(BEGUN, [b_L])", "BEGUN", "BEGUN + 1"),
        (OUTSIDE, "place 1", "ring(do_desc, PLACES)", "PLACES", "1"),
    ],
    ("kda_intra", "kda_intra"): [
        (Wrong, "output 1", "b_x = (b_a[None, :] - b_before)", " - ", " + "),
        (Wrong, "output 1", "gl.exp2(gl.minimum(b_x, MOST)) * b_k", "gl.minimum(b_x, MOST)", "b_x"),
        (Wrong, "output 1", "row_of(b_g, i, (2 * p + 1) << s)", " + 1", ""),
        (Wrong, "output 1", "        leave_squares(x_s, squares_s, N)", "squares_s", "own_s"),
        (Wrong, "output 4", "before(sums_s, 4)", "4", "3"),
        (Wrong, "output 1", "own = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] // 16 == b",
         "== b", ">= b"),
        (Race, "F_s[0] is", "* b_k, q_s.dtype))\n        fence_async_shared()\n        barrier()",
         "barrier()", ""),
        (Race, "x_s[",
         "async_copy.wait_group(0)\n            barrier()\n            b_P, b_L = halve",
         "async_copy.wait_group(0)\n            barrier()", LEFT_OUT),
    ],
    ("kda_intra, promised", "kda_intra"): [
        (Wrong, "output 1", "PROMISED if NEAR_ALL else NEAR", "PROMISED if NEAR_ALL else ", ""),
    ],
    ("kda_intra, gated", "kda_intra"): [
        (Wrong, "output 3", "write_tile(out.kd_ptr + c * 64, b_e * erased(b_k, erase_s), out)",
         "erased(b_k, erase_s)", "b_k"),
        (Wrong, "output 1", "b_k = gl.where((i >> s) & 1 == 1, b_k", " == 1, b_k", " == 0, b_k"),
        (Wrong, "output 2", "    if erase_ptr is not None:\n        leave_squares(x_s, u_s, N)",
         "u_s", "w_s"),
        (Race, "F_s[0] is", "barrier()  # no warp reads F any more", "barrier()", "pass"),
    ],
    ("kda_scan, two", "kda_scan"): [
        (Wrong, "output 0", "b_S2 *= gates.index(3 * i + 1)", " + 1", ""),
        (Race, "kds[0] is", "mbarrier.wait(full.index(0), 0, pred=NT > 0)"),
        (Race, "by a copy of part 2", "barrier()  # no warp reads", "barrier()", "pass"),
        (Race, "out[1] is read by a copy out", "        fence_async_shared()\n        barrier()\n",
         "fence_async_shared()\n        ", ""),
        (Deadlock, "empty[0]", "mbarrier.arrive(empty.index(i), count=1)"),
        (OUTSIDE, "place 1 of", "ring(kg_desc, STAGES)", "STAGES", "STAGES - 1"),
        (Unfinished, "product", "b_new = warpgroup_mma_wait(1, [b_new])", "1", "2"),
    ],
    ("kda_scan, two", "scan_frame"): [
        (Deadlock, "full[1]", "i_next // chunks.STAGES & 1", "& 1", "& 1 ^ 1"),
        (ByteCount, "full[0] expects", "expect(bar, chunks.BYTES)", "BYTES", "BYTES - 8"),
        (Race, "by a copy of part 2", "bar_pairs(STAGES, 2, WORKERS)", "WORKERS", "1"),
        (Wrong, "output", "b_a2 = gl.load(last_ptr + 64", " + 64", ""),
        (Wrong, "output 0", "b_W = b_v.to(gl.float32) - b_W", " - ", " + "),
    ],
    ("kda_scan, two, gated", "scan_frame"): [
        (Wrong, "output 0", "b_w.to(gl.float32) - b_W", "-", "+"),
        (Wrong, "output 0", "half(chunks.rings[N].index(i), W)", "W", "0"),
    ],
    ("kda_scan, two, gated", "kda_scan"): [
        (OUTSIDE, "place 1 of", "ring(write_desc, STAGES)", "STAGES", "STAGES - 1"),
    ],
    ("kda_scans, both", "kda_scans"): [
        (Wrong, "output", "operand(-b_dv", "-", ""),
        (Deadlock, "bars[3]", WAIT_OTHERS + STORE_NEW, "i_t & 1", "i_t & 1 ^ 1"),
        (Deadlock, "bars[3]", WAIT_OTHERS + STORE_Z, "i_t & 1", "i_t & 1 ^ 1"),
        (Deadlock, "bars[2]", HAND_OVER + "\n        b_S1, b_S2, b_W", HAND_OVER, LEFT_OUT),
        (Deadlock, "bars[2]", "hand_over(out.index(2))\n        # eq:kda-dv-out",
         HAND_OVER, LEFT_OUT),
        (OUTSIDE, "place 2 of", "kds, kgs = ring(kd_desc, STAGES), ring(kg_desc, STAGES)\n    vs",
         "d_desc, STAGES", "d_desc, STAGES - 1"),
        (OUTSIDE, "place 1 of", "dos, As, Ps = ring(do_desc, STAGES)", "STAGES", "STAGES - 1"),
        (Unfinished, "product", "b_Z = warpgroup_mma_wait(2, [b_Z])", "2", "3"),
    ],
    ("kda_scans, both", "scan_frame"): [
        (ByteCount, "full[0] expects", "expect(bar, chunks.BYTES)", "BYTES", "BYTES + 8"),
        (Wrong, "output", "b_W = b_v.to(gl.float32) - b_W", " - ", " + "),
    ],
    ("kda_intra_bwd", "kda_intra_bwd"): [
        (Wrong, "output", "b_P = gl.where(below, -b_P, 0.0)", "-", ""),
        (Wrong, "output", "b_y *= -gl.exp2(b_ga)[:, None]", "-", ""),
        (Wrong, "output", "k.permute((1, 0)).store((-b_y).to(dtype))", "(-b_y)", "b_y"),
        (Wrong, "output", "low.store(b_rest)", "b_rest", "b_high"),
        (Wrong, "output", "operand(b_kF, dtype), operand(b_low, dtype)", "b_low", "b_kF"),
        (Unfinished, "product", "b_r = warpgroup_mma_wait(0, [b_r])", "0", "2"),
        (Race, "m.", "mbarrier.wait(bars.full_new, n & 1)"),
        (Race, "m.hs[0] is", "mbarrier.wait(bars.full_h, n & 1)"),
        (Race, "m.dhs[0] is", WAIT_DH + "b_r = product(", WAIT_DH, ""),
        (Race, "m.", "mbarrier.wait(bars.full_k, n & 1)"),
        (Race, "m.", "mbarrier.wait(bars.gates_full, n & 1)"),
        (Race, "m.", "mbarrier.wait(bars.used, (n & 1) ^ 1)"),
        (Deadlock, "b.used", "mbarrier.arrive(bars.used, count=1)"),
        (Deadlock, "b.empty_h", "mbarrier.arrive(bars.empty_h, count=1)"),
        (Deadlock, "b.empty_k", "mbarrier.arrive(bars.empty_k, count=1)"),
        (Race, "m.", "[b_x, b_y, b_r])\n        barrier()\n", "barrier()", LEFT_OUT),
        (Race, "m.", "tma.store_wait(0)\n            barrier()", "tma.store_wait(0)\n            ",
         ""),
        (Race, "m.", READY + "\n        # eq", "fence_async_shared()\n            ", ""),
        (Race, "m.gcs",
         "fence_async_shared()\n        barrier()\n        mbarrier.arrive(bars.used",
         "fence_async_shared()\n        ", ""),
        (OUTSIDE, "place 1", "ring(gc_desc, 2)", "2", "1"),
        (Unfinished, "ends", "N - 1, HV, BT)\n    tma.store_wait(0)", "\n    tma.store_wait(0)",
         ""),
    ],
    ("kda_intra_bwd", "kda_intra_tiles"): [
        (Wrong, "output", "i_h * K + c * (K // 2)]", "c", "(1 - c)"),
        (ByteCount, "b.full_new expects", "else 4 if m.bs is None else 3", "4", "3"),
        (ByteCount, "chunks[0] expects", "8 if m.bs is None else 10", "8", "12"),
        (Race, "m.", "mbarrier.wait(bars.empty_h, (n & 1) ^ 1)"),
        (Race, "m.", "mbarrier.wait(bars.empty_k, (n & 1) ^ 1)"),
        (Deadlock, "b.empty_h", "bars.empty_h, (n & 1) ^ 1", "(n & 1) ^", "n &"),
    ],
    ("kda_intra_bwd, halves", "kda_intra_bwd"): [
        (Wrong, "output", "gl.where(not_written(m.betas, both, ALONG), b_KY, 0.0)", "b_KY, 0.0",
         "b_KY, b_KY"),
        (Wrong, "output", "| (both == 0.0)", "both == 0.0", "both < 0.0"),
        (Wrong, "output", "half(S1, 1), half(S2, 1)", "half(S2, 1)", "half(S2, 0)"),
        (Race, "m.dhs[0] is", WAIT_DH + "b_r = products(", WAIT_DH, ""),
        (Race, "m.hs[0] is", "[b_x, b_y, b_r])\n        barrier()\n", "barrier()", LEFT_OUT),
        (Race, "m.hs", READY + "\n        mbarrier", "fence_async_shared()\n            ", ""),
        (Unfinished, "product", "warpgroup_mma_wait(5 if FINE else 3, [b_P])", "5", "6"),
    ],
    ("kda_intra_bwd, halves", "kda_intra_tiles"): [
        (Wrong, "output", "[begin, wide + V], bars.full_new, m.v_lows", " + V", ""),
        (ByteCount, "b.full_new expects", "5 if source.FINE else", "5", "4"),
        (Race, "m.hs[0] is", "mbarrier.wait(bars.used, (n & 1) ^ 1)"),
    ],
    ("kda_intra_bwd, gated", "kda_intra_bwd"): [
        (Wrong, "output", "b_db = b_k * b_y", "b_y", "b_x"),
        (Race, "m.Zs[0] is", "bar(2 if beta else 3)", "3", "2"),
        (OUTSIDE, "place 1", "ring(erase_desc, 2)", "2", "1"),
    ],
    ("kda_intra_bwd, gated", "kda_intra_tiles"): [
        (Wrong, "output", "(w.load(layout).to(gl.float32) * b_Z)", "w", "v"),
        (ByteCount, "b.full_new expects", "4 if m.bs is None else 3", "3", "4"),
        (ByteCount, "chunks[0] expects", "8 if m.bs is None else 10", "10", "8"),
        (ByteCount, "x.full expects", "expect(x.full, BT * V)", "V", "V * 2"),
        (Race, "m.Zs[0] is", "if j == 0:\n                mbarrier.wait(bars.full_new, n & 1)",
         "mbarrier.wait(bars.full_new, n & 1)", LEFT_OUT),
        (Race, "v[0] is", "mbarrier.wait(x.full, j & 1)"),
        (Race, "v[0] is", "tma.store_wait(0)  # what was", "tma.store_wait(0)", LEFT_OUT),
        (Race, "v[0] is", "fence_async_shared()\n            barrier()\n            async_store",
         "fence_async_shared()\n            ", ""),
        (Deadlock, "b.empty_h", "mbarrier.arrive(bars.empty_h, count=1)\n    tma.store_wait(0)",
         "mbarrier.arrive(bars.empty_h, count=1)", LEFT_OUT),
        (Unfinished, "ends", "bars.empty_h, count=1)\n    tma.store_wait(0)",
         "\n    tma.store_wait(0)", ""),
    ],
    ("ssd_fwd", "ssd_fwd"): [
        (Wrong, "output 0", "b_gc[:, None] - b_gs[None, :], 100.0", " - b_gs", " + b_gs"),
        (Wrong, "output 0", "gl.where(ends, 0.0, last0)", "0.0, last0", "last0, 0.0"),
        (Wrong, "output", "gl.exp2(last - gs.load(rows))", "last - ", ""),
        (Wrong, "output 0", "i_t * 64 % at.BC]", "i_t * 64 % at.BC", "0"),
        (Wrong, "output 0", "b_y += b_x * b_D", "+", "-"),
        (ByteCount, "full[0] expects", "64 * 64 + 2 * 64", "64 * 64 +", ""),
        (Race, "Cs[0] is", "mbarrier.wait(t.full.index(i), i_t // t.STAGES & 1)\n        # eq",
         "mbarrier.wait(t.full.index(i), i_t // t.STAGES & 1)", LEFT_OUT),
        (Race, "Ss[0] is", "mbarrier.wait(t.full.index(i), i_t // t.STAGES & 1)\n        b_S",
         "mbarrier.wait(t.full.index(i), i_t // t.STAGES & 1)", LEFT_OUT),
        (Race, "s[0] is", "mbarrier.wait(t.empty.index(i), (i_t // t.STAGES & 1) ^ 1)"),
        (Race, "m.", "mbarrier.wait(m.full.index(j), i_t // 2 & 1)"),
        (Race, "m.", "mbarrier.wait(m.empty.index(j), (i_t // 2 & 1) ^ 1)"),
        (Race, "gates[0] is", "barrier()\n        mbarrier.arrive(full, count=1)",
         "barrier()\n        ", ""),
        (Race, "is written", "tma.store_wait(0)\n        barrier()  # the tile",
         "tma.store_wait(0)\n        ", ""),
        (Race, "is read by a copy out", "fence_async_shared()\n        barrier()\n        async",
         "fence_async_shared()\n        ", ""),
        (Deadlock, "m.empty[0]", "mbarrier.arrive(m.empty.index(j), count=1)"),
        (Deadlock, "empty[0]", "mbarrier.arrive(t.empty.index(i), count=1)\n        mbarrier",
         "mbarrier.arrive(t.empty.index(i), count=1)\n        ", ""),
        (Deadlock, "full[0]", "hand_over(m.full.index(j))"),
        (OUTSIDE, "place", "ring(S_desc, 4)", "4", "2"),
        (OUTSIDE, "place 2 of", "ring(x_desc, STAGES)", "STAGES", "STAGES - 1"),
        (Unfinished, "product", "wait(0, [b_h])", "0", "1"),
        (Unfinished, "ends", "count=1)\n    tma.store_wait(0)", "\n    tma.store_wait(0)", ""),
    ],
    ("ssd_fwd, in pieces", "ssd_fwd"): [
        (Wrong, "output 0", "kept *= gl.load(states.kept_ptr + i_end)", "*=", "+="),
        (Wrong, "output 0", "at.before - left", " - left", ""),
        (Wrong, "output 1", "n_t <= size, G", "<=", "<"),
    ],
    ("ssd_states", "ssd_states"): [
        (Wrong, "output 0", "last - b_g", "last - ", ""),
        (Wrong, "output 0", "b_h * gl.exp2(last)", " * gl.exp2(last)", ""),
        (Wrong, "output 0", "g_ptr + 64 + o_t", " + 64", ""),
        (Wrong, "output 0", "w * t.tokens + c", "w * ", ""),
        (ByteCount, "full[0] expects", "(64 * at.N + 2 * 64 * at.P) * 2", "+ 2 *", "+"),
        (Race, "s[0] is", "mbarrier.wait(t.full.index(i), n // t.STAGES & 1)"),
        (Race, "s[0] is", "mbarrier.wait(t.empty.index(i), (n // t.STAGES & 1) ^ 1)"),
        (Race, "is written", "tma.store_wait(0)\n        barrier()  # the state",
         "tma.store_wait(0)\n        ", ""),
        (Race, "is read by a copy out", "fence_async_shared()\n        barrier()\n        async",
         "fence_async_shared()\n        ", ""),
        (Race, "s[0] is", "barrier()\n        mbarrier.arrive(t.empty.index(i), count=1)",
         "barrier()\n        ", ""),
        (Deadlock, "empty[0]", "mbarrier.arrive(t.empty.index(i), count=1)"),
        (OUTSIDE, "place", "ring(x_desc, STAGES)", "STAGES", "2"),
        (Unfinished, "ends", "tma.store_wait(0)\n    if", "tma.store_wait(0)", LEFT_OUT),
    ],
    ("ssd_states, back", "ssd_states"): [
        (Wrong, "output 1", "at.tiles // 2 - 1 - n // 2", " - n // 2", ""),
    ],
    ("ssd_states, back in pieces", "ssd_states"): [
        (OUTSIDE, "place", "1 if BACK else -1", "1 if BACK", "-1 if BACK"),
        (Wrong, "output 1", "before == NP - 1, G", "NP - 1", "0"),
    ],
    ("ssd_bwd_dc", "ssd_bwd_dc"): [
        (Wrong, "output 0", "b_dy * b_e[:, None]", " * b_e[:, None]", ""),
        (Wrong, "output 1", "b_e * gl.sum(b_dy * b_y, 1)", "b_e * ", ""),
        (Wrong, "output 2", "a * dlast", "a * ", ""),
        (Wrong, "output 2", "h.slice(64 * c, 64).load", "64 * c", "0"),
        (Wrong, "output", "n + 1 < at.heads, at.tokens, 0", "at.tokens, 0", "0, 0"),
        (ByteCount, "full_in expects", "expect(t.full_in, 2 * 64", "2 * 64", "64"),
        (ByteCount, "full[0] expects", "(128 * at.P + 2 * N * at.P) * 2", "2 * N", "N"),
        (Race, "Cs[", "mbarrier.wait(t.full_in, 0)"),
        (Race, "s[0] is", "mbarrier.wait(t.full.index(i), n // t.STAGES & 1)"),
        (Race, "s[0] is", "mbarrier.wait(t.empty.index(i), turn)"),
        (Race, "s[0] is", "barrier()\n        mbarrier.arrive(t.empty.index(i), count=1)",
         "barrier()\n        ", ""),
        (Deadlock, "empty[0]", "mbarrier.arrive(t.empty.index(i), count=1)"),
        (OUTSIDE, "place", "ring(h_desc, STAGES)", "STAGES", "2"),
    ],
    ("ssd_bwd_dc, parts of a group", "ssd_bwd_dc"): [
        (Wrong, "output 0", "part = at.i_split * (", "at.i_split", "0"),
    ],
    ("ssd_bwd", "ssd_bwd"): [
        (Wrong, "output 0", "b_dxs * gl.exp2(last - mid)", " * gl.exp2(last - mid)", ""),
        (Wrong, "output 4", "b_dgc -= b_on * b_cols", "-=", "+="),
        (Wrong, "output", "b_gc - mid, 0.0", "b_gc - mid", "mid - b_gc"),
        (ByteCount, "b.full_in expects", "expect(bars.full_in, 4 * 64", "4 *", "2 *"),
        (ByteCount, "expects", "(2 * 128 * at.P + at.N * at.P) * 2", "(2 *", "(3 *"),
        (Race, "m.Bs[", "mbarrier.wait(bars.full_in, 0)\n    b_far",
         "mbarrier.wait(bars.full_in, 0)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.full.index(i), turn)\n        b_W",
         "mbarrier.wait(bars.full.index(i), turn)", LEFT_OUT),
        (Race, "m.", "mbarrier.wait(bars.empty.index(i), turn)"),
        (Race, "m.xs[", "mbarrier.wait(bars.empty_x.index(i), turn)"),
        (Race, "Cs[1] is", "mbarrier.wait(bars.far_made, 0)"),
        (Race, "Cs[", "far_made, 0)\n    barrier()  # no warp", "barrier()", "pass"),
        (Race, "m.far[0]", "mbarrier.wait(bars.v_full.index(i), turn)"),
        (Race, "m.", "mbarrier.wait(bars.shared_full.index(i), turn)"),
        (Deadlock, "empty_x[0]", "mbarrier.arrive(bars.empty_x.index((n - 1) % 2), count=1)"),
        (Deadlock, "empty[0]", "mbarrier.arrive(bars.empty.index(i), count=1)\n    o_t",
         "mbarrier.arrive(bars.empty.index(i), count=1)", LEFT_OUT),
        (Deadlock, "v_full[0]", "mbarrier.arrive(bars.v_full.index(i), count=1)"),
        (Deadlock, "shared_full[0]", "mbarrier.arrive(bars.shared_full.index(i), count=1)"),
        (Race, "m.", "barrier()\n        mbarrier.arrive(bars.empty.index(i), count=1)\n        x.",
         "barrier()\n        ", ""),
        (Race, "m.xs", "x.store(b_dx.to(dtype))\n        fence_async_shared()\n",
         "fence_async_shared()", LEFT_OUT),
        (Race, "m.vs", "v.dtype))\n    fence_async_shared()\n",
         "fence_async_shared()", LEFT_OUT),
        (Race, "m.gates", "barrier()\n        mbarrier.arrive(full, count=1)",
         "barrier()\n        ", ""),
        (OUTSIDE, "place 1", "ring(x_desc, 2)", "2", "1"),
        (OUTSIDE, "place 3", "numbers([6, 128])", "6", "3"),
        (Unfinished, "ends", "b_dS, 0.0))\n    tma.store_wait(0)", "\n    tma.store_wait(0)", ""),
    ],
}  # fmt: skip


def file_of(name):
    """A module of kernels/gluon, or of the tests."""
    return import_module(name if "." in name else f"linattn_edu.kernels.gluon.{name}")


def _cases():
    """All in the full suite, else two of each kind of error in each kernel."""
    for (case, file), mistakes in MISTAKES.items():
        seen = Counter()
        for i, (error, named, text, *change) in enumerate(mistakes):
            old, new = change or (text, LEFT_OUT)
            assert text.count(old) == 1 and text in inspect.getsource(file_of(file)), text
            seen[error] += 1
            if seen[error] > 2 and not FULL:
                continue
            said = f"{case}-{file}-{i}-{error.__name__}"
            yield pytest.param(case, file, error, named, text, text.replace(old, new), id=said)


def check(case, **how):
    """how: of `interpreted`."""
    if case != "double":
        return CASES[case].check(torch.device("cpu"), **how)
    x = torch.randn(1, 5 * 64, 1, 64).bfloat16()
    with interpreted(**how):
        assert torch.equal(double_gluon(x), 2 * x), "not 2 x"


@pytest.mark.parametrize(("case", "file", "error", "named", "before", "after"), [*_cases()])
def test_a_mistake_is_found(case, file, error, named, before, after):
    with pytest.raises(error, match=re.escape(named)):
        check(case, changes=((file_of(file), before, after),))


@pytest.mark.parametrize("case", ["gdn_scan", "gdn_scans, forth", "gdn_scans, back", "kda_scan"])
def test_a_ring_of_one_place_is_too_short(case):
    """The next chunk is waited for before a place is empty."""
    with pytest.raises(Deadlock, match=r"load_chunks\) waits for chunks"):
        check(case, constants={"STAGES": 1})


def test_a_mistake_has_a_place():
    with pytest.raises(ValueError, match="gdn_scan has 0 times: no such text"):
        check("gdn_scan", changes=((file_of("gdn_scan"), "no such text", LEFT_OUT),))
