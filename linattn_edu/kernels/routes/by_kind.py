"""What is chosen by a sequence's own kind: its shape and dtype, the GPU, the version of Triton.

These choices may change the last bits of a result. None is shown a batch.
"""

import math

import torch

from linattn_edu.choices import Choice
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.routes import limits
from linattn_edu.kernels.routes.choosing import Kind, decision, first
from linattn_edu.kernels.rows import of_generation
from linattn_edu.kernels.tiles import block, cdiv

LATER = ("hopper", "blackwell")
TAKEN = "{generation}, {dtype}, K={K}, V={V}"


def either(why: str | None, other: str, takes: str, words: str = TAKEN) -> Choice:
    """What a decision takes; if there is a `why` not, the other."""
    return Choice(other, why) if why else Choice(takes, words)


# -- which set of stages

# what the fused stages of the delta rule hold: (why not, whether they do)
FUSED = (
    ("{generation} GPU: the fused stages need Hopper or later", lambda k: k.generation in LATER),
    ("{dtype}: the fused stages hold 16 bit", lambda k: k.dtype.itemsize == 2),
    ("K={K}: the fused stages want whole words, an even number", lambda k: k.K % 2 == 0),
    ("K={K}: the fused stages hold 128 keys", lambda k: k.K <= limits.FUSED),
    ("V={V}: the fused stages hold 128 values", lambda k: k.V <= limits.FUSED),
)
BFLOAT16 = ("{dtype}: bfloat16 is wanted", lambda k: k.dtype == torch.bfloat16)


@decision
def gdn_backward_stages(kind: Kind) -> Choice:
    """Of the backward pass of Gated DeltaNet: "fused" or "staged"; the forward pass is fused."""
    return either(first(FUSED, kind), "staged", "fused")


# with 128 keys scan_bwd in halves wants 640 columns of tensor memory, and Blackwell has 512
HALVES = (
    ("{generation} GPU: kernels with halves are for Hopper", lambda k: k.generation == "hopper"),
    *FUSED[1:],
)


@decision
def gdn_halves(kind: Kind) -> Choice:
    """Of Gated DeltaNet whose beta may be beyond 1: P and A * G in "halves" in both passes, of the
    heads where numbers cancel, or as "one" number, with q, k and v in float32.
    """
    return either(first(HALVES, kind), "one", "halves", "where numbers cancel: Hopper, {dtype}")


@decision
def kda_halves(kind: Kind) -> Choice:
    """Of Kimi Delta Attention and GDN-2 whose beta may be beyond 1: fused stages whose rows are
    "halves" of bfloat16, whose 16 bits are too few beside float16; or "one" number of float32 in
    the stages one by one, with q, k and v in float32 too.
    """
    return either(first((*HALVES, BFLOAT16), kind), "one", "halves")


@decision
def kda_forward_stages(kind: Kind) -> Choice:
    """Of the forward pass of Kimi Delta Attention and GDN-2: "fused" or "staged". Its kernels give
    the same bits, whatever the batch.
    """
    return either(first(FUSED, kind), "staged", "fused")


@decision
def dplr_stages(kind: Kind) -> Choice:
    """Of the general delta rule by its chunked names: "in chunks" or "token by token"."""
    if kind.K > limits.DPLR:
        return Choice("token by token", "K={K}: chunks hold 256 keys")
    return Choice("in chunks", "K={K}")


def enough(kind: Kind) -> bool:
    """Whether a sequence has tokens enough, times heads, for kernels in Gluon to gain."""
    return kind.T * kind.HV >= limits.ENOUGH


KEY_HEADS = ("H={H}, HV={HV}: a q/k head each is wanted", lambda k: k.H == k.HV)
ENOUGH = ("T x HV = {T} x {HV}: fewer than 2^14, the host decides the time", enough)
WHOLE_HEADS = (
    "K={K}, V={V}: heads of 128 are wanted",
    lambda k: (k.K, k.V) == (limits.HEAD, limits.HEAD),
)
CHUNKS_OF_64 = ("chunks of {C}: Gluon kernels take 64", lambda k: k.C == limits.CHUNK)
# what every kernel in Gluon wants, but Mamba-2's, which takes chunks of 128
GLUON = (
    ("in Triton's interpreter, which knows no Gluon", lambda k: k.compiled),
    ("{generation} GPU: Gluon kernels are for Hopper", lambda k: k.generation == "hopper"),
    CHUNKS_OF_64,
    ("Gluon is {gluon}", lambda k: not k.gluon),
)
WHOLE = (
    ("packed sequences", lambda k: not k.packed),
    ("T={T}: not whole chunks of 64", lambda k: k.T % limits.CHUNK == 0),
)
ALIGNED = ("a tensor does not begin at 16 bytes", lambda k: k.aligned)
SIXTEEN = ("{dtype}: Gluon kernels take 16 bit", lambda k: k.dtype.itemsize == 2)

WORDS = ("V={V}: the fused stages want whole words, an even number", lambda k: k.V % 2 == 0)
# what the kernels hold, and where those in Gluon run
KDA_HELD = (*FUSED, BFLOAT16, WORDS)
KDA_BACKWARD = (*FUSED, *WHOLE, BFLOAT16, KEY_HEADS, ENOUGH, *GLUON, WHOLE_HEADS)


def unlike(kind: Kind, gates: tuple[torch.dtype, ...]) -> str | None:
    """Why Gluon kernels do not take erase and write gates of these dtypes, or None: they do."""
    others = [str(x)[6:] for x in gates if x != kind.dtype]
    return f"a gate of {others[0]}: Gluon kernels want {{dtype}}" if others else None


@decision
def kda_backward_stages(kind: Kind, *gates: torch.dtype) -> Choice:
    """Of the backward pass of Kimi Delta Attention and GDN-2: "fused" or "staged".

    Fused where the kernels in Gluon run: in plain Triton the chains, longer by a product, take what
    the other kernels save. And where no more memory is needed than by the stages. The interpreter
    runs whatever the kernels hold.
    """
    if kind.compiled:
        why = first(KDA_BACKWARD, kind) or unlike(kind, gates)
    else:
        why = first(KDA_HELD, kind)
    return either(why, "staged", "fused")


SSD = (
    ("{generation} GPU: the fused stages need Hopper or later", lambda k: k.generation in LATER),
    ("{dtype}: the fused stages hold 16 bit", lambda k: k.dtype.itemsize == 2),
    ("N={K}: the fused stages hold states of 128", lambda k: k.K <= limits.SSD_STATES),
    ("P={V}: the fused stages hold heads of 64", lambda k: k.V <= limits.SSD_HEAD),
)


@decision
def ssd_stages(kind: Kind, low: float = 0.0) -> Choice:
    """Of both passes of Mamba-2: "fused" or "staged".  low: the least step; where it is negative, a
    memory may grow.
    """
    if low < 0:
        return Choice("staged", "a step may be negative, and a memory grow")
    return either(first(SSD, kind), "staged", "fused", "{generation}, {dtype}, N={K}, P={V}")


# the kernels hold tiles of 64 tokens, and the whole state of a head
SSD_TILES = (
    ("packed sequences", lambda k: not k.packed),
    ("T={T}: not whole chunks of {C}", lambda k: k.T % k.C == 0),
    *(x for x in GLUON if x is not CHUNKS_OF_64), SIXTEEN,
    ("N={K}, P={V}: states of 128 x 64 are wanted",
     lambda k: (k.K, k.V) == (limits.SSD_STATES, limits.SSD_HEAD)),
    ENOUGH, ALIGNED,
)  # fmt: skip
TILES_OF_64 = ("chunks of {C}: not whole tiles of 64", lambda k: k.C % limits.CHUNK == 0)
CHUNKS_OF_128 = ("chunks of {C}: 128 are wanted", lambda k: k.C == limits.SSD_CHUNK)
IN_PAIRS = ("H={HV}, G={H}: an odd number of heads a group", lambda k: k.HV // k.H % 2 == 0)


def _of_ssd(kind: Kind, conditions: tuple, documents: bool, other: str = "") -> Choice:
    """Of Mamba-2, "gluon" or "triton".  other: what else that in Gluon does not take, or ""."""
    why = first((*conditions, *SSD_TILES), kind)
    if why is None and (documents or other):
        why = "documents in a sequence" if documents else other
    if why is None and limits.SSD_GLUON < support.THIS:
        why = "a Triton with which the one in Gluon was not run yet"
    return either(why, "triton", "gluon", "Hopper, {dtype}, N={K}, P={V}, whole chunks of {C}")


@decision
def ssd_fwd(kind: Kind, documents: bool, gate: bool) -> Choice:
    """The scan of Mamba-2's forward pass, in Gluon or not.  documents: whether there are any in a
    sequence; gate: whether z is given.
    """
    return _of_ssd(kind, (TILES_OF_64, IN_PAIRS), documents, "a gate z" if gate else "")


@decision
def ssd_states(kind: Kind, documents: bool) -> Choice:
    """The states between Mamba-2's chunks, and their gradients, for the backward pass, in Gluon or
    not.  documents: whether there are any in a sequence.
    """
    return _of_ssd(kind, (CHUNKS_OF_128, IN_PAIRS), documents)


@decision
def ssd_bwd_dc(kind: Kind, documents: bool) -> Choice:
    """Of Mamba-2's backward pass, in Gluon or not.  documents: as in ssd_states."""
    return _of_ssd(kind, (CHUNKS_OF_128,), documents)


@decision
def ssd_bwd_dx(kind: Kind, documents: bool, channels: bool) -> Choice:
    """Of Mamba-2's backward pass, in Gluon or not.  documents: whether there are any in a sequence;
    channels: whether D has a number for each.
    """
    return _of_ssd(kind, (CHUNKS_OF_128,), documents, "D of channels" if channels else "")


@decision
def chunk_limit(kind: Kind) -> Choice:
    """The longest chunk for a device, dtype and head size."""
    by_size = of_generation(limits.CHUNK_LIMITS, kind.generation).get(kind.dtype.itemsize, {})
    limit = by_size.get(max(128, block(kind.K)), 64)
    return Choice(limit, "{generation}, {dtype}, K={K}")


# -- which kernel

INTRA = (
    *GLUON, BFLOAT16, ("K={K}: 64 or 128 keys are wanted", lambda k: k.K in limits.HEADS), ALIGNED
)  # fmt: skip


@decision
def intra_chunk(kind: Kind) -> Choice:
    """Of Gated DeltaNet: in "gluon", or in "two" kernels of plain Triton."""
    why = first(INTRA, kind)
    return either(why, "two", "gluon", "Hopper, bfloat16, K={K}, chunks of {C}")


# the order is by what a reader would ask first
SCAN = (
    *WHOLE, *GLUON, SIXTEEN, ("K={K}: 64 or 128 keys are wanted", lambda k: k.K in limits.HEADS),
    ("V={V}: no multiple of 64 values", lambda k: k.V % limits.COLUMNS == 0), ALIGNED,
)  # fmt: skip
WIDE = (("K={K}: 128 keys are wanted", lambda k: k.K == limits.HEAD), *SCAN)


def gluon_scan(kind: Kind, wide: bool) -> Choice:
    """A scan that Gluon may take, with the bits of plain Triton: `by_load.scan` asks whether it
    pays.  wide: one whose states have 128 keys, as all but the first have.
    """
    why = first(WIDE if wide else SCAN, kind)
    return either(why, "triton", "gluon", "Hopper, {dtype}, K={K}, whole chunks of {C}")


@decision
def kda_fused_scans(kind: Kind, *gates: torch.dtype) -> Choice:
    """Both scans of the backward pass of Kimi Delta Attention, "gluon" or "triton"; whether they
    pay was asked when the set was taken.
    """
    why = unlike(kind, gates)
    return Choice("triton", why) if why else gluon_scan(kind, True)


INTRA_BWD = (
    *WHOLE, *GLUON, SIXTEEN,
    ("K={K}, V={V}: heads of 64 or of 128 are wanted", lambda k: k.K == k.V in limits.HEADS),
    ENOUGH, ALIGNED,
)  # fmt: skip


@decision
def intra_chunk_bwd(kind: Kind, halves: bool = False) -> Choice:
    """Of Gated DeltaNet, "gluon" or "triton".  halves: v_new and Z have low ones."""
    why = first((*INTRA_BWD, BFLOAT16, WHOLE_HEADS) if halves else INTRA_BWD, kind)
    return either(why, "triton", "gluon", "Hopper, {dtype}, K={K}, V={V}, whole chunks of {C}")


# where a factor of 2^NEAR fits the dtype and one anchor was found to be faster
NEAR = (
    ("{generation} GPU: one anchor a chunk was not faster", lambda k: k.generation in LATER),
    ("{dtype}: one anchor a chunk is for bfloat16", lambda k: k.dtype == torch.bfloat16),
)


@decision
def kda_near(kind: Kind, halves: bool = False) -> Choice:
    """Channels that fade little in a chunk: "anchored" once, by a kernel of their own, or "all"
    channels by the one kernel.  halves: fp32 is multiplied in two halves of bfloat16.
    """
    why = first(NEAR[:1] if halves else NEAR, kind)
    return either(why, "all", "anchored", "{generation}, {dtype}")


KDA_INTRA = (*WHOLE, KEY_HEADS, *GLUON, BFLOAT16, WHOLE_HEADS, ENOUGH, ALIGNED)


@decision
def kda_fused_intra_bwd(kind: Kind, halves: bool = False, *gates: torch.dtype) -> Choice:
    """Of Kimi Delta Attention, "gluon" or "triton".  halves: v_new and Z have low ones."""
    why = first(KDA_INTRA, kind) or unlike(kind, gates)
    if gates and halves:
        why = why or "with halves there is no room for an erase and a write gate"
    return either(why, "triton", "gluon", "Hopper, bfloat16, K={K}, V={V}, whole chunks of {C}")


KDA_GATE_PREPARE = (
    *GLUON, BFLOAT16, ("K={K}: 128 keys are wanted", lambda k: k.K == limits.HEAD), ALIGNED
)  # fmt: skip


@decision
def kda_gate_prepare(kind: Kind, *gates: torch.dtype) -> Choice:
    """gate_cumsum and kda_prepare of Kimi Delta Attention: one kernel in "gluon", or "triton"."""
    if why := first(KDA_GATE_PREPARE, kind) or unlike(kind, gates):
        return Choice("triton", why)
    if support.THIS > limits.KDA_FRONT:
        return Choice("triton", "a Triton with which the one in Gluon was not run yet")
    return Choice("gluon", "Hopper, bfloat16, K={K}, chunks of {C}")


@decision
def kda_halved(dtype: torch.dtype, lower_bound: float | None = None) -> Choice:
    """The rows of a block on the diagonal that are halved: "none", "far" or "all".

    With a lower bound of the log decay, the exponent in a block of 16 is at most
    15 log2(e) |lower_bound|: that must leave fp32 and bf16 room, and fp16 has none.
    """
    if dtype == torch.float16:
        return Choice("all", "float16 has no room for the exponent of a block")
    if lower_bound is not None and -15 * math.log2(math.e) * lower_bound < 110:
        return Choice("none", "the gate is promised to be at least {0}")
    return Choice("far", "nothing bounds the gate")


@decision
def scan_rows(generation: str, size: int) -> Choice:
    """Of a kernel that carries a state, for keys of `size` bytes: its "table", or "unpipelined"."""
    if size % 4 and generation in LATER:
        return Choice("unpipelined", "keys of {0} bytes, no whole words, are not copied ahead")
    return Choice("table", "keys of {0} bytes")


@decision
def dplr_scan_rows(V: int) -> Choice:
    """Of a scan of the general delta rule for V values: its "table", or "unpipelined"."""
    if V <= 32:
        return Choice("unpipelined", "tiles of 64 columns would be narrowed, in 4 warps")
    return Choice("table", "tiles of 64 columns hold values")


# -- which sequences are cut, and where


@decision
def pieces_by_maps(kind: Kind) -> Choice:
    """Tokens of a piece that is entered by maps, or 0: sequences are not cut so.

    By their own length and their heads alone, so that nothing changes with the batch.
    """
    if kind.HV * cdiv(kind.V, 64) > limits.PROGRAMS:
        return Choice(0, "more than 16 heads times tiles of 64 values: maps would cost too much")
    if not kind.large:
        return Choice(0, "a GPU of fewer than 64 multiprocessors")
    if kind.T < limits.LEAST * limits.LENGTH:
        return Choice(0, "T={T}: shorter than 4 pieces of 2048")
    return Choice(limits.LENGTH, "T={T}, HV={HV}: long, of few heads; by their maps")


@decision
def pieces_by_warm_up(kind: Kind) -> Choice:
    """Tokens of a piece that is entered by a warm-up, or 0: sequences are not cut so."""
    programs = kind.HV * cdiv(kind.V, 64)
    if not limits.PROGRAMS < programs <= limits.FULL:
        return Choice(0, "HV={HV}, V={V}: not 17 to 128 heads times tiles of 64 values")
    if not kind.large:
        return Choice(0, "a GPU of fewer than 64 multiprocessors")
    size = limits.PER_PROGRAM * programs
    if size > kind.T // 2:
        return Choice(0, "T={T}: shorter than 2 pieces of 128 tokens for each program")
    return Choice(size, "T={T}, HV={HV}: long; by a warm-up")


@decision
def ssd_pieces(kind: Kind) -> Choice:
    """How many pieces a long sequence of Mamba-2's forward pass has: the fewest whose programs, one
    for each head, leave few multiprocessors without work when the last of them run.
    """
    n = 1
    while n < limits.SSD_MOST:
        turns = cdiv(n * kind.HV, limits.SSD_PROGRAMS)
        if n * kind.HV >= limits.SSD_BUSY * turns * limits.SSD_PROGRAMS:
            break
        n += 1
    return Choice(n, f"{n * kind.HV} programs, for GPUs that run {limits.SSD_PROGRAMS} at a time")


def ssd_least() -> int:
    """Tokens of which a piece of Mamba-2's forward pass has a multiple."""
    return min(limits.SSD_LEAST, limits.SSD_PIECE)


@decision
def ssd_piece(kind: Kind, ranks: bool = False) -> Choice:
    """Tokens of a piece of a sequence in the forward pass, which has a program of ssd_fwd for each
    head; of packed sequences the length of each decides, over ranks that of the longest.

    ranks: whether sequences are cut over ranks: then every piece has a map anyway.
    """
    if kind.T <= limits.SSD_PIECE and not ranks:
        return Choice(limits.SSD_PIECE, "T={T}: the whole sequence")
    least = ssd_least()
    size = cdiv(kind.T, ssd_pieces(kind).takes * least) * least
    return Choice(size, "T={T}, a part of what is cut over ranks" if ranks else "T={T}")


@decision
def ssd_piece_bwd(kind: Kind) -> Choice:
    """The same in the backward pass of sequences that are cut over ranks."""
    size = cdiv(cdiv(kind.T, limits.SSD_PIECES), limits.SSD_CHUNK) * limits.SSD_CHUNK
    size = min(max(size, ssd_least()), limits.SSD_PIECE)
    return Choice(size, "T={T}, a part of what is cut over ranks")


@decision
def ssd_heads(kind: Kind, kept: bool) -> Choice:
    """In how many parts the heads of a group are summed.  kept: sums over heads are kept, of which
    a program then has many; else of dx.
    """
    heads = limits.SSD_MANY if kept else limits.SSD_FEW
    return Choice(cdiv(kind.HV // kind.H, heads), "H={HV}, G={H}")
