"""kda_prepare of Kimi Delta Attention's fused forward pass in Gluon, for Hopper.

Four warps work on one chunk of one head, each on a block of 16 tokens, 64 channels at a time; the
inverse is that of gdn_solve.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

from linattn_edu.kernels.delta.kda_intra import NEAR
from linattn_edu.kernels.fused.cancel import sequence_of_chunk
from linattn_edu.kernels.gluon.blocks import CHUNK, add, kept, numbers, product
from linattn_edu.kernels.gluon.gdn_intra import store_matrix
from linattn_edu.kernels.gluon.gdn_solve import (
    cancel,
    inverse,
    invert_blocks,
    join_blocks,
    nothing,
)
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, ROWS
from linattn_edu.kernels.gluon.names import async_read, barrier, record, reinterpret
from linattn_edu.kernels.gluon.support import ALLOCATE, attempt
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.tiles import LOG2E, chunk_of
from linattn_edu.packing import Packing

PROMISED = gl.constexpr(110.0)  # what routes.by_kind.kda_halved leaves where no row is far
# 64 channels of a chunk, and the same numbers as [4, 16, 64]: a warp has a block of 16 tokens, a
# thread two channels of it
TILE = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
CUBE = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
BLOCKS = gl.constexpr(gl.SliceLayout(1, CUBE))  # a number for each channel of a block
CHANNELS = gl.constexpr(gl.SliceLayout(0, BLOCKS))


@record
class Out:
    """Where the gated rows go, and gc."""

    gc_ptr: object
    kd_ptr: object
    kg_ptr: object
    qg_ptr: object
    stride: object  # from token to token
    n_t: object


@gluon.jit
def two_tiles(dtype: gl.constexpr, tile: gl.constexpr):
    """Apart: between stores to one allocation the compiler puts a barrier."""
    return (
        gl.allocate_shared_memory(dtype, [64, 64], tile),
        gl.allocate_shared_memory(dtype, [64, 64], tile),
    )


@gluon.jit
def in_cube(x_s):
    """A tile [64, 64] in shared memory as [4, 16, 64] in fp32."""
    x = gl.reshape(x_s.load(TILE), [4, 16, 64])
    return gl.convert_layout(x, CUBE, assert_trivial=True).to(gl.float32)


@gluon.jit
def in_tile(x, dtype: gl.constexpr):
    """[4, 16, 64] as [64, 64]."""
    x = gl.reshape(x.to(dtype), [64, 64])
    return gl.convert_layout(x, TILE, assert_trivial=True)


@gluon.jit
def read_tile(x_ptr, x_s, stride, n_t):
    """Begin to copy x [64, 64]; rows from n_t on are 0."""
    size: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout(
        [1, size], [size // 2, 64 // size], [gl.num_warps(), 1], [1, 0]
    )
    o_t = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    o_k = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    async_read(x_s, x_ptr + o_t * stride + o_k, mask=o_t < n_t)


@gluon.jit
def read_rows(q_ptr, k_ptr, x_s, stride, n_t, N: gl.constexpr):
    """Begin to copy q and k, 64 channels of them in turns."""
    for c in gl.static_range(N):
        read_tile(k_ptr + 64 * c, x_s.index(2 * c + 1), stride, n_t)
        read_tile(q_ptr + 64 * c, x_s.index(2 * c), stride, n_t)
    async_copy.commit_group()


@gluon.jit
def write_tile(x_ptr, x, out):
    """Rows up to n_t of x [4, 16, 64]."""
    o_t = gl.arange(0, 64, gl.SliceLayout(1, TILE))[:, None]
    o_k = gl.arange(0, 64, gl.SliceLayout(0, TILE))[None, :]
    x = in_tile(x, x_ptr.dtype.element_ty)
    gl.store(x_ptr + o_t * out.stride + o_k, x, mask=o_t < out.n_t)


@gluon.jit
def before(sums_s, b: gl.constexpr):
    """The gate of all blocks before the b-th, from those of each."""
    b_x = gl.full([64], 0.0, gl.float32, CHANNELS)
    for c in gl.static_range(b):
        b_x += sums_s.slice(64 * c, 64).load(CHANNELS)
    return b_x


@gluon.jit
def row_of(x, i, at: gl.constexpr):
    """The row `at` of each block, [4, 64]."""
    return gl.sum(gl.where(i == at, x, nothing()), 1)


@gluon.jit
def erased(b_k, erase_s):
    """What reads the state: keys, times their erase gates."""
    if erase_s is None:
        return b_k
    else:
        return b_k * in_cube(erase_s)


@gluon.jit
def gate_rows(q_s, k_s, given_s, g_s, erase_s, sums_s, firsts_s, out, c):
    """gc and the gated rows of 64 channels, to memory; the readers' factors in the place of q, k.

    Returns k, and gc within each block, before it and from its first token to its last.
    """
    dtype: gl.constexpr = k_s.dtype
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, CUBE)))[None, :, None]
    o_b = gl.arange(0, 4, gl.SliceLayout(1, BLOCKS))[:, None]
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    b_g = in_cube(given_s) * LOG2E
    b_g = gl.associative_scan(gl.where(b_g < -150.0, -150.0, b_g), 1, add)
    b_first, b_sum = row_of(b_g, i, 0), row_of(b_g, i, 15)
    if given_s.dtype != gl.float32:
        barrier()  # two numbers lie where one is stored
    g_s.store(in_tile(b_g, gl.float32))
    sums_s.reshape([4, 64]).store(b_sum)
    firsts_s.reshape([4, 64]).store(b_first)
    barrier()
    b_before = gl.full([4, 64], 0.0, gl.float32, BLOCKS)
    for b in gl.static_range(3):
        b_x = sums_s.slice(64 * b, 64).load(CHANNELS)[None, :]
        b_before += gl.where(o_b > b, b_x, 0.0)
    b_gc = b_before[:, None, :] + b_g
    write_tile(out.gc_ptr + c * 64, b_gc, out)
    b_e = gl.exp2(b_gc)
    # eq:kda-qg   qg = 2^gc * Q
    write_tile(out.qg_ptr + c * 64, b_e * in_cube(q_s), out)
    b_k = in_cube(k_s)
    # eq:kda-kd   kd = 2^gc * K
    write_tile(out.kd_ptr + c * 64, b_e * erased(b_k, erase_s), out)
    # eq:kda-kg   kg = 2^(gc_last - gc) * K
    b_e = gl.exp2(before(sums_s, 4)[None, None, :] - b_gc)
    write_tile(out.kg_ptr + c * 64, b_e * b_k, out)
    # read again: held, they would be too many
    b_e = gl.exp2(b_g - b_first[:, None, :])
    q_s.store(in_tile(b_e * in_cube(q_s), dtype))
    k_s.store(in_tile(b_e * erased(b_k, erase_s), dtype))
    return b_k, b_g, b_before, b_sum - b_first


@gluon.jit
def of_block(x_s, b: gl.constexpr):
    """A product's first operand: the rows of block b, 0 beside them."""
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    own = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] // 16 == b
    return kept(x_s.load(layout), own)


@gluon.jit
def add_scores(b_P, b_L, q_s, k_s, F_s, b_k, b_g, b_before, sums_s, firsts_s, MOST: gl.constexpr):
    """b_P and b_L, and what 64 channels add to them.

    The factor 2^(gc_i - gc_j) is 2^(gc_i - gc_a) 2^(gc_a - gc_j): each block of rows has its first
    as the anchor a, and the columns' factors are made anew for each. MOST: of its exponent, where a
    row beyond is far, or behind the block, so that 0 times it is 0.
    """
    PLACES: gl.constexpr = len(F_s)
    for first in gl.static_range(0, 4, PLACES):
        for i in gl.static_range(PLACES):
            b_a = before(sums_s, first + i)
            b_a += firsts_s.slice(64 * (first + i), 64).load(CHANNELS)
            b_x = (b_a[None, :] - b_before)[:, None, :] - b_g
            F_s[i].store(in_tile(gl.exp2(gl.minimum(b_x, MOST)) * b_k, q_s.dtype))
        fence_async_shared()
        barrier()
        for i in gl.static_range(PLACES):
            F = F_s[i].permute((1, 0))
            # eq:kda-scores   P_ij = sum_d q_id k_jd 2^(gc_id - gc_jd), i >= j
            b_P = product(of_block(q_s, first + i), F, b_P)
            # eq:kda-kk   L_ij = beta_i sum_d k_id k_jd 2^(gc_id - gc_jd), i > j
            b_L = product(of_block(k_s, first + i), F, b_L)
        b_P, b_L = warpgroup_mma_wait(0, [b_P, b_L])
        barrier()  # no warp reads F any more
    return b_P, b_L


@gluon.jit
def faded(b_g, i, s: gl.constexpr):
    """2^-|gc - gc_a| of each token, whose anchor a begins the second of two blocks of 2^s."""
    b_a = b_g
    for p in gl.static_range(8 >> s):
        b_a = gl.where(i >> (s + 1) == p, row_of(b_g, i, (2 * p + 1) << s)[:, None, :], b_a)
    return gl.exp2(-gl.abs(b_g - b_a))


@gluon.jit
def leave_squares(x_s, squares_s, N: gl.constexpr):
    """The squared length of each key: four threads a row, or threads would meet for each row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    b_x = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, layout))
    for c in range(N):
        b_k = x_s.index(2 * c + 1).load(layout).to(gl.float32)
        b_x += gl.sum(b_k * b_k, 1)
    squares_s.store(b_x)


@gluon.jit
def halve_far_rows(b_P, b_L, x_s, F_s, g_s, e_s, far_s, own_s, squares_s,
                   N: gl.constexpr):  # fmt: skip
    """b_P and b_L, whose rows far from their block's first are right on the diagonal's blocks too:
    halved again and again, with no exponent above 0.  x_s: q and k, in turns.
    """
    o_i = gl.arange(0, 64, ROWS)[:, None]
    o_j = gl.arange(0, 64, ALONG)[None, :]
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, CUBE)))[None, :, None]
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    b_far = gl.full([4, 16], 0.0, gl.float32, gl.SliceLayout(2, CUBE))
    b_own = b_far
    for c in range(N):
        b_g = in_cube(g_s.index(c))
        b_x = b_g - row_of(b_g, i, 0)[:, None, :]
        b_far = gl.minimum(b_far, gl.min(b_x, 2))
        b_own += gl.sum(in_cube(x_s.index(2 * c)) * in_cube(x_s.index(2 * c + 1)), 2)
    far_s.reshape([4, 16]).store(b_far)
    own_s.reshape([4, 16]).store(b_own)
    if e_s is None:
        leave_squares(x_s, squares_s, N)
    barrier()
    far = (far_s.load(ROWS)[:, None] < -NEAR) & (o_i // 16 == o_j // 16)
    own = gl.where(o_i == o_j, own_s.load(ROWS)[:, None], 0.0)
    b_P = gl.where(far, own, b_P)
    own = gl.where(o_i == o_j, squares_s.load(ROWS)[:, None], 0.0)
    b_L = gl.where(far, own, b_L)
    for s in gl.static_range(4):
        for c in range(N):
            b_E = faded(in_cube(g_s.index(c)), i, s)
            b_q, b_k = in_cube(x_s.index(2 * c)), in_cube(x_s.index(2 * c + 1))
            # the second block reads, the first wrote
            if e_s is not None:
                b_k = gl.where((i >> s) & 1 == 1, b_k * in_cube(e_s.index(c)), b_k)
            F_s[0].store(in_tile(b_q * b_E, x_s.dtype))
            F_s[1].store(in_tile(b_k * b_E, x_s.dtype))
            fence_async_shared()
            barrier()
            m = far & (((o_i ^ o_j) >> s) == 1)  # of one pair; above the diagonal nothing is read
            b_x = product(F_s[0], F_s[1].permute((1, 0)), zero, False)
            b_P += gl.where(m, warpgroup_mma_wait(0, [b_x]), 0.0)
            b_x = product(F_s[1], F_s[1].permute((1, 0)), zero, False)
            b_L += gl.where(m, warpgroup_mma_wait(0, [b_x]), 0.0)
            barrier()
    return b_P, b_L


@gluon.jit(do_not_specialize=["T"])
def kda_prepare_gluon_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, HV, K] natural log
    beta_ptr,  # [B, T, HV], or None
    erase_ptr,  # [B, T, HV, K] in the place of beta, or None
    gc_ptr,  # [B, T, HV, K] out: log2, cumulative within a chunk
    P_ptr, A_ptr,  # [B, T, HV, BT] out
    kd_ptr, kg_ptr, qg_ptr,  # [B, T, HV, K] out
    cancels_ptr,  # of cancels_kernel, or None
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BT: gl.constexpr,
    NEAR_ALL: gl.constexpr,  # a promise: no row is far
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.fused.kda_fwd.kda_gate_prepare.
    """
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    N: gl.constexpr = K // 64
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, 64], dtype)
    rows: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    i_h, i_c, first, n_t = chunk_of(gl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i, i_k = first * HV + i_h, (first * H + i_h // (HV // H)) * K
    x_s = gl.allocate_shared_memory(dtype, [2 * N, BT, 64], tile)
    F_s = two_tiles(dtype, tile)
    if erase_ptr is None:  # else a multiprocessor would not hold two programs
        F_s += two_tiles(dtype, tile)
    g_s = gl.allocate_shared_memory(gl.float32, [N, BT, 64], rows)
    size: gl.constexpr = 32 // g_ptr.dtype.element_ty.primitive_bitwidth
    given_s = reinterpret(g_s, g_ptr.dtype.element_ty, [size * N, BT, 64], rows)
    e_s = None
    if erase_ptr is not None:
        e_s = gl.allocate_shared_memory(dtype, [N, BT, 64], tile)
    for c in gl.static_range(N):
        read_tile(g_ptr + i * K + 64 * c, given_s.index(size * c), HV * K, n_t)
        if erase_ptr is not None:
            read_tile(erase_ptr + i * K + 64 * c, e_s.index(c), HV * K, n_t)
    read_rows(q_ptr + i_k, k_ptr + i_k, x_s, H * K, n_t, N)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_t = gl.arange(0, BT, line)
    sums_s, firsts_s, zero_s, beta_s = numbers([256]), numbers([256]), numbers([BT]), numbers([BT])
    n_s, w_s, u_s = numbers([BT]), numbers([BT]), numbers([BT])
    D_s = gl.allocate_shared_memory(gl.float32, [4, 16, 16], cube)
    b_beta = gl.where(o_t < n_t, 1.0, 0.0)
    if erase_ptr is None:
        b_beta = gl.load(beta_ptr + i + o_t * HV, mask=o_t < n_t, other=0.0).to(gl.float32)
    beta_s.store(b_beta)
    zero_s.store(gl.full([BT], 0.0, gl.float32, line))
    out = Out(gc_ptr + i * K, kd_ptr + i * K, kg_ptr + i * K, qg_ptr + i * K, HV * K, n_t)
    b_P = gl.full([BT, BT], 0.0, gl.float32, MMA)
    b_L, b_fade = b_P, gl.full([4, 64], 0.0, gl.float32, BLOCKS)
    async_copy.wait_group(0)
    barrier()
    if erase_ptr is not None:
        leave_squares(x_s, u_s, N)
    for c in range(N):  # not unrolled: all addresses would be held at once
        q_s, k_s = x_s.index(2 * c), x_s.index(2 * c + 1)
        erase_s = None if erase_ptr is None else e_s.index(c)
        b_k, b_g, b_before, b_x = gate_rows(
            q_s, k_s, given_s.index(size * c), g_s.index(c), erase_s, sums_s, firsts_s, out, c
        )  # fmt: skip
        b_fade = gl.minimum(b_fade, b_x)
        b_P, b_L = add_scores(
            b_P, b_L, q_s, k_s, F_s, b_k, b_g, b_before, sums_s, firsts_s,
            PROMISED if NEAR_ALL else NEAR,
        )  # fmt: skip
    if not NEAR_ALL:  # noqa: SIM102  (one is known when it is compiled)
        if gl.min(gl.min(b_fade, 1), 0) < -NEAR:
            barrier()
            read_rows(q_ptr + i_k, k_ptr + i_k, x_s, H * K, n_t, N)
            async_copy.wait_group(0)
            barrier()
            b_P, b_L = halve_far_rows(b_P, b_L, x_s, F_s, g_s, e_s, n_s, w_s, u_s, N)
    if erase_ptr is not None:  # the diagonal says how long keys are
        o_i = gl.arange(0, BT, ROWS)[:, None]
        o_j = gl.arange(0, BT, ALONG)[None, :]
        b_L = gl.where(o_i == o_j, u_s.load(ROWS)[:, None], b_L)
    barrier()
    L_s = reinterpret(F_s[0], gl.float16, [BT, 64], tile)
    X_s = reinterpret(F_s[1], gl.float16, [BT, 64], tile)
    N_s = reinterpret(x_s, gl.float16, [2 * N, BT, 64], tile).index(0)
    P_s, A_s = x_s.index(1), F_s[1]
    invert_blocks(b_L, beta_s, n_s, w_s, u_s, D_s, L_s, X_s, 0)
    b_A, G = join_blocks(b_P, zero_s, P_s, L_s, X_s, N_s, 0)
    # eq:kda-inverse   A = (I + L)^-1
    b_A = inverse(b_A, G, n_s, w_s, False).to(dtype)
    barrier()
    A_s.store(b_A)
    if cancels_ptr is not None:
        fence_async_shared()
    barrier()
    store_matrix(P_ptr + i * BT, P_s, HV * BT, n_t, BT)
    store_matrix(A_ptr + i * BT, A_s, HV * BT, n_t, BT)
    if cancels_ptr is not None:
        i_nh = sequence_of_chunk(i_c, chunks_ptr, T, BT) * HV + i_h
        cancel(cancels_ptr, i_nh, P_s, A_s, beta_s, n_s, w_s, False, HV // H)


OPTIONS = {"num_warps": 4, "maxnreg": 255, **ALLOCATE}


@attempt
def kda_prepare_gluon(
    given: tuple[Tensor | None, ...], out: tuple[Tensor | None, ...], near: bool,
    packing: Packing | None,
) -> None:  # fmt: skip
    """Launch kda_prepare_gluon_kernel; given: its q, k, g, beta and erase; out: what it writes;
    near: a promise that no row is far.
    """
    k, HV = given[1], given[2].shape[2]
    T, H, K = k.shape[1:]
    NT, *chunks = chunk_args(k, CHUNK, packing)
    kda_prepare_gluon_kernel[(NT * HV,)](*given, *out, *chunks, T, H, HV, K, CHUNK, near, **OPTIONS)
