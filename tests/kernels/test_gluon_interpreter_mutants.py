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
        (Race, "fence", "fence_async_shared()\n    barrier()\n    mb", "barrier()\n    mb"),
        (Race, "halves[0] is", "fence_async_shared()\n    barrier()\n    mb", "fence_async_shared()\n    mb"),
        (Race, "halves[0] is", "mbarrier.wait(made.bars.index(0), i_t & 1)", LEFT_OUT),
        (Race, "others[0][0] is", "mbarrier.wait(made.bars.index(2), i_t & 1)", LEFT_OUT),
        (Race, "halves[0] is", "tma.store_wait(len(made.others))", LEFT_OUT),
        (Race, "others[0][0] is", "tma.store_wait(len(made.halves))", LEFT_OUT),
        (Race, "others[0][0] is", "barrier()\n        mbarrier.arrive(made.bars.index(3)", "mbarrier.arrive(made.bars.index(3)"),
        (Deadlock, "bars[3]", "mbarrier.arrive(made.bars.index(3), count=1)", LEFT_OUT),
        (Deadlock, "bars[1]", "mbarrier.arrive(made.bars.index(1), count=1)", LEFT_OUT),
        (Unfinished, "store_chunks", "    tma.store_wait(0)", "    pass"),
        (Wrong, "output 0", "i + K // 2, made.c_S", "i, made.c_S"),
    ],
    ("gdn_scans, forth", "gdn_scans"): [
        (Wrong, "output", "gates.index(3 * i).load(along)[None, :] * b_W", "b_W"),
        (OUTSIDE, "place 3", "ring(v_desc, STAGES), ring(AG_desc, STAGES)\n    # apart", "ring(v_desc, STAGES), ring(AG_desc, STAGES - 1)\n    # apart"),
    ],
    ("gdn_scans, back", "gdn_scans"): [
        (Wrong, "output", "operand(-b_e * b_dv", "operand(b_e * b_dv"),
        (Wrong, "output", "b_dv = product(operand(b_do, dtype, mma), Ps.index(i), b_dv)", "b_dv = product(operand(b_do, dtype, mma), Ps.index(i).permute((1, 0)), b_dv)"),
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
