"""Plant mistakes, one at a time, in a copy of the tree: each must turn the tests beside it red.

    python tools/mutants.py              all of them (what `make mutants` does)
    python tools/mutants.py head gate    those with one of these words in their name
    python tools/mutants.py --list       what there is; fails if a mistake has no place any more

The tests are run on a sound copy first: red without a mistake is no proof.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from notebooks import ROOT

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "_build", "__pycache__"
)
KERNELS, REFERENCE, OPS = (f"linattn_edu/{name}" for name in ("kernels", "reference", "ops"))


class Mutant(NamedTuple):
    """A mistake: in this file, which has it once, `before` becomes `after`; one of the tests of the
    quick suite named here must fail."""

    name: str
    file: str
    before: str
    after: str
    tests: str  # arguments of pytest
    said: str = ""  # what the report has in it: that it is red for the right reason


MUTANTS = [
    # masks and lengths
    Mutant(
        "a tile reads one row too many",
        f"{KERNELS}/tiles.py",
        "(o_row[:, None] < n_row) & (o_col[None, :] < n_col)\n    return tl.load",
        "(o_row[:, None] <= n_row) & (o_col[None, :] < n_col)\n    return tl.load",
        "tests/delta/test_state.py",
    ),
    Mutant(
        "a token does not read itself",
        f"{KERNELS}/tiles.py",
        "causal = o_t[:, None] >= o_t[None, :]",
        "causal = o_t[:, None] > o_t[None, :]",
        "tests/delta/test_output.py",
    ),
    Mutant(
        "a chunk of a packed sequence is one token too long",
        f"{KERNELS}/tiles.py",
        "n_t = (tl.load(cu_ptr + i_n + 1) - first).to(tl.int32)\n    else:\n        NT =",
        "n_t = (tl.load(cu_ptr + i_n + 1) - first + 1).to(tl.int32)\n    else:\n        NT =",
        "tests/ops/test_contract_packed.py::test_packed_sequences_equal_each_by_itself",
    ),
    Mutant(
        "sequences of a batch share their last chunk's state",
        f"{KERNELS}/tiles.py",
        "i_c = i_n * tl.cdiv(T, BT)",
        "i_c = i_n * (T // BT)",
        "tests/delta/test_state.py",
    ),
    Mutant(
        "a short last chunk is taken for a whole one",
        f"{KERNELS}/delta/kda_intra_bwd.py",
        "if b == last // 16:",
        "if b == NB - 1:",
        "tests/delta/test_kda_intra_bwd.py",
    ),
    # heads, offsets, scales
    Mutant(
        "value heads read the wrong query heads",
        f"{KERNELS}/delta/output.py",
        "i_k = (first * H + i_h // (HV // H)) * K",
        "i_k = (first * H + i_h % H) * K",
        "tests/delta/test_output.py",
    ),
    Mutant(
        "chunks of a later sequence begin one chunk late",
        "linattn_edu/packing.py",
        "- offsets[sequence]",
        "- offsets[sequence] + (sequence > 0)",
        "tests/ops/test_contract_packed.py::test_packed_sequences_equal_each_by_itself",
    ),
    Mutant(
        "the reference's scale misses what comes from the state",
        f"{REFERENCE}/delta/output.py",
        "scale * (inter + P @ V)",
        "inter + scale * (P @ V)",
        "tests/delta/test_output.py",
    ),
    # heads whose numbers cancel
    Mutant(
        "a head cancels by what is read alone",
        f"{KERNELS}/fused/cancel.py",
        "few = few & (tl.sum(b_rows[:, None]) <= INVERSE * INVERSE * own)",
        "few = few & (own >= 0)",
        "tests/fused/test_cancel.py -k either",
    ),
    Mutant(
        "a head cancels by what the state takes alone",
        f"{KERNELS}/fused/cancel.py",
        "rounded <= SCORES",
        "rounded * 0 <= SCORES",
        "tests/fused/test_cancel.py -k either",
    ),
    Mutant(
        "of value heads with a common key one alone cancels",
        f"{KERNELS}/fused/cancel.py",
        "i_h // G * G + i_g, -1",
        "i_h, -1",
        "tests/fused/test_cancel.py -k match",
    ),
    Mutant(
        "a head that cancels is found in the first sequence",
        f"{KERNELS}/fused/cancel.py",
        "return tl.load(chunks_ptr + 2 * i_c)",
        "return 0 * i_c",
        "tests/fused/test_cancel.py -k packed",
    ),
    Mutant(
        "chunks of no sequence are looked for among the heads",
        f"{KERNELS}/fused/cancel.py",
        "some = some & (i_n * HV < heads)",
        "some = some & (i_n >= 0)",
        "tests/fused/test_cancel.py -k room",
    ),
    Mutant(
        "programs take the chunks of all heads, listed or not",
        f"{KERNELS}/tiles.py",
        "pid = tl.where(some, item * G + pid % G, -1)",
        "pid = tl.where(some, pid, -1)",
        "tests/fused/test_cancel.py -k without",
    ),
    Mutant(
        "an empty head goes on into the next sequence",
        f"{KERNELS}/pieces.py",
        "return self.N if self.several else 0",
        "return self.N",
        "tests/fused/test_cancel.py -k without",
    ),
    Mutant(
        "heads that do not cancel are listed among those that do",
        f"{KERNELS}/fused/cancel.py",
        "mask=some & (found == 0))",
        "mask=some)",
        "tests/fused/test_cancel.py -k match",
    ),
    Mutant(
        "an erase gate in the place of beta writes behind the last token",
        f"{KERNELS}/fused/cancel.py",
        "b_beta = tl.where(o_t < n_t, 1.0, 0.0)",
        "b_beta = tl.where(o_t < n_t, 1.0, 1.0)",
        "tests/fused/test_cancel.py -k behind",
    ),
    Mutant(
        "with a gate a channel, a head that cancels is scanned in 16 bit last",
        f"{KERNELS}/fused/kda_halves.py",
        "*places, True, ways, pieces, packing)",
        "*places, True, found, pieces, packing)",
        "tests/fused/test_kda_cancel.py -k match",
    ),
    Mutant(
        "of heads that cancel the rows are read that 16 bit have rounded",
        f"{KERNELS}/fused/kda_halves.py",
        "    q, k = _fine((q, k), raw, (found, items), packed)\n",
        "",
        "tests/fused/test_kda_cancel.py -k divided",
    ),
    Mutant(
        "the first pieces of all sequences are scanned as the first is kept",
        f"{KERNELS}/pieces.py",
        "return x.repeat_interleave(self.N // self.batch, 0)",
        "return x.repeat(self.N // self.batch, 1)",
        "tests/fused/test_kda_cancel.py -k pieces",
    ),
    # pieces of a sequence
    Mutant(
        "the transition of a piece begins a column late",
        f"{KERNELS}/delta/cp_merge.py",
        "o_k[:, None] + V == o_v[None, :]",
        "o_k[:, None] + V + 1 == o_v[None, :]",
        "tests/delta/test_cp_merge.py -k map",
    ),
    Mutant(
        "a state counts as forgotten while fp32 still holds it",
        f"{KERNELS}/delta/warm_up.py",
        "FORGOTTEN = tl.constexpr(32.0)",
        "FORGOTTEN = tl.constexpr(20.0)",
        "tests/delta/test_warm_up.py -k kernels_match",
    ),
    Mutant(
        "a map counts as forgotten while fp32 still holds what it lets through",
        f"{KERNELS}/delta/cp_merge.py",
        "FORGOTTEN = tl.constexpr(2.0**-32)",
        "FORGOTTEN = tl.constexpr(2.0**-3)",
        "tests/cp/test_near_maps.py -k slow",
        "AssertionError",
    ),
    Mutant(
        "the chunks before the near ones are left out for all heads",
        f"{KERNELS}/delta/cp_merge.py",
        "launch(W, left, NEAR=0, NW=tiles)",
        "pass",
        "tests/cp/test_near_maps.py -k none",
        "AssertionError",
    ),
    Mutant(
        "near chunks are counted from a piece's end, not from its chunks' bounds",
        f"{KERNELS}/delta/cp_merge.py",
        "n_far = tl.maximum(tl.cdiv(n_seq, BT) - NEAR, 0) * BT",
        "n_far = tl.maximum(n_seq - NEAR * BT, 0)",
        "tests/fused/test_near_maps.py -k packed_pieces",
        "AssertionError",
    ),
    Mutant(
        "a map that is NaN in one number counts as forgotten",
        f"{KERNELS}/delta/cp_merge.py",
        'b_M = tl.where(b_M == b_M, b_M, float("inf"))',
        "b_M = tl.where(b_M == b_M, b_M, 0.0)",
        "tests/fused/test_near_maps.py -k nan",
        "AssertionError",
    ),
    Mutant(
        "a merge leaves out the last rows of the state",
        f"{KERNELS}/delta/cp_merge.py",
        "range(tl.cdiv(K, BJ))",
        "range(K // BJ)",
        "tests/delta/test_cp_merge.py -k merge",
    ),
    Mutant(
        "pieces that there are not take tokens of the last sequence",
        f"{KERNELS}/pieces.py",
        "torch.searchsorted(chains, i, right=True).sub_(1)",
        "torch.searchsorted(chains, i, right=True).sub_(1).clamp_(max=batch - 1)",
        "tests/kernels/test_pieces.py -k last",
    ),
    Mutant(
        "all pieces store their states where the first one of their sequence does",
        f"{KERNELS}/pieces.py",
        "chunk_offsets[sequence] + begun // chunk_size",
        "chunk_offsets[sequence]",
        "tests/kernels/test_pieces.py -k packed",
    ),
    Mutant(
        "the state after a sequence is that after its first piece",
        f"{KERNELS}/pieces.py",
        "states[self.chains[1:] - 1]",
        "states[self.chains[:-1]]",
        "tests/kernels/test_pieces.py -k packed",
    ),
    # moving averages
    Mutant(
        "an average folds its pieces in the wrong order",
        f"{KERNELS}/ssd/ema.py",
        "n - j if REVERSE else j + 1",
        "j + 1 if REVERSE else n - j",
        "tests/ssd/test_ema.py -k pieces",
    ),
    Mutant(
        "an average finds the parts of the piece after",
        f"{KERNELS}/ssd/ema.py",
        "i_l = i_l if REVERSE else i_l - 1",
        "i_l = i_l",
        "tests/ssd/test_ema.py -k pieces",
    ),
    Mutant(
        "an average's weights of later tokens change how an earlier row is rounded",
        f"{KERNELS}/ssd/ema.py",
        "tl.max(tl.abs(b_M), 1), 1e-30)[:, None]",
        "tl.max(tl.max(tl.abs(b_M), 1), 0), 1e-30)",
        "tests/ops/test_contract.py -k ema",
    ),
    Mutant(
        "the decay of an average hears what its token has written",
        f"{KERNELS}/ssd/ema_bwd.py",
        "o_t[:, None] > o_t[None, :]",
        "o_t[:, None] >= o_t[None, :]",
        "tests/ssd/test_ema_bwd.py",
    ),
    Mutant(
        "an average adds the parts of a gradient but for the first",
        f"{KERNELS}/ssd/ema_bwd.py",
        "for i in range(ND):",
        "for i in range(1, ND):",
        "tests/ssd/test_ema_bwd.py",
    ),
    # short convolutions
    Mutant(
        "a short convolution takes its weights in reverse",
        f"{REFERENCE}/delta/causal_conv1d.py",
        "p += own(w[j] * u[:, 1 + j : 1 + j + T]",
        "p += own(w[W - 1 - j] * u[:, 1 + j : 1 + j + T]",
        "tests/delta/test_causal_conv1d.py -k pytorchs",
    ),
    Mutant(
        "a short convolution repeats a sequence's first token before it",
        f"{KERNELS}/delta/causal_conv1d.py",
        "rows_of(o_t, t0, n), o_d, ROW, n - t0, D).to",
        "tl.maximum(o_t, -t0), o_d, ROW, n - t0, D).to",
        "tests/delta/test_causal_conv1d.py -k packed",
    ),
    Mutant(
        "a gate that is a slice of a projection is read as if its rows followed each other",
        f"{KERNELS}/delta/rms_norm_gated.py",
        "ROW = G * D if z is None else row_stride(z, G * D)",
        "ROW = G * D",
        "tests/ops/test_rows_apart.py -k norm",
        "AssertionError",
    ),
    Mutant(
        "rows at several distances are taken for rows at one",
        f"{OPS}/tensors.py",
        "        if x.stride(d) != size:\n            return contiguous(x)\n        size",
        "        if d >= x.ndim - axes and x.stride(d) != size:\n"
        "            return contiguous(x)\n        size",
        "tests/ops/test_rows_apart.py -k copied",
    ),
    Mutant(
        "a state that is longer than its sequence loses the gradient of what stays in it",
        f"{KERNELS}/delta/causal_conv1d.py",
        "dht_ptr is not None and n - t0 < BT + W",
        "dht_ptr is not None and t0 >= 0",
        "tests/delta/test_causal_conv1d.py",
    ),
    Mutant(
        "a state's oldest token is in a sum",
        f"{KERNELS}/delta/causal_conv1d.py",
        "there = (t0 + o_t >= 0) & (t0 + o_t < n)",
        "there = t0 + o_t < n",
        "tests/delta/test_causal_conv1d.py -k oldest",
    ),
    Mutant(
        "rows of the next walk are in the sums of this one's weights too",
        f"{KERNELS}/delta/causal_conv1d.py",
        "if i < ROWS:",
        "if i < LAST:",
        "tests/delta/test_causal_conv1d.py -k match",
    ),
    Mutant(
        "the derivative of SiLU is that of the other sign",
        f"{KERNELS}/tiles.py",
        "return tl.where(x < 0, e * large, large) * ",
        "return tl.where(x > 0, e * large, large) * ",
        "tests/delta/test_causal_conv1d.py -k match",
    ),
    Mutant(
        "a sequence goes on where its number comes again",
        f"{KERNELS}/delta/causal_conv1d.py",
        "b_same &= tl.load",
        "b_same = tl.load",
        "tests/delta/test_causal_conv1d.py -k sequences",
    ),
    Mutant(
        "a ring keeps the first of more tokens than it has columns",
        f"{KERNELS}/delta/causal_conv1d_update.py",
        "o_x + (T - 1 - o_x) // S * S, -1)",
        "o_x, -1)",
        "tests/delta/test_causal_conv1d_update.py",
    ),
    Mutant(
        "the gradient of a norm has a sum for a mean",
        f"{REFERENCE}/delta/rms_norm_gated.py",
        "(n * dn).mean(-1, keepdim=True)",
        "(n * dn).sum(-1, keepdim=True)",
        "tests/delta/test_rms_norm_gated.py -k formula",
    ),
    Mutant(
        "the last tile of a part of dweight is left out",
        f"{KERNELS}/delta/rms_norm_gated.py",
        "for i in range(TILES):",
        "for i in range(tl.maximum(TILES - 1, 1)):",
        "tests/delta/test_rms_norm_gated.py -k parts",
    ),
    # halos
    Mutant(
        "the gradient of a halo moves on with the tokens",
        "linattn_edu/cp/halo.py",
        "return _chain(dS_ext, dM, -1)",
        "return _chain(dS_ext.flip(1), dM.flip(1), 1)",
        "tests/cp/test_operators.py -k conv",
    ),
    Mutant(
        "a halo forgets what a short piece lets through",
        "linattn_edu/cp/halo.py",
        "S_ext = S_ext + shifted(state, end - begin)",
        "S_ext = S_ext + 0 * state",
        "tests/cp/test_operators.py -k conv",
    ),
    # gradients
    Mutant(
        "dgc lacks the sum over the columns",
        f"{REFERENCE}/delta/output_bwd.py",
        "+ flow.sum(-1) - flow.sum(-2)",
        "+ flow.sum(-1)",
        "tests/delta/test_output_bwd.py",
    ),
    Mutant(
        "dgc lacks what is read through the state",
        f"{KERNELS}/delta/wy_bwd.py",
        "b_dgc -= b_t + b_beta * b_read",
        "b_dgc -= b_t",
        "tests/delta/test_wy_bwd.py",
    ),
    Mutant(
        "the gradient of the state takes do without the scale",
        f"{KERNELS}/delta/state_bwd.py",
        "b_do.to(tl.float32) * scale",
        "b_do.to(tl.float32)",
        "tests/delta/test_state_bwd.py",
    ),
    Mutant(
        "the gradient of what a chunk writes takes P without its transpose",
        f"{KERNELS}/delta/state_bwd.py",
        "scale * dot(tl.trans(b_P), b_do)",
        "scale * dot(b_P, b_do)",
        "tests/delta/test_kda_scans.py",
    ),
    Mutant(
        "the low halves of a row are its high ones",
        f"{KERNELS}/tiles.py",
        "return b_x, load_tile(x_ptr + n,",
        "return b_x, load_tile(x_ptr,",
        "tests/fused/test_kda_halves.py",
    ),
    Mutant(
        "what a chunk's keys are read for has the high halves of Z alone",
        f"{KERNELS}/fused/kda_bwd.py",
        "-dot_halves(b_Z, b_Z_low, tl.trans(b_h), None)",
        "-dot_halves(b_Z, None, tl.trans(b_h), None)",
        "tests/fused/test_kda_halves.py",
    ),
    Mutant(
        "a state's gradient is read by the high halves of the keys alone",
        f"{KERNELS}/fused/kda_scans.py",
        "dot_left(b_dS, tl.trans(b_kg), tl.trans(b_low), b_dv, FINE)",
        "dot_left(b_dS, tl.trans(b_kg), None, b_dv, FINE)",
        "tests/fused/test_kda_halves.py",
    ),
    Mutant(
        "a gradient of shared heads is rounded after each of them",
        f"{KERNELS}/rows.py",
        "return q.dtype if q.shape[2] == HV else torch.float32",
        "return q.dtype",
        "tests/delta/test_output_bwd.py tests/delta/test_kda_intra_bwd.py",
    ),
    Mutant(
        "l2norm's gradient has its projection without the length",
        f"{REFERENCE}/delta/l2norm.py",
        "y = rstd * x.to(dtype)",
        "y = x.to(dtype)",
        "tests/delta/test_l2norm.py",
    ),
    # numbers
    Mutant(
        "float64 is computed in float32",
        f"{REFERENCE}/tiles.py",
        "return torch.float64 if wide else torch.float32",
        "return torch.float32",
        "tests/delta/test_solve.py tests/ops/test_contract.py -k float64",
    ),
    Mutant(
        "what fades by 2^800 counts as near",
        f"{KERNELS}/delta/kda_intra.py",
        "NEAR = tl.constexpr(80.0)",
        "NEAR = tl.constexpr(800.0)",
        "tests/delta/test_kda_intra.py",
    ),
    Mutant(
        "far rows of the general delta rule keep their near scores",
        f"{KERNELS}/dplr/intra.py",
        "near = b_far[:, None] >= -NEAR",
        "near = b_far[:, None] >= -2 * NEAR",
        "tests/dplr/test_intra.py -k far_row",
    ),
    Mutant(
        "gradients through far rows of the general delta rule count as near",
        f"{KERNELS}/dplr/intra_bwd.py",
        ">= -NEAR, 1.0, 0.0)",
        ">= -4 * NEAR, 1.0, 0.0)",
        "tests/dplr/test_intra_bwd.py -k steep",
    ),
    # decoding
    Mutant(
        "the state after the last accepted token is that of the next",
        f"{KERNELS}/delta/recurrent.py",
        "tl.load(accepted_ptr + i_nh // HV) - 1",
        "tl.load(accepted_ptr + i_nh // HV)",
        "tests/ops/test_decode_pool.py",
    ),
    Mutant(
        "slot 0 of the pool is never written",
        f"{KERNELS}/delta/recurrent.py",
        "if slot >= 0:\n            store_state",
        "if slot > 0:\n            store_state",
        "tests/ops/test_decode_pool.py",
    ),
    Mutant(
        "what is expanded over a state is copied",
        f"{OPS}/ssd/step.py",
        "if x.stride(d) == 0:",
        "if x.stride(d) < 0:",
        "tests/ops/ssd/test_step.py::test_what_is_expanded_is_not_copied",
    ),
    Mutant(
        "every head reads the first group",
        f"{KERNELS}/ssd/selective_state_update.py",
        "i_group = i_h // (H // G) * N\n    b_B",
        "i_group = i_h // H * N\n    b_B",
        "tests/ssd/test_selective_state_update.py::test_groups",
    ),
    Mutant(
        "a draft of Mamba-2 starts from the first slot that was rejected",
        f"{KERNELS}/ssd/selective_state_update.py",
        "before = 0 if accepted_ptr is None else tl.load(accepted_ptr + i_n) - 1",
        "before = 0 if accepted_ptr is None else tl.load(accepted_ptr + i_n)",
        "tests/ops/ssd/test_step_drafts.py::test_drafts_of_which_some_are_rejected",
    ),
    Mutant(
        "a guess that was wrong stays in the ring",
        f"{KERNELS}/delta/replay.py",
        "last = tl.minimum(last, tl.maximum(tl.load(accepted_ptr + i_n), 0)).to(tl.int32)",
        "last = tl.maximum(last, tl.load(accepted_ptr + i_n)).to(tl.int32)",
        "tests/ops/test_replay.py -k recurrence",
    ),
    Mutant(
        "new entries of a ring lie over those that are being folded",
        f"{KERNELS}/delta/replay.py",
        "begin, count = (begin + count) % R, 0",
        "begin, count = begin * 1, 0",
        "tests/delta/test_replay.py -k matches",
    ),
    Mutant(
        "an entry of a ring fades by its own decay",
        f"{KERNELS}/delta/replay.py",
        "later = o_r[:, None] < o_r[None, :]",
        "later = o_r[:, None] <= o_r[None, :]",
        "tests/delta/test_replay.py -k matches",
    ),
    Mutant(
        "an entry of Mamba-2's ring fades by its own decay",
        f"{KERNELS}/ssd/replay.py",
        "tl.where(o_r[:, None] < o_r[None, :], b_row",
        "tl.where(o_r[:, None] <= o_r[None, :], b_row",
        "tests/ssd/test_replay.py -k matches",
    ),
    Mutant(
        "a state's history ends at the piece that made it",
        "linattn_edu/layers/cache.py",
        "self._replace(i, value.to(state.dtype).contiguous())",
        "self._replace(i, value.detach().to(state.dtype).contiguous())",
        "tests/layers/test_layers.py::test_gradients_through_the_pieces_of_a_document",
    ),
    Mutant(
        "an argument may lie in the memory of a state that is written",
        f"{OPS}/inplace.py",
        "return other[0] < one[1] and one[0] < other[1]",
        "return other[0] < one[0] and one[0] < other[1]",
        "tests/ops/test_contract_in_place.py -k memory",
    ),
    # fused stages
    Mutant(
        "the fused states are written without beta",
        f"{KERNELS}/fused/gdn_scans.py",
        "b_low, b_beta[:, None] * b_W, None",
        "b_low, b_W, None",
        "tests/fused/test_gdn_scans.py -k scan_states",
    ),
    Mutant(
        "a token has no score with itself",
        f"{KERNELS}/fused/ssd_fwd.py",
        "o_t[:, None] >= o_t[None, :], b_S, 0.0",
        "o_t[:, None] > o_t[None, :], b_S, 0.0",
        "tests/fused/test_ssd_fwd.py -k scores",
    ),
    Mutant(
        "a token's output sends nothing back to its own key",
        f"{KERNELS}/fused/kda_bwd.py",
        "o_t[:, None] >= o_t[None, :], b_dP, 0.0",
        "o_t[:, None] > o_t[None, :], b_dP, 0.0",
        "tests/fused/test_kda_bwd.py -k every_gate",
    ),
    # kernels in Gluon, which are interpreted
    Mutant(
        "a sign is turned round in the scan in Gluon",
        f"{KERNELS}/gluon/gdn_scan.py",
        "b_v.to(gl.float32) - b_e * b_W",
        "b_v.to(gl.float32) + b_e * b_W",
        "tests/kernels/test_gluon_interpreter.py -k gdn_scan",
        "AssertionError",
    ),
    Mutant(
        "a warp gives a place of a ring back that another one still reads",
        f"{KERNELS}/gluon/kda_scan.py",
        "barrier()  # no warp reads the chunk any more",
        "pass  # no warp reads the chunk any more",
        "tests/kernels/test_gluon_interpreter.py -k kda_scan",
        "Race",
    ),
    Mutant(
        "the parity of a wait in Gluon is that of the phase before",
        f"{KERNELS}/gluon/gdn_intra_bwd.py",
        "mbarrier.wait(bars.empty_k, ((n - AHEAD) // G & 1) ^ 1)",
        "mbarrier.wait(bars.empty_k, (n - AHEAD) // G & 1)",
        "tests/kernels/test_gluon_interpreter.py -k gdn_intra_bwd",
        "Deadlock",
    ),
    Mutant(
        "in Gluon the low halves of dM and dL change places",
        f"{KERNELS}/gluon/gdn_intra_bwd.py",
        "m.inner.index(2 + c + z)",
        "m.inner.index(3 - c + z)",
        "tests/kernels/test_gluon_interpreter.py -k low_halves",
        "AssertionError",
    ),
    Mutant(
        "in Gluon dbeta has what the states were rounded by",
        f"{KERNELS}/gluon/gdn_intra_bwd.py",
        "gl.where(b_ones > 0.5, b_written",
        "gl.where(b_ones > 5.0, b_written",
        "tests/kernels/test_gluon_interpreter.py -k low_halves",
        "AssertionError",
    ),
    Mutant(
        "in Gluon a gated key has one half where it is multiplied by dL",
        f"{KERNELS}/gluon/kda_intra_bwd.py",
        "b_r = products(a, a_low, dL, dL_low, b_r, True, FINE, FINE)",
        "b_r = products(a, a_low, dL, dL_low, b_r, True, False, FINE)",
        "tests/kernels/test_gluon_interpreter.py -k low_halves",
        "AssertionError",
    ),
    Mutant(
        "a barrier expects fewer bytes than its copies bring",
        f"{KERNELS}/gluon/kda_intra_tiles.py",
        "mbarrier.expect(bars.full_k, BT * K * (8 if m.bs is None else 10))",
        "mbarrier.expect(bars.full_k, BT * K * 4)",
        "tests/kernels/test_gluon_interpreter.py -k kda_intra_bwd",
        "ByteCount",
    ),
    Mutant(
        "the interpreter of Gluon lets copies overtake who reads",
        "linattn_edu/gluon_interpreter/machine.py",
        "return self.knows.get(access.actor, 0) >= access.time",
        "return True",
        "tests/kernels/test_gluon_interpreter_mutants.py -k double",
        "test_a_mistake_is_found",
    ),
    # gradients of Mamba-2
    Mutant(
        "the diagonal is in both sums of the decay's gradient",
        f"{KERNELS}/ssd/chunk_scan_bwd_da_cs.py",
        "tl.where(o_t[:, None] > o_t[None, :], b_M",
        "tl.where(o_t[:, None] >= o_t[None, :], b_M",
        "tests/ssd/test_chunk_scan_bwd_da_cs.py::test_a_strong_decay_keeps_its_digits",
    ),
    Mutant(
        "a step at its limit moves",
        f"{KERNELS}/ssd/chunk_cumsum_bwd.py",
        "tl.where(b_free != b_step, 0.0, b_dstep + b_A * b_da)",
        "b_dstep + b_A * b_da",
        "tests/ssd/test_chunk_cumsum_bwd.py",
    ),
    Mutant(
        "D has no gradient through x",
        f"{KERNELS}/ssd/chunk_scan_chunk_state_bwd_dx.py",
        "b_dx += b_dy * past_state(",
        "b_dx += 0.0 * past_state(",
        "tests/ssd/test_chunk_scan_chunk_state_bwd_dx.py",
    ),
    Mutant(
        "the decay of a head hears the heads before it",
        f"{KERNELS}/ssd/chunk_state_bwd_db.py",
        "b_m = tl.sum(b_B.to(tl.float32) * b_dB, 1)",
        "b_m = tl.sum(b_B.to(tl.float32) * b_sum, 1)",
        "tests/ssd/test_chunk_state_bwd_db.py::test_heads_of_a_group",
    ),
    Mutant(
        "of the tiles of N only the first is in the decay",
        f"{KERNELS}/ssd/chunk_state_bwd_db.py",
        "else x.sum(0)",
        "else x[0]",
        "tests/ssd/test_chunk_scan_bwd_dc.py::test_heads_of_a_group",
    ),
    Mutant(
        "B hears the tokens before it",
        f"{KERNELS}/ssd/chunk_scan_bwd_dc.py",
        "cast(b_dMT, b_C.dtype)",
        "cast(b_dM, b_C.dtype)",
        "tests/ssd/test_chunk_scan_bwd_dc.py::test_heads_of_a_group",
    ),
    # the public functions
    Mutant(
        "cu_seqlens may end behind the last token",
        f"{OPS}/check.py",
        "    if bounds[-1] > T:",
        "    if bounds[-1] > T + 64:",
        "tests/ops/test_helpers.py",
    ),
    Mutant(
        "nobody looks at the dtype of v",
        f"{OPS}/delta/arguments.py",
        'given.take("v", v, ("B", "T", "HV", "V"), alike=alike)',
        'given.take("v", v, ("B", "T", "HV", "V"))',
        "tests/ops/test_contract_refused.py -k bits",
    ),
    Mutant(
        "the scale that is left out is 1 / K",
        f"{OPS}/delta/arguments.py",
        'sizes["K"] ** -0.5 if scale is None',
        'sizes["K"] ** -1.0 if scale is None',
        "tests/ops/gdn/test_chunk.py::test_kernels_match_the_recurrence",
    ),
    Mutant(
        "a sequence's part of a chunk is not counted",
        f"{OPS}/sequences.py",
        "first := first - (begin - end) // length",
        "first := first + (end - begin) // length",
        "tests/ops/kda/test_chunk.py -k states_of_the_chunks",
    ),
    Mutant(
        "a traced graph takes the inverse for one of the dtype of the gate",
        f"{OPS}/gdn/chunk.py",
        '"A": like("B T HV C", "q")',
        '"A": like("B T HV C", "g")',
        "tests/ops/test_operators.py::test_chunk",
    ),
    # what compares and counts
    Mutant(
        "a NaN is no error",
        "linattn_edu/testing.py",
        "    if not x.isfinite().all():\n        return math.inf\n",
        "    x, ref = x[x.isfinite()], ref[x.isfinite()]\n",
        "tests/test_testing.py",
    ),
    Mutant(
        "a row needs more shared memory than there is",
        f"{KERNELS}/delta/output.py",
        "4: both(row(4, 3, BK=32, BV=64)),\n    },\n}",
        "4: {64: row(4, 3, BK=32, BV=64), 128: row(4, 4, BK=256, BV=128)},\n    },\n}",
        "tests/kernels/test_compile.py::test_rows",
        "bytes of shared memory, there are",
    ),
    Mutant(
        "a kernel in Gluon is another than the one whose results are kept",
        f"{KERNELS}/gluon/gdn_scan.py",
        "- b_e * b_W",
        "+ b_e * b_W",
        "tests/kernels/test_gluon.py -k hopper",
        "compiles and keeps what changed",
    ),
    # the book
    Mutant(
        "a reader's puzzle is written anew at each call",
        "linattn_edu/puzzles.py",
        "if path.is_file() and not again:",
        "if path.is_file() and again:",
        "tests/test_puzzles.py -k kept",
    ),
    Mutant(
        "a kernel takes two steps in another order",
        f"{KERNELS}/delta/output.py",
        "# eq:delta-intra   P = Q K^T * G",
        "# eq:delta-output   P = Q K^T * G",
        "tests/book/test_stages.py",
    ),
    Mutant(
        "an equation's label is not the notebook's",
        "chapters/06_output.md",
        "(eq:delta-intra)",
        "(eq:delta-intra-chunk)",
        "tests/book/test_chapters.py",
    ),
    Mutant(
        "a chapter's kernel is wrong by one percent",
        f"{KERNELS}/delta/gate_cumsum.py",
        "return tl.cumsum(b_g, axis=0)",
        "return tl.cumsum(b_g, axis=0) * 1.01",
        "--nbval-lax chapters/02_gate_cumsum.ipynb",
        "AssertionError",
    ),
    Mutant(
        "a chapter's halo stays where it was",
        "linattn_edu/cp/halo.py",
        "shifted(S, step * M[:, p, 0].long())",
        "shifted(S, 0 * M[:, p, 0].long())",
        "--nbval-lax chapters/23_cp_conv.ipynb",
        "AssertionError",
    ),
    Mutant(
        "a chapter's merge takes the last piece first",
        f"{KERNELS}/delta/cp_merge.py",
        "n - 1 - i if REVERSE else i)) * H + i_h\n        store_tile",
        "i if REVERSE else n - 1 - i)) * H + i_h\n        store_tile",
        "--nbval-lax chapters/21_cp_merge.ipynb",
        "AssertionError",
    ),
    Mutant(
        "the gradient comes back from piece to piece in the order of the forward pass",
        f"{KERNELS}/delta/cp_merge_bwd.py",
        "dht, offsets, reverse=True)",
        "dht, offsets, reverse=False)",
        "--nbval-lax chapters/22_cp_merge_bwd.ipynb",
        "AssertionError",
    ),
    # numbers that cancel
    Mutant(
        "the resolvent's low half is left out",
        f"{KERNELS}/fused/gdn_fwd.py",
        "dot_left(b_W, tl.trans(b_R), b_RT_low",
        "dot_left(b_W, tl.trans(b_R), None",
        "tests/ops/test_alike.py -k gdn_is",
        "AssertionError",
    ),
    Mutant(
        "the adjoint of the low half is left out",
        f"{KERNELS}/fused/gdn_scans.py",
        "dot_left(b_dv, b_AG, b_AG_low",
        "dot_left(b_dv, b_AG, None",
        "tests/ops/test_alike.py -k gdn_is",
        "AssertionError",
    ),
    Mutant(
        "what a chunk writes is rounded before its low half is kept",
        f"{KERNELS}/tiles.py",
        "b_x, b_low = in_halves(b_x, x_ptr.dtype.element_ty)",
        "b_x = cast(b_x, x_ptr.dtype.element_ty).to(tl.float32)\n"
        "        b_x, b_low = in_halves(b_x, x_ptr.dtype.element_ty)",
        "tests/ops/test_alike.py tests/fused/test_gdn_intra.py -k halves",
        "AssertionError",
    ),
    Mutant(
        "a beta beyond 1 of Kimi Delta Attention stays in 16 bit",
        f"{OPS}/kda/chunk.py",
        'if (beyond and not halves) or impl == "reference":',
        "if False:",
        "tests/ops/test_alike.py -k kda_is",
        "AssertionError",
    ),
    Mutant(
        "a number of float32 is multiplied without its second half",
        f"{KERNELS}/tiles.py",
        "            b, b_low = in_halves(b, tl.bfloat16)",
        "            b = cast(b, tl.bfloat16)",
        "tests/delta/test_kda_halves.py",
        "AssertionError",
    ),
    Mutant(
        "dL of near channels loses its second half on the way to dk",
        f"{KERNELS}/delta/kda_intra_bwd.py",
        "dot_halves(tl.trans(b_dL), b_below, ",
        "dot_halves(tl.trans(b_dL), None, ",
        "tests/delta/test_kda_halves.py",
        "AssertionError",
    ),
    Mutant(
        "a key of unit length is rounded before it is multiplied in halves",
        f"{OPS}/kda/chunk.py",
        "raw = (q.detach(), k.detach()) if normalise and halves == 1 else (None, None)",
        "raw = (None, None)",
        "tests/ops/test_alike.py -k use_qk",
        "AssertionError",
    ),
    Mutant(
        "the fused states of a chapter are written without beta",
        f"{KERNELS}/fused/gdn_scans.py",
        "b_low, b_beta[:, None] * b_W, None",
        "b_low, b_W, None",
        "--nbval-lax chapters/24_fusion.ipynb",
        "AssertionError",
    ),
    Mutant(
        "a chapter's pieces begin without the state before the first token",
        f"{KERNELS}/pieces.py",
        "merge(S_ext, M, state, **offsets)",
        "merge(S_ext, M, None, **offsets)",
        "--nbval-lax chapters/25_few_heads.ipynb",
        "AssertionError",
    ),
    Mutant(
        "the states of a chapter's guesses all go to the first slot",
        f"{KERNELS}/delta/recurrent.py",
        "tl.minimum(t, SLOTS - 1), pool_slots",
        "tl.minimum(0 * t, SLOTS - 1), pool_slots",
        "--nbval-lax chapters/26_decoding.ipynb",
        "AssertionError",
    ),
    Mutant(
        "a state is rounded at every token beside inputs of 16 bit",
        f"{KERNELS}/delta/recurrent.py",
        "b_S += b_k[:, None] * b_e[None, :]",
        "b_S += b_k[:, None] * b_e[None, :]\n"
        "        b_S = b_S.to(tl.float32 if q_ptr.dtype.element_ty == tl.float32 else tl.float16)\n"
        "        b_S = b_S.to(tl.float32)",
        "tests/ops/test_accuracy.py -k recurrent",
        "AssertionError",
    ),
    Mutant(
        "a gradient is decayed before the keys read it",
        f"{KERNELS}/delta/cp_merge_bwd.py",
        "dot(b_k, cast(b_dS, b_k.dtype))",
        "dot(b_k, cast(b_dS * b_a, b_k.dtype))",
        "tests/delta/test_cp_merge_bwd.py -k map_bwd",
    ),
    # calls that are written down
    Mutant(
        "calls with other options share a program",
        f"{OPS}/operator/composing.py",
        "self._programs[which], (stages, options, numbers)",
        "self._programs[which], (stages, numbers)",
        "tests/kernels/test_plan.py -k kinds",
    ),
    Mutant(
        "an unaligned state gets the program of an aligned one",
        f"{KERNELS}/host/plan.py",
        "x.dtype, x.data_ptr() % 16)",
        "x.dtype)",
        "tests/kernels/test_plan.py -k anywhere",
    ),
    Mutant(
        "a program forgets where in a tensor a view begins",
        f"{KERNELS}/host/tape.py",
        "x.storage_offset() + moved",
        "x.storage_offset()",
        "tests/kernels/test_plan.py -k any_kind",
    ),
    Mutant(
        "a program keeps what it does not know",
        f"{KERNELS}/host/tape.py",
        "if not isinstance(x, PLAIN):",
        "if False:",
        "tests/kernels/test_plan.py -k told",
    ),
    Mutant(
        "the oldest program is forgotten",
        f"{KERNELS}/host/bounded.py",
        "self._keys[i], self._keys[-1] = self._keys[-1], self._keys[i]",
        "self._keys.append(self._keys.pop(0))",
        "tests/kernels/test_plan.py -k bounded",
    ),
    Mutant(
        "plan.off() is not known where gradients are computed",
        f"{KERNELS}/host/plan.py",
        "torch._C._stash_obj_in_tls(_OFF, True)",
        "pass",
        "tests/kernels/test_plan.py -k off",
    ),
    # kernels that are compiled before their launch
    Mutant(
        "going through a composition changes its tensors",
        f"{KERNELS}/host/precompile.py",
        "        return args[0]\n",
        "        return func(*args, **kwargs)\n",
        "tests/kernels/test_precompile.py -k forms",
    ),
    Mutant(
        "kernels are compiled one after the other",
        f"{KERNELS}/host/precompile.py",
        "return super().submit(_compiled, compile)",
        "future = super().submit(_compiled, compile); future.exception(); return future",
        "tests/kernels/test_precompile.py -k hopper",
    ),
    # what was measured, and of which sources
    Mutant(
        "a time without a record of its sources passes for one of today",
        "linattn_edu/sources.py",
        'return "unrecorded"',
        "return None",
        "tests/benchmarks/test_sources.py -k why_a_row",
    ),
    Mutant(
        "a table of tiles is no part of what ran",
        "linattn_edu/sources.py",
        "return {n.id for x in targets for n in ast.walk(x) if isinstance(n, ast.Name)}",
        "return set()",
        "tests/benchmarks/test_sources.py -k changes_a_hash",
    ),
    # what goes out of the house, and who is served
    Mutant(
        "a convolution's state in ONNX is one token behind",
        "linattn_edu/onnx.py",
        "oldest = _columns(op.Concat(initial_state, tokens, axis=2), -W, 1 - W or 2**31)",
        "oldest = _columns(op.Concat(initial_state, tokens, axis=2), -W - 1, -W)",
        "tests/test_onnx.py -k functions_inside",
    ),
    Mutant(
        "a server keeps guesses that were wrong",
        "examples/server.py",
        "(r.slot, len(r.tokens) - 1, r.accepted)",
        "(r.slot, len(r.tokens) - 1, 5)",
        "tests/examples/test_server.py -k 64_clients",
    ),
    Mutant(
        "a prefix has the state of another place",
        "examples/server.py",
        "states[0, n - 1]",
        "states[0, 0]",
        "tests/examples/test_server.py -k 64_clients",
    ),
]


def places(mutant: Mutant, root: Path = ROOT) -> int:
    """How often the mutant's text is in its file."""
    path = root / mutant.file
    return path.read_text().count(mutant.before) if path.exists() else 0


def copy(target: Path, root: Path = ROOT) -> None:
    """What the tests read, in `target`."""
    shutil.copytree(root, target, ignore=LEFT_OUT, dirs_exist_ok=True)


def pytest(folder: Path, tests: str) -> subprocess.CompletedProcess:
    """Run tests of a copy until the first failure."""
    ours = ("PYTEST_", "COV_", "LINATTN_EDU_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests.split()],
        cwd=folder,
        env=env | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def plant(mutant: Mutant, folder: Path) -> subprocess.CompletedProcess:
    """The mutant's tests on a copy with the mistake in it, which is taken out again."""
    path = folder / mutant.file
    sound = path.read_text()
    path.write_text(sound.replace(mutant.before, mutant.after))
    try:
        return pytest(folder, mutant.tests)
    finally:
        path.write_text(sound)


def verdict(done: subprocess.CompletedProcess, mutant: Mutant | None) -> str:
    """Empty if the tests are red with the mistake, green without one (None), else what happened. A
    crash of the interpreter, which reads wherever a mask lets it, is red too."""
    report = done.stdout + done.stderr
    if mutant is not None and (done.returncode == 1 or done.returncode < 0):
        return "" if mutant.said in report else f"RED, BUT NOT BY {mutant.said!r}"
    if done.returncode == 0:
        return "SURVIVED" if mutant is not None else ""
    last = "".join(f"\n    {line}" for line in report.strip().splitlines()[-5:])
    return ("RED WITHOUT A MISTAKE" if mutant is None else "NO TESTS") + last


def run(mutants: list[Mutant], workers: int, root: Path = ROOT) -> int:
    """Sound copies first, then every mutant; the number of those that something is wrong with."""
    local, wrong = threading.local(), []

    def task(job):
        name, tests, mutant = job
        if not hasattr(local, "folder"):
            local.folder = Path(tempfile.mkdtemp(dir=top))
            copy(local.folder, root)
        start = time.perf_counter()
        done = plant(mutant, local.folder) if mutant else pytest(local.folder, tests)
        said = verdict(done, mutant)
        wrong.extend([name] * bool(said))
        seconds = time.perf_counter() - start
        print(f"{said or ('seen' if mutant else 'green'):10s} {seconds:4.0f} s  {name}", flush=True)

    sound = dict.fromkeys(m.tests for m in mutants)
    jobs = [(f"without a mistake: {tests}", tests, None) for tests in sound]
    jobs += [(m.name, m.tests, m) for m in mutants]
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(workers) as pool:
        list(pool.map(task, jobs))
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description="mistakes that the tests must see")
    parser.add_argument("words", nargs="*", help="of the names of mutants; all if none")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.words or any(w in m.name for w in args.words)]
    lost = [m for m in chosen if places(m, args.root) != 1]
    for mutant in chosen if args.list else ():
        print(f"{mutant.name}\n    {mutant.file}: {mutant.tests}")
    for mutant in lost:
        print(f"NO PLACE for: {mutant.name} ({mutant.file})")
    found = [m for m in chosen if m not in lost]
    failed = 0 if args.list else run(found, args.workers, args.root)
    print(f"{len(chosen)} mistakes, {len(lost)} without a place, {failed} failures")
    return 1 if lost or failed else 0


if __name__ == "__main__":
    sys.exit(main())
