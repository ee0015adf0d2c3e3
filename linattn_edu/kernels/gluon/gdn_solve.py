"""(I + L)^-1 of a chunk of 64 tokens in Gluon, for Hopper, by four warps.

Each warp inverts a block of 16 tokens by substitution, a lane for each column; products on the
tensor cores join the blocks. Their operands are fp16: as many bits as tf32 has, and a power of two
for each token keeps them in range. Equations as in kernels/delta/solve.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait
from triton.runtime.jit import constexpr_function

from linattn_edu.kernels.fused.cancel import INVERSE, SCORES
from linattn_edu.kernels.gluon.blocks import operand, product
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, ROWS, VECTOR
from linattn_edu.kernels.gluon.names import barrier

# a product's result [64, 64], and the same numbers as [4, 16, 4, 16]: blocks of 16 rows, which are
# those of a warp, and of 16 columns
BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]],
        lane_bases=[[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, 16, 4, 16],
    )
)
# [block, row, column]: a lane has a column
COLUMNS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 16, 16],
    )
)
# [block, 1, column] of a row that every lane has
ROW = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
        lane_bases=[[0, 0, 0]] * 5,
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 1, 16],
    )
)
# [block, column, block, row] of a transposed matrix: a lane has a column of half the blocks
TRANSPOSED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0], [0, 8, 0, 0], [0, 0, 2, 0]],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, 16, 4, 16],
    )
)


@constexpr_function
def along(layout, *axes):
    """Of a tensor that varies along these axes of one in `layout`."""
    for axis in reversed(range(len(layout.shape))):
        if axis not in axes:
            layout = gl.SliceLayout(axis, layout)
    return layout


@gluon.jit
def in_blocks(x):
    """[4, 16, 4, 16] of a product's result: every number stays in its thread."""
    return gl.convert_layout(gl.reshape(x, [4, 16, 4, 16]), BLOCKS, assert_trivial=True)


@gluon.jit
def nothing():
    """-0: adding it changes nothing, and is no instruction, as adding 0 would be."""
    return gl.to_tensor(-2147483648).to(gl.float32, bitcast=True)


@gluon.jit
def blocks_beside(z):
    """Of BLOCKS, [4, 1, 4, 1]: a number's block of columns less its block of rows."""
    own = gl.arange(0, 4, along(BLOCKS, 0))[:, None, None, None] + z
    return gl.arange(0, 4, along(BLOCKS, 2))[None, None, :, None] - own


@gluon.jit
def diagonal_blocks(b_S, z):
    """[4, 16, 16] of a product's result."""
    return gl.sum(in_blocks(b_S) * gl.where(blocks_beside(z) == 0, 1.0, 0.0), 2)


@gluon.jit
def leave_norms(b_D, beta_s, n_s, w_s, u_s, z):
    """n, the powers of two next to the lengths of 64 keys, from K K^T's diagonal; 1 / n; beta n.

    Half of the exponent: normal numbers, whatever the key; of no length, 2^-63.
    """
    layout: gl.constexpr = gl.SliceLayout(2, BLOCKS)
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None] + z
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    b_n = gl.sum(gl.where(i == j, b_D, nothing()), 2).to(gl.int32, bitcast=True)
    b_n = (((b_n >> 23) + 128) >> 1) << 23
    b_w = (254 << 23) - b_n
    b_n = b_n.to(gl.float32, bitcast=True)
    n_s.reshape([4, 16]).store(b_n)
    w_s.reshape([4, 16]).store(b_w.to(gl.float32, bitcast=True))
    u_s.reshape([4, 16]).store(b_n * beta_s.reshape([4, 16]).load(gl.SliceLayout(2, layout)))


@gluon.jit
def substitute(D_s, z):
    """(I + D)^-1 of four strictly lower-triangular blocks [16, 16], given as -D.

    A lane has a column; the numbers of D, which all lanes need, come from shared memory.
    """
    i = gl.arange(0, 16, along(COLUMNS, 1))[None, :, None]
    c = gl.arange(0, 16, along(COLUMNS, 2))[None, None, :] + z
    X = gl.where((i == 0) & (c == 0), 1.0, gl.full([4, 16, 16], 0.0, gl.float32, COLUMNS))
    for r in gl.static_range(1, 16):
        # eq:delta-substitution   x_r = e_r - sum_{j < r} L_rj x_j
        b_d = gl.reshape(D_s.slice(r, 1, dim=1).load(ROW), [4, 16])
        b_d = gl.convert_layout(b_d, gl.SliceLayout(2, COLUMNS), assert_trivial=True)
        b_x = gl.where(i == 0, gl.where(c == r, 1.0, 0.0), nothing()) + b_d[:, :, None] * X
        b_x = gl.sum(gl.where(i < r, b_x, nothing()), 1)
        X = gl.where(i == r, b_x[:, None, :], X)
    return X


@gluon.jit
def leave_inverses(X, n_s, w_s, X_s, z):
    """diag(n) X diag(1 / n) of four blocks on the diagonal of X_s, transposed; 0 beside them."""
    layout: gl.constexpr = gl.SliceLayout(2, TRANSPOSED)
    X *= n_s.reshape([4, 16]).load(gl.SliceLayout(2, COLUMNS))[:, :, None]
    X = gl.convert_layout(gl.permute(X, (0, 2, 1)), layout, assert_trivial=True)
    own = gl.arange(0, 4, along(TRANSPOSED, 0))[:, None, None, None] + z
    other = gl.arange(0, 4, along(TRANSPOSED, 2))[None, None, :, None]
    b_w = w_s.reshape([4, 16]).load(along(TRANSPOSED, 0, 1))[:, :, None, None]
    X = X[:, :, None, :] * gl.where(own == other, b_w, 0.0)
    X_s.store(gl.reshape(X.to(gl.float16), [64, 64]))


@gluon.jit
def leave_lower(b_S, w_s, u_s, L_s, z):
    """-diag(n) L diag(1 / n), of which the blocks on the diagonal are 0."""
    b_w = w_s.reshape([4, 16]).load(along(BLOCKS, 2, 3))[None, None, :, :]
    b_u = u_s.reshape([4, 16]).load(along(BLOCKS, 0, 1))[:, :, None, None]
    b_L = in_blocks(b_S) * b_w * gl.where(blocks_beside(z) < 0, -b_u, 0.0)
    last = gl.arange(0, 4, along(BLOCKS, 2))[None, None, :, None] == 3  # known in advance
    L_s.store(gl.reshape(gl.where(last, 0.0, b_L).to(gl.float16), [64, 64]))


@gluon.jit
def plus_identity(b_U, z):
    """I + U of a product's result."""
    i = gl.arange(0, 16, along(BLOCKS, 1))[None, :, None, None] + z
    j = gl.arange(0, 16, along(BLOCKS, 3))[None, None, None, :]
    b_I = gl.where(blocks_beside(z) == 0, gl.where(i == j, 1.0, nothing()), nothing())
    return gl.convert_layout(gl.reshape(in_blocks(b_U) + b_I, [64, 64]), MMA, assert_trivial=True)


@gluon.jit
def decays(gc_s, z):
    """G_ij = 2^(gc_i - gc_j) for i >= j, else 0."""
    infinite: gl.constexpr = float("inf")
    i = gl.arange(0, 16, along(BLOCKS, 1))[None, :, None, None] + z
    j = gl.arange(0, 16, along(BLOCKS, 3))[None, None, None, :]
    b_i = gc_s.reshape([4, 16]).load(along(BLOCKS, 0, 1))[:, :, None, None]
    b_j = gc_s.reshape([4, 16]).load(along(BLOCKS, 2, 3))[None, None, :, :]
    beside = blocks_beside(z)
    b_d = b_i - gl.where(beside > 0, infinite, b_j)
    b_d = gl.where((beside == 0) & (i < j), -infinite, b_d)
    return gl.convert_layout(gl.reshape(gl.exp2(b_d), [64, 64]), MMA, assert_trivial=True)


@gluon.jit
def pairs(q_s, k_s):
    """Begin Q K^T, in fp32 as MMA."""
    return product(q_s, k_s.permute((1, 0)), gl.full([64, 64], 0.0, gl.float32, MMA), False)


@gluon.jit
def scores(q_s, k_s):
    """K K^T and Q K^T, in fp32 as MMA."""
    return warpgroup_mma_wait(0, [pairs(k_s, k_s), pairs(q_s, k_s)])


@gluon.jit
def invert_blocks(b_S, beta_s, n_s, w_s, u_s, D_s, L_s, X_s, z):
    """The blocks of 16 on L's diagonal inverted in X_s, the others in L_s, for `join_blocks`.

    Four warps, all of them at once, as in what follows; nothing is allocated.

    b_S: K K^T of `scores`.  beta_s: [64] in fp32, 0 of tokens that are missing.
    n_s, w_s, u_s: [64] in fp32 out: powers of two n, 1 / n, and beta n.
    D_s: [4, 16, 16] in fp32, to work in.  L_s, X_s: [64, 64] in fp16, for products.
    z: 0, where a loop is around it a number of which the compiler does not know that it is.
    """
    # eq:delta-kkt   L = diag(beta) tril(K K^T, -1)
    b_D = diagonal_blocks(b_S, z)
    leave_norms(b_D, beta_s, n_s, w_s, u_s, z)
    b_beta = beta_s.reshape([4, 16]).load(gl.SliceLayout(2, gl.SliceLayout(2, BLOCKS)))
    D_s.store(b_D * -b_beta[:, :, None])
    leave_lower(b_S, w_s, u_s, L_s, z)
    leave_inverses(substitute(D_s, z), n_s, w_s, X_s, z)
    fence_async_shared()
    barrier()


@gluon.jit
def times_blocks(x, N_s, acc):
    """Begin acc + x N, where x has more than zeros in columns 0 to 48 and N in rows 16 to 64."""
    x = gl.permute(gl.reshape(x.to(gl.float16), [64, 2, 2, 16]), (0, 3, 2, 1))
    layout: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    first, last = gl.split(x)
    acc = product(gl.convert_layout(gl.split(first)[1], layout), N_s.slice(16, 16), acc)
    return product(gl.convert_layout(gl.split(last)[0], layout), N_s.slice(32, 16), acc)


@gluon.jit
def join_blocks(b_P, gc_s, P_s, L_s, X_s, N_s, z):
    """P to P_s.  Returns diag(n) A diag(1 / n) and G, [64, 64] in fp32 as MMA.

    b_P: Q K^T of `scores`.  gc_s: [64] in fp32 (log2), that of the last token where one is missing.
    P_s: [64, 64], for products; its writes have no fence yet.  N_s: [64, 64] in fp16, to work in.
    L_s, whose first 16 rows and last 16 columns are 0, and X_s can be overwritten after it.
    """
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    # eq:delta-merge   X_21 = -X_22 L_21 X_11: A = (I - N)^-1 X with N = -X L, and N^4 = 0
    X_t = X_s.permute((1, 0))
    b_N = product(X_t.slice(16, 16, dim=1), L_s.slice(16, 16), zero, False)
    b_N = product(X_t.slice(32, 32, dim=1), L_s.slice(32, 32), b_N)
    # eq:delta-intra   P = Q K^T * G
    G = decays(gc_s, z)
    P_s.store((b_P * G).to(P_s.dtype))
    b_N = warpgroup_mma_wait(0, [b_N])
    N_s.store(b_N.to(gl.float16))
    fence_async_shared()
    barrier()
    b_U = warpgroup_mma_wait(0, [times_blocks(b_N, N_s, b_N)])
    b_U = warpgroup_mma_wait(0, [times_blocks(b_U, N_s, b_N)])
    b_T = operand(plus_identity(b_U, z), gl.float16)
    return warpgroup_mma_wait(0, [product(b_T, X_t, zero, False)]), G


@gluon.jit
def resolvent(b_A, G, w_s, u_s):
    """R = (A * G) diag(beta) from what `join_blocks` returns."""
    # eq:delta-resolvent   R = (A * G) diag(beta)
    b_w = w_s.load(ROWS)[:, None]
    return b_A * G * b_w * u_s.load(ALONG)[None, :]


@gluon.jit
def inverse(b_A, G, n_s, w_s, GATED: gl.constexpr):
    """A, or with GATED A * G, from what `join_blocks` returns."""
    b_w = w_s.load(ROWS)[:, None]
    if GATED:
        b_A *= G  # the product with b_w is that of `resolvent`
    return b_A * b_w * n_s.load(ALONG)[None, :]


@gluon.jit
def cancel(
    cancels_ptr, i_nh, P_s, R_s, beta_s, rows_s, sums_s, WRITTEN: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """-1 to the G heads of q/k head i_nh // G of all, if the numbers of a chunk cancel.

    P_s: P.  R_s: R, or without WRITTEN what times diag(beta) is R; both for products.
    beta_s: [64] in fp32.  rows_s, sums_s: [64] in fp32, to work in.
    """
    b_beta = beta_s.load(ALONG)[None, :]
    b_R = R_s.load(MMA).to(gl.float32) * (1.0 if WRITTEN else b_beta)
    rows_s.store(gl.sum(b_R * b_R, 1))
    b_P = P_s.load(MMA).to(gl.float32)
    # eq:11-cancels   r = sum_j |P_j|^2 |R_j|^2 / |P R|^2
    b_r = gl.sum(b_P * b_P * rows_s.load(ALONG)[None, :], 1)
    b_PR = product(P_s, R_s, gl.full([64, 64], 0.0, gl.float32, MMA), False)
    b_PR = warpgroup_mma_wait(0, [b_PR]) * (1.0 if WRITTEN else b_beta)
    sums_s.store(b_r - SCORES * SCORES * gl.sum(b_PR * b_PR, 1))
    b_beta = beta_s.load(VECTOR)
    b_x = rows_s.load(VECTOR) - INVERSE * INVERSE * (b_beta * b_beta)
    few = (gl.sum(sums_s.load(VECTOR), 0) <= 0) & (gl.sum(b_x, 0) <= 0)
    if few == 0:
        for i in gl.static_range(G):
            gl.store(cancels_ptr + i_nh // G * G + i, -1)
