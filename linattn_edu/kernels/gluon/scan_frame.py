"""What the scans in Gluon share: the warps that load and store, and what lies between them.

A program goes through a piece of a sequence, a chunk after the other. What groups of four warps
compute of a chunk stands in the files of the scans: at most three products are under way there, and
none where the loop turns, since ptxas would run them one after the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.runtime.jit import constexpr_function

from linattn_edu.kernels.delta.warm_up import with_warm_up
from linattn_edu.kernels.gluon.blocks import bar_pairs, bars, half, numbers, operand, product, ring
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, ROWS
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier, record
from linattn_edu.kernels.tiles import sequence_of

BV = 64  # values of a group of four warps


# -- records --------------------------------------------------------------------------------------
@record
class Piece:
    """What a program of a scan goes through, see piece_of_program."""

    i_v: object  # the first tile of values
    i_h: object  # the head
    i_k: object  # its head of keys
    i_nh: object  # piece and head with which it begins
    i_end: object  # the same at the end; -1: another program goes through it
    first: object  # row of the first token
    i_c: object  # number of the first chunk
    NT: object  # chunks
    skip: object  # those at whose end nothing is stored
    SOME: object  # whether only some programs have any


@record
class Chunks:
    """The chunks of a sequence that a scan goes through: a warp loads them, others compute."""

    descs: object  # of tensors, in the order in which they are needed
    columns: object  # where the columns of each begin
    rings: object  # of each, the places [STAGES, BT, columns]
    gates: object  # [3 * STAGES, 64] in fp32: three vectors a place
    full: object  # [STAGES, 1] mbarriers: the copies have come to a place, and the gates
    empty: object  # [STAGES, 1] mbarriers: no warp reads a place any more
    first: object  # row of the first token
    NT: object  # chunks
    BYTES: object  # of a chunk's copies
    BT: object
    STAGES: object
    BACK: object  # the last chunk first


@record
class Results:
    """What a group of warps makes of each chunk, and another warp copies out."""

    S_desc: object  # [rows, V], a row a key
    descs: object  # of what else there is, a row a token
    halves: object  # S, or its gradient, in halves of 64 keys
    others: object  # what else there is
    bars: object  # [4, 1] mbarriers: see scan_and_store
    row: object  # of the state of the first chunk
    c_S: object  # columns, of the state and of the others
    c_v: object
    skip: object  # chunks that come first and are not copied out
    HV: object
    K: object


@record
class State:
    """Which S [K, BV], or gradient of one, a group of warps has."""

    first_ptr: object  # [N, HV, K, V] or None: what it begins with
    last_ptr: object  # [N, HV, K, V] or None: what it ends with
    i_nh: object  # piece and head with which it begins
    i_end: object  # the same at the end; -1: another program goes through it
    i_v: object  # first tile of values of the program
    W: object  # the group's among them
    SOME: object  # whether i_end may be -1
    K: object
    V: object
    BV: object


@record
class Worker:
    """A group of warps that compute."""

    compute: object  # what it does with Chunks, made, state and more
    made: object  # Results
    state: object  # State
    more: object


# -- a state, and what is multiplied by it --------------------------------------------------------
@gluon.jit
def state_of(w: gl.constexpr, piece, first_ptr, last_ptr, K: gl.constexpr, V: gl.constexpr,
             BV: gl.constexpr):  # fmt: skip
    """State of the w-th group of warps of a program."""
    ends = piece.i_nh, piece.i_end
    return State(first_ptr, last_ptr, *ends, piece.i_v, w, piece.SOME, K, V, BV)


@gluon.jit
def rows_of(state):
    """Where the numbers of S^T [BV, 64] are in S."""
    o_v = (state.i_v + state.W) * state.BV + gl.arange(0, state.BV, ROWS)
    return gl.arange(0, 64, ALONG)[None, :] * state.V + o_v[:, None]


@gluon.jit
def load_state(state, NT):
    """S^T [BV, 128] in halves of 64 keys, 0 without first_ptr."""
    # not a constant: a product of those ptxas would not run beside others
    b_S1 = gl.full([state.BV, 64], gl.where(NT < 0, 1.0, 0.0), gl.float32, MMA)
    b_S2 = b_S1
    if state.first_ptr is not None:
        o_S = state.i_nh.to(gl.int64) * state.K * state.V + rows_of(state)
        b_S1 = gl.load(state.first_ptr + o_S).to(gl.float32)
        b_S2 = gl.load(state.first_ptr + o_S + 64 * state.V).to(gl.float32)
    return b_S1, b_S2


@gluon.jit
def store_state(state, b_S1, b_S2):
    """S^T from its halves to last_ptr."""
    o_S = state.i_end.to(gl.int64) * state.K * state.V + rows_of(state)
    gl.store(state.last_ptr + o_S, b_S1)
    gl.store(state.last_ptr + o_S + 64 * state.V, b_S2)


@gluon.jit
def store_end(state, b_S1, b_S2):
    """The same, where no other program goes through the head."""
    if state.SOME:
        if state.i_end >= 0:
            store_state(state, b_S1, b_S2)
    else:
        store_state(state, b_S1, b_S2)


@gluon.jit
def keys_times_state(b_h1, b_h2, k, zero, K: gl.constexpr):
    """Begin (K S)^T, from S^T in halves of 64 keys; with K = 64 b_h2 is not read."""
    b_W = product(b_h1, half(k, 0).permute((1, 0)), zero, False)
    if K == 128:
        b_W = product(b_h2, half(k, 1).permute((1, 0)), b_W)
    return b_W


@gluon.jit
def again(x, i_t):
    """x, of which the compiler does not know it: what is made of it is made where it is needed, and
    holds no registers until then.
    """
    return (x.to(gl.int32, bitcast=True) | (i_t >> 30)).to(gl.float32, bitcast=True)


@gluon.jit
def store_transposed(x, shared):
    """A result x^T into shared memory."""
    shared.permute((1, 0)).store(x)


@gluon.jit
def hand_over(bar):
    """What the warps have written to shared memory is there for the warp that waits at bar."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def hand_over_state(made, b_S1, b_S2, dtype: gl.constexpr):
    """The state is there in 16 bit for the warp that stores it."""
    store_transposed(b_S1.to(dtype), made.halves[0])
    store_transposed(b_S2.to(dtype), made.halves[1])
    hand_over(made.bars.index(0))


@gluon.jit
def begin(chunks, made, state, dtype: gl.constexpr):
    """The state before the first chunk, which has come, in halves and as operands."""
    b_S1, b_S2 = load_state(state, chunks.NT)
    hand_over_state(made, b_S1, b_S2, dtype)
    mbarrier.wait(chunks.full.index(0), 0, pred=chunks.NT > 0)
    return b_S1, b_S2, operand(b_S1, dtype), operand(b_S2, dtype)


@gluon.jit
def next_place(chunks, i_t):
    """Where the chunk after the i_t-th is, which has come; after the last one, where that is."""
    i_next = gl.minimum(i_t + 1, chunks.NT - 1)
    i = i_next % chunks.STAGES
    mbarrier.wait(chunks.full.index(i), i_next // chunks.STAGES & 1)
    return i


@gluon.jit
def places(x):
    """The two or four places of a ring."""
    if x.shape[0] == 2:
        return x.index(0), x.index(1)
    else:
        return x.index(0), x.index(1), x.index(2), x.index(3)


# -- chunks, and the warps around those that compute ----------------------------------------------
@gluon.jit
def piece_of_program(pid, warmup_ptr, cu_ptr, offsets_ptr, T, N, H: gl.constexpr, HV: gl.constexpr,
        V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, WORKERS: gl.constexpr,
        BACK: gl.constexpr):  # fmt: skip
    """The Piece that program pid goes through, or by warmup_ptr more, or nothing."""
    NV: gl.constexpr = V // BV // WORKERS
    i_v, i_nh = pid % NV * WORKERS, pid // NV
    i_h, skip, i_end = i_nh % HV, 0, i_nh
    first, n_t, i_c = sequence_of(i_nh // HV, cu_ptr, offsets_ptr, T, BT)
    if warmup_ptr is not None:
        first, n_t, i_c, skip, i_end = with_warm_up(
            i_nh, first, n_t, i_c, warmup_ptr, cu_ptr, T, N, HV, BT, BACK
        )
    first, i_c = first.to(gl.int32), i_c.to(gl.int32)  # rows of descriptors
    some: gl.constexpr = warmup_ptr is not None
    return Piece(i_v, i_h, i_h // (HV // H), i_nh, i_end, first, i_c, n_t // BT, skip, some)


@constexpr_function
def bytes_of(rings):
    """Of one place of each of them."""
    return sum(x.shape[1] * x.shape[2] * x.dtype.primitive_bitwidth // 8 for x in rings)


@gluon.jit
def chunks_of(piece, descs, columns, rings, BT: gl.constexpr, STAGES: gl.constexpr,
              WORKERS: gl.constexpr, BACK: gl.constexpr):  # fmt: skip
    """Chunks of a piece, with memory for the gates and with mbarriers."""
    gates = numbers([3 * STAGES, 64])
    full, empty = bar_pairs(STAGES, 2, WORKERS)  # the copies have come, and the gates
    return Chunks(
        descs, columns, rings, gates, full, empty, piece.first, piece.NT, bytes_of(rings), BT,
        STAGES, BACK,
    )  # fmt: skip


@gluon.jit
def chunk_at(i_t, NT, BACK: gl.constexpr):
    """Which chunk of a sequence comes i_t-th."""
    return NT - 1 - i_t if BACK else i_t


@record
class Gates:
    """A gate a head. A place has 2^gc, 2^(gc_last - gc) and, if there is one, beta."""

    gc_ptr: object  # at the first token
    beta_ptr: object  # or None
    ROW: object  # numbers between tokens

    @gluon.jit
    def of(self, i_t, NT, BT: gl.constexpr, BACK: gl.constexpr):
        """gc and beta of the chunk that comes i_t-th, and gc of its last token."""
        ROW: gl.constexpr = self.ROW
        i = chunk_at(gl.maximum(gl.minimum(i_t, NT - 1), 0), gl.maximum(NT, 1), BACK) * BT * ROW
        o_t = gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * ROW
        some = (o_t >= 0) & (NT > 0)  # an empty piece may begin behind the last token
        b_last = gl.load(self.gc_ptr + i + (BT - 1) * ROW, mask=NT > 0, other=0.0)
        b_gc = gl.load(self.gc_ptr + i + o_t, mask=some, other=0.0)
        b_beta = b_gc
        if self.beta_ptr is not None:
            b_beta = gl.load(self.beta_ptr + i + o_t, mask=some, other=0.0).to(gl.float32)
        return b_gc, b_beta, b_last

    @gluon.jit
    def leave(self, gates, i, b_gc, b_beta, b_last):
        """Write to place i what `of` has loaded."""
        gates.index(3 * i).store(gl.exp2(b_gc))
        gates.index(3 * i + 1).store(gl.exp2(b_last - b_gc))
        if self.beta_ptr is not None:
            gates.index(3 * i + 2).store(b_beta)


@gluon.jit
def gates_of(piece, gc_ptr, beta_ptr, ROW: gl.constexpr):
    """Gates of a piece; gc_ptr, beta_ptr: [B, T, heads], or beta_ptr None."""
    i = piece.first.to(gl.int64) * ROW + piece.i_h
    return Gates(gc_ptr + i, None if beta_ptr is None else beta_ptr + i, ROW)


@record
class ChannelGates:
    """A gate a channel. A place has 2^gc_last, in halves of 64 keys, and, if there is one, beta."""

    gc_ptr: object  # at the first token
    beta_ptr: object  # or None
    HV: object

    @gluon.jit
    def of(self, i_t, NT, BT: gl.constexpr, BACK: gl.constexpr):
        """gc of the last token of the chunk that comes i_t-th, in halves, and its beta."""
        i = chunk_at(gl.maximum(gl.minimum(i_t, NT - 1), 0), gl.maximum(NT, 1), BACK) * BT
        o = gl.arange(0, 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        some = (o >= 0) & (NT > 0)  # an empty piece may begin behind the last token
        last_ptr = self.gc_ptr + (i + BT - 1).to(gl.int64) * (self.HV * 128) + o
        b_a1 = gl.load(last_ptr, mask=some, other=0.0)
        b_a2 = gl.load(last_ptr + 64, mask=some, other=0.0)
        b_beta = b_a2
        if self.beta_ptr is not None:
            b_beta = gl.load(self.beta_ptr + (i + o) * self.HV, mask=some, other=0.0).to(gl.float32)
        return b_a1, b_a2, b_beta

    @gluon.jit
    def leave(self, gates, i, b_a1, b_a2, b_beta):
        """Write to place i what `of` has loaded."""
        gates.index(3 * i).store(gl.exp2(b_a1))
        gates.index(3 * i + 1).store(gl.exp2(b_a2))
        if self.beta_ptr is not None:
            gates.index(3 * i + 2).store(b_beta)


@gluon.jit
def channel_gates_of(piece, gc_ptr, beta_ptr, HV: gl.constexpr):
    """ChannelGates of a piece; gc_ptr: [B, T, HV, 128], beta_ptr: [B, T, HV], or None."""
    i = piece.first.to(gl.int64) * HV + piece.i_h
    return ChannelGates(gc_ptr + i * 128, None if beta_ptr is None else beta_ptr + i, HV)


@gluon.jit
def residual(chunks, N: gl.constexpr, i, W: gl.constexpr, b_W):
    """diag(beta) (V - kd S), transposed, for tile W of the values of the chunk in place i; with a
    write gate, the ring after N others, w * V - kd S.  b_W: kd S.
    """
    b_v = half(chunks.rings[1].index(i), W).permute((1, 0)).load(MMA)
    if len(chunks.rings) == N:
        b_W = b_v.to(gl.float32) - b_W
        return b_W * chunks.gates.index(3 * i + 2).load(ALONG)[None, :]
    else:
        b_w = half(chunks.rings[N].index(i), W).permute((1, 0)).load(MMA)
        return b_v.to(gl.float32) * b_w.to(gl.float32) - b_W


@gluon.jit
def load_chunk(chunks, i, begin, given, gates):
    """Begin to copy the chunk at row `begin` to place i, which is empty, and leave its gates."""
    bar = chunks.full.index(i)
    mbarrier.expect(bar, chunks.BYTES)
    for j in gl.static_range(len(chunks.rings)):
        place = chunks.rings[j].index(i)
        async_load(chunks.descs[j], [begin, chunks.columns[j]], bar, place)
    given.leave(chunks.gates, i, *gates)


@gluon.jit
def load_chunks(chunks, given):
    """The producer: every chunk into the rings, as soon as its place is empty.

    given: Gates or ChannelGates.
    """
    NT = chunks.NT
    gates = given.of(0, NT, chunks.BT, chunks.BACK)
    for i_t in range(NT):
        i = i_t % chunks.STAGES
        begin = chunks.first + chunk_at(i_t, NT, chunks.BACK) * chunks.BT
        mbarrier.wait(chunks.empty.index(i), (i_t // chunks.STAGES & 1) ^ 1)
        load_chunk(chunks, i, begin, given, gates)
        # those of the next chunk are on their way meanwhile
        gates = given.of(i_t + 1, NT, chunks.BT, chunks.BACK)
        barrier()
        mbarrier.arrive(chunks.full.index(i), count=1)


@gluon.jit
def store_chunks(chunks, made):
    """The warp that copies Results out: a chunk's state in halves, then the rest.

    Its mbarriers: 0, the state is there; 1, it was taken; 2, the rest is there; 3, it was taken.
    That something was taken is said when the next copy has begun: their latencies overlap.
    """
    NT = chunks.NT
    for i_t in range(NT):
        i_c = chunk_at(i_t, NT, chunks.BACK)
        mbarrier.wait(made.bars.index(0), i_t & 1)
        if i_t >= made.skip:
            i = made.row + i_c * made.HV * made.K
            async_store(made.S_desc, [i, made.c_S], made.halves[0])
            async_store(made.S_desc, [i + made.K // 2, made.c_S], made.halves[1])
        tma.store_wait(len(made.halves))
        barrier()
        mbarrier.arrive(made.bars.index(3), count=1)
        mbarrier.wait(made.bars.index(2), i_t & 1)
        if i_t >= made.skip:
            for j in gl.static_range(len(made.others)):
                at = [chunks.first + i_c * chunks.BT, made.c_v]
                async_store(made.descs[j], at, made.others[j])
        tma.store_wait(len(made.others))
        barrier()
        mbarrier.arrive(made.bars.index(1), count=1)
    tma.store_wait(0)


@gluon.jit
def worker_of(w: gl.constexpr, compute: gl.constexpr, more, piece, S_desc, halves, descs, others,
              first_ptr, last_ptr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
              BV: gl.constexpr):  # fmt: skip
    """The w-th group of warps of a program."""
    c_S = piece.i_v * BV + w * BV
    made = Results(
        S_desc, descs, (halves[2 * w], halves[2 * w + 1]), [x.index(w) for x in others],
        bars(4, 1), (piece.i_c * HV + piece.i_h) * K, c_S, piece.i_h * V + c_S, piece.skip, HV, K,
    )  # fmt: skip
    return Worker(compute, made, state_of(w, piece, first_ptr, last_ptr, K, V, BV), more)


@gluon.jit
def compute_chunks(chunks, worker):
    """A group of warps that compute."""
    compute: gl.constexpr = worker.compute
    compute(chunks, worker.made, worker.state, *worker.more)


@gluon.jit
def scan_and_store(
    compute: gl.constexpr, more, piece, given, descs, columns, rings, S_desc, halves, out_descs,
    first_ptr, last_ptr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr,
    BV: gl.constexpr, STAGES: gl.constexpr, WORKERS: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """The warps of a scan that stores what it makes of each chunk, and what they share.

    Args:
        compute, more: what WORKERS groups of four warps do, each for BV values of the program's,
            with Chunks, Results, State and `more`.
        piece, given: what the program goes through, and its gates, for load_chunks.
        descs, columns, rings: of Chunks.
        S_desc, halves, out_descs: of Results, the halves of all groups; a warp a group copies out.
        first_ptr, last_ptr: of State.

    mbarriers, of a chunk in place i of the rings::

        empty[i]  computing warps -> loading warp: it may copy the next chunk to this place
        full[i]   the copies, and the loading warp with the gates -> computing warps, which begin
                  the products of the chunk before the last ones of the chunk ahead of it are done
        bars[0]   computing warps -> storing warp: the state has been written to `halves`
        bars[3]   storing warp -> computing warps: it has left `others`, which may be written
        bars[2]   computing warps -> storing warp: `others` have been written
        bars[1]   storing warp -> computing warps: it has left `halves`, which may be written

    In this order in each chunk, for the storing warp; the computing warps wait for bars[3], arrive
    at bars[2], wait for full of the next chunk and for bars[1], arrive at bars[0] and at empty[i].
    Every group of four warps arrives at empty[i], and has bars and a storing warp of its own.
    """
    others = [ring(x, WORKERS) for x in out_descs]
    chunks = chunks_of(piece, descs, columns, rings, BT, STAGES, WORKERS, BACK)
    workers = [
        worker_of(w, compute, more, piece, S_desc, halves, out_descs, others, first_ptr, last_ptr,
                  HV, K, V, BV)
        for w in ((0, 1) if WORKERS == 2 else (0,))
    ]  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [(compute_chunks, (chunks, x)) for x in workers]
        + [(load_chunks, (chunks, given))]
        + [(store_chunks, (chunks, x.made)) for x in workers],
        [4, 1, 1, 1] if WORKERS == 2 else [1, 1],
        [240, 24, 24, 24] if WORKERS == 2 else [24, 24],
    )
