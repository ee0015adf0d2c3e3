"""What is chosen by how much there is to do, and multiprocessors for it.

These choices must not change a bit: the kernels between which they choose add in the same order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn_edu.choices import Choice
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.routes import limits
from linattn_edu.kernels.routes.by_kind import (
    INTRA,
    INTRA_BWD,
    LATER,
    gluon_scan,
    pieces_by_maps,
    pieces_by_warm_up,
    scan_rows,
    unlike,
)
from linattn_edu.kernels.routes.choosing import Load, decision, first
from linattn_edu.kernels.rows import UNPIPELINED, Config, device_of, of_generation
from linattn_edu.kernels.tiles import block, cdiv


def pays(load: Load) -> Choice | None:
    """Why a scan in Gluon would be slower than in plain Triton, or None: it is faster."""
    kind, tokens = load.kind, load.sequences * load.kind.T * load.kind.HV
    programs = load.sequences * kind.HV * kind.V // limits.COLUMNS
    if kind.K == limits.HEAD and programs <= load.processors:
        if tokens >= limits.ENOUGH:
            return None
        return Choice("triton", "fewer than 2^14 tokens times heads")
    if tokens < limits.CROWDED:
        return Choice("triton", "a full GPU and fewer than 2^18 tokens times heads")
    if kind.T < limits.LONG:
        return Choice("triton", "a full GPU and T={T}, fewer than 256 tokens")
    return None


def _scan(load: Load, wide: bool) -> Choice:
    choice = gluon_scan(load.kind, wide)
    return choice if choice.takes != "gluon" else pays(load) or choice


def pieces_of(load: Load) -> int:
    """How many sequences there are, or pieces of them."""
    size = pieces_by_maps(load.kind).takes or pieces_by_warm_up(load.kind).takes
    return load.sequences * (cdiv(load.kind.T, size) if size else 1)


@decision
def scan(load: Load) -> Choice:
    """The scan of Gated DeltaNet's forward pass, "gluon" or "triton"."""
    return _scan(load, False)


@decision
def scans(load: Load) -> Choice:
    """A scan of Gated DeltaNet's backward pass, or both, "gluon" or "triton"."""
    return _scan(load, True)


@decision
def kda_scan(load: Load, *gates: torch.dtype) -> Choice:
    """The scan of Kimi Delta Attention's forward pass, "gluon" or "triton"."""
    why = unlike(load.kind, gates)
    return Choice("triton", why) if why else _scan(load, True)


@decision
def transposed(load: Load, programs: int, BK: int, BV: int) -> Choice:
    """A scan in plain Triton: "transposed", as it always is with low halves, or "upright".

    The transposed kernel, whose products are 64 rows high, has two programs for many a
    multiprocessor; with one it would be the slower of the two. Measured for keys of more than 64.
    """
    kind = load.kind
    if kind.generation not in LATER or kind.dtype.itemsize != 2 or BK != 128 or BV != 64:
        return Choice("upright", "not 16 bit with tiles of 128 keys and 64 values on Hopper")
    if 2 * programs < 3 * load.processors:
        return Choice("upright", "{0} programs: fewer than 3 for 2 multiprocessors")
    return Choice("transposed", "{0} programs for {processors} multiprocessors")


@decision
def intra_ring(load: Load, chunks: int, whole: bool) -> Choice:
    """intra_chunk in Gluon: programs of a multiprocessor that take one chunk after the other, or 0,
    a program for each chunk.

    Where a chunk is read for one value head alone, two keep the way to memory full.
    """
    kind = load.kind
    programs = ring_programs(kind.K, kind.H, kind.HV)
    if not whole:
        return Choice(0, "chunks near an end alone, or some of fewer than 64 tokens")
    if kind.K == limits.HEAD and kind.H < kind.HV and support.THIS > limits.SHARED_RING:
        return Choice(0, "H={H}, HV={HV}: a Triton with which the last bits would be others")
    if programs * load.processors >= chunks * kind.H:
        return Choice(0, "{0} chunks of {H} heads: programs enough for all at once")
    return Choice(programs, "{0} chunks of {H} heads, one after the other")


def ring_programs(K: int, H: int, HV: int) -> int:
    """How many of them there are on a multiprocessor, where there are chunks enough."""
    return 2 if K == 128 and H == HV else 3


@decision
def chunk_fwd(load: Load, cancelling: bool = False) -> Choice:
    """intra_chunk and scan of Gated DeltaNet: "one" kernel in Gluon, or "two".  cancelling: whether
    heads that cancel are looked for, of which the one marks those of whole sequences.
    """
    kind = load.kind
    if _scan(load, False).takes != "gluon" or first(INTRA, kind):
        return Choice("two", "not all in Gluon")
    if kind.K != kind.V or kind.V not in limits.HEADS:
        return Choice("two", "K={K}, V={V}: one kernel takes heads of 64, or of 128")
    if limits.ONE_FORWARD < support.THIS:
        return Choice("two", "a Triton with which one kernel was not seen to give the same bits")
    if kind.K == limits.HEAD and kind.H < kind.HV and support.THIS > limits.SHARED_RING:
        return Choice("two", "H={H}, HV={HV}: a Triton with which the last bits would be others")
    if pieces_by_maps(kind).takes:
        return Choice("two", "T={T}: a sequence is cut, and its pieces are entered by maps")
    if cancelling and pieces_by_warm_up(kind).takes:
        return Choice("two", "T={T}: a sequence is cut, and heads that cancel are looked for")
    programs, places = pieces_of(load) * kind.HV, limits.HEAD // kind.V * load.processors
    if programs < limits.BUSY * cdiv(programs, places) * places:
        return Choice("two", f"{programs} heads would leave multiprocessors idle")
    return Choice("one", f"{programs} heads for {{processors}} multiprocessors")


@decision
def both_widths(load: Load) -> Choice:
    """Of a scan in pieces whose tiles have several widths, after a look whether some head does not
    forget: 1, two launches, of which one has nothing to do, or 0, one.

    Where few whole sequences would leave a GPU half empty.
    """
    kind = load.kind
    if 2 * load.sequences * kind.HV * cdiv(kind.V, 64) < 3 * load.processors:
        return Choice(1, "few whole sequences: narrow tiles, should a head not forget")
    return Choice(0, "whole sequences would fill the GPU")


@decision
def together(load: Load, programs: int) -> Choice:
    """Both scans of a backward pass: 1, in one launch, or 0, in two, which choose their options
    each for itself, where either alone has a program for every multiprocessor.
    """
    if programs < load.processors:
        return Choice(1, "{0} programs a scan, for {processors} multiprocessors")
    return Choice(0, "{0} programs a scan, for {processors} multiprocessors")


@decision
def workers(load: Load, pieces: int) -> Choice:
    """Tiles of 64 values of a program of Kimi Delta Attention in Gluon: two where that leaves at
    most 3 of 10 multiprocessors idle.
    """
    kind = load.kind
    wide = pieces * kind.HV * cdiv(kind.V, 2 * limits.COLUMNS)
    if kind.V % (2 * limits.COLUMNS) == 0 and 10 * wide >= 7 * load.processors:
        return Choice(2, "as many programs of 128 values as fill the GPU")
    return Choice(1, "programs of 128 values would leave multiprocessors idle")


@decision
def scan_intra_bwd(load: Load, waits: bool = False) -> Choice:
    """scan_bwd and intra_chunk_bwd of Gated DeltaNet: "one" kernel in Gluon, or "two".

    waits: whether the gradient of the last state is waited for, meanwhile states are made.
    """
    kind = load.kind
    if _scan(load, True).takes != "gluon" or first(INTRA_BWD, kind):
        return Choice("two", "not all in Gluon")
    if support.THIS > limits.ONE_KERNEL:
        return Choice("two", "a Triton with which one kernel was not seen to give the same bits")
    if waits:
        return Choice("two", "the gradient of the last state is waited for")
    if kind.H < kind.HV:
        return Choice("two", "HV={HV}, H={H}: heads that share a key have sums in one program")
    if pieces_by_maps(kind).takes or pieces_by_warm_up(kind).takes:
        # a head that does not forget is scanned whole: then all else is better not in its program
        return Choice("two", "T={T}: a sequence is cut in pieces")
    programs = load.sequences * kind.HV
    if programs < limits.BUSY * cdiv(programs, load.processors) * load.processors:
        return Choice("two", f"{programs} heads would leave multiprocessors idle")
    return Choice("one", f"{programs} heads for {{processors}} multiprocessors")


@decision
def head_groups(load: Load, one: bool) -> Choice:
    """Groups of heads that chunk_bwd in Gluon takes one after the other, with the states of one
    at a time: the most whose scans leave no more multiprocessors idle than all would. one: what
    scan_intra_bwd takes, whose programs have all values of a head.
    """
    kind = load.kind
    if _scan(load, True).takes != "gluon" or first(INTRA_BWD, kind):
        return Choice(1, "not all in Gluon")
    if not support.tried():
        return Choice(1, "groups are views, which plain Triton does not take where Gluon fails")
    if pieces_by_warm_up(kind).takes:  # its scan takes as long with few heads as with all
        return Choice(1, "T={T}: a sequence is cut, and a head that does not forget is not")
    B, T = load.sequences, kind.T
    programs = pieces_of(load) * kind.HV * (1 if one else cdiv(kind.V, limits.COLUMNS))

    def rounds(groups: int) -> int:
        return groups * cdiv(programs // groups, load.processors)

    fine = (
        n for n in range(2, kind.H + 1)
        if kind.H % n == 0 and n * limits.HEAD_GROUP <= B * T * kind.HV
    )  # fmt: skip
    groups = max((n for n in fine if rounds(n) <= rounds(1)), default=1)
    if groups == 1:
        return Choice(1, "groups would leave multiprocessors idle, or be too small")
    return Choice(groups, "all in Gluon, and no more multiprocessors idle than with all heads")


# -- the row of a table


@decision
def widest(programs: tuple[int, ...], processors: int, tenths: int) -> Choice:
    """The number of a row, of those whose tiles make so many programs, widest first: the first with
    `tenths` programs for ten multiprocessors, or the last.

    What is not a tile's own is read once a program, so wide tiles read less; too few programs leave
    the GPU idle.
    """
    for n, some in enumerate(programs):
        if 10 * some >= tenths * processors:
            return Choice(n, "the widest tiles with programs enough for {0} multiprocessors")
    return Choice(len(programs) - 1, "no tiles make programs enough for {0} multiprocessors")


def widest_launch(rows: Sequence[Config], x: Tensor, heads: int, V: int) -> tuple[tuple[int], dict]:
    """(grid, row) of a kernel on tiles of BV columns of each head, on x's device: of rows, widest
    BV first, the first that occupies 7 of 10 multiprocessors.
    """
    launches = [row.launch(V=V) for row in rows]
    programs = tuple(heads * cdiv(V, each["BV"]) for each in launches)
    n = widest(programs, device_of(x)[1], 7).takes if rows[1:] else 0
    return (programs[n],), launches[n]


def scan_launch(table: dict | tuple, k: Tensor, heads: int, V: int) -> tuple[tuple[int], dict]:
    """(grid, BK and the row) of a kernel that carries S [K, BV]: of a `scan_table`, or of rows."""
    K, size, generation = k.shape[-1], k.element_size(), device_of(k)[0]
    rows = (UNPIPELINED,)
    if isinstance(table, tuple):
        rows = table
    elif scan_rows(generation, K * size).takes == "table":
        by_keys = of_generation(table, generation)[size]
        rows = by_keys.get(block(K)) or by_keys[max(128, block(K))]
    grid, config = widest_launch(rows, k, heads, V)
    return grid, {"BK": block(K), **config}
