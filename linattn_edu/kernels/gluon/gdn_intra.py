"""intra_chunk of Gated DeltaNet's fused forward pass in Gluon, for Hopper.

Four warps work on one chunk of one value head; the inverse is that of gdn_solve.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from linattn_edu.kernels.gluon.blocks import (
    CHUNK,
    bar,
    descriptor,
    gates_of_item,
    half,
    item_at,
    numbers,
    ring,
)
from linattn_edu.kernels.gluon.gdn_solve import (
    inverse,
    invert_blocks,
    join_blocks,
    resolvent,
    scores,
)
from linattn_edu.kernels.gluon.names import (
    async_load,
    async_read,
    async_store,
    barrier,
    record,
    reinterpret,
)
from linattn_edu.kernels.gluon.support import attempt
from linattn_edu.kernels.routes import by_load, kind_of, load_of
from linattn_edu.kernels.rows import chunk_args, whole
from linattn_edu.kernels.tiles import chunk_of
from linattn_edu.packing import Packing


@gluon.jit
def load_keys(x_ptr, x_s, stride, n_t, K: gl.constexpr, BT: gl.constexpr):
    """Begin to copy x [BT, K]; rows from n_t on are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, BT, gl.SliceLayout(1, layout))[:, None]
    o_k = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    async_read(x_s, x_ptr + o_t * stride + o_k, mask=o_t < n_t)


@gluon.jit
def store_matrix(x_ptr, x_s, stride, n_t, BT: gl.constexpr):
    """Rows up to n_t of x [BT, BT]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, BT, gl.SliceLayout(1, layout))[:, None]
    o_j = gl.arange(0, BT, gl.SliceLayout(0, layout))[None, :]
    gl.store(x_ptr + o_t * stride + o_j, x_s.load(layout), mask=o_t < n_t)


@gluon.jit(do_not_specialize=["T"])
def intra_chunk_gluon_kernel(
    q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, R_ptr, A_ptr, cu_ptr, chunks_ptr, T,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BT: gl.constexpr, GATED: gl.constexpr,
    NEAR: gl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Arguments of the two kernels of kernels/fused/gdn_intra.py. With NEAR the chunks are so many
    at the end of each sequence in chunks_ptr [n], of whole chunks.
    Reference: linattn_edu.reference.fused.gdn_intra.intra_chunk.
    """
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, K], dtype)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BT], dtype)
    if NEAR > 0:
        i_h, i_c = gl.program_id(0) % HV, gl.program_id(0) // HV
        first = (gl.load(chunks_ptr + i_c // NEAR) + 1) * T - (NEAR - i_c % NEAR) * BT
        n_t = BT
    else:
        i_h, _, first, n_t = chunk_of(gl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i = first * HV + i_h
    i_k = (first * H + i_h // (HV // H)) * K
    q_s = gl.allocate_shared_memory(dtype, [BT, K], keys)
    k_s = gl.allocate_shared_memory(dtype, [BT, K], keys)
    load_keys(k_ptr + i_k, k_s, H * K, n_t, K, BT)
    load_keys(q_ptr + i_k, q_s, H * K, n_t, K, BT)
    async_copy.commit_group()
    o_t = gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    b_gc = gl.load(gc_ptr + i + gl.minimum(o_t, n_t - 1) * HV)
    b_beta = gl.load(beta_ptr + i + o_t * HV, mask=o_t < n_t, other=0.0)
    gc_s, beta_s = numbers([BT]), numbers([BT])
    n_s, w_s, u_s = numbers([BT]), numbers([BT]), numbers([BT])
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    D_s = gl.allocate_shared_memory(gl.float32, [4, 16, 16], cube)
    L_s = gl.allocate_shared_memory(gl.float16, [BT, BT], tile)
    X_s = gl.allocate_shared_memory(gl.float16, [BT, BT], tile)
    P_s = half(q_s, 0)
    N_s = reinterpret(k_s, gl.float16, [K // 64, BT, BT], tile).index(0)
    gc_s.store(b_gc)
    beta_s.store(b_beta.to(gl.float32))
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    b_S, b_P = scores(q_s, k_s)
    invert_blocks(b_S, beta_s, n_s, w_s, u_s, D_s, L_s, X_s, 0)
    b_A, G = join_blocks(b_P, gc_s, P_s, L_s, X_s, N_s, 0)
    R_s = reinterpret(L_s, dtype, [BT, BT], tile)
    R_s.store(resolvent(b_A, G, w_s, u_s).to(dtype))
    if A_ptr is not None:
        A_s = reinterpret(X_s, dtype, [BT, BT], tile)
        b_A = inverse(b_A, G, n_s, w_s, GATED).to(dtype)
        barrier()
        A_s.store(b_A)
    barrier()
    store_matrix(P_ptr + i * BT, P_s, HV * BT, n_t, BT)
    store_matrix(R_ptr + i * BT, R_s, HV * BT, n_t, BT)
    if A_ptr is not None:
        store_matrix(A_ptr + i * BT, A_s, HV * BT, n_t, BT)


@record
class Memory:
    """Shared memory of intra_chunk_ring_gluon_kernel, and its mbarriers."""

    qs: object
    ks: object
    Ps: object
    inner: object  # three of [64, 64] in fp16, see gdn_solve; R and A leave from the first two
    D_s: object
    gates: object  # two places of gc and beta
    norms: object  # apart, so that no warp waits between their stores
    full: object  # q and k have come
    gates_full: object
    empty: object  # q and k have been read, and what was made before has left


@gluon.jit
def load_items(q_desc, k_desc, gc_ptr, beta_ptr, m, N, H: gl.constexpr, G: gl.constexpr,
               K: gl.constexpr, BT: gl.constexpr):  # fmt: skip
    """The warp that loads: q and k of a chunk and head, gc and beta of each of its value heads."""
    o_t = gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    b_gc, b_beta = gates_of_item(gc_ptr, beta_ptr, 0, o_t, H * G, H, G, BT)
    for n in range(N):
        mbarrier.wait(m.empty, (n & 1) ^ 1)
        if n % G == 0:
            i_c, i_h, _ = item_at(n, H, G)
            mbarrier.expect(m.full, 2 * BT * K * 2)
            async_load(k_desc, [i_c * BT, i_h * K], m.full, m.ks.index(0))
            async_load(q_desc, [i_c * BT, i_h * K], m.full, m.qs.index(0))
        m.gates.index(n % 2 * 2).store(b_gc)
        m.gates.index(n % 2 * 2 + 1).store(b_beta)
        # those of the next one are on their way meanwhile
        b_gc, b_beta = gates_of_item(
            gc_ptr, beta_ptr, gl.minimum(n + 1, N - 1), o_t, H * G, H, G, BT
        )
        barrier()
        mbarrier.arrive(m.gates_full, count=1)


@gluon.jit
def compute_items(P_desc, R_desc, A_desc, m, N, H: gl.constexpr, G: gl.constexpr,
                  BT: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """The warps that compute: intra_chunk_gluon_kernel's sums."""
    dtype: gl.constexpr = m.Ps.dtype
    tile: gl.constexpr = m.Ps.layout
    n_s, w_s, u_s = m.norms
    for n in range(N):
        # 0, and the compiler cannot know: else it makes all masks and addresses before the loop,
        # and they hold every register
        z = n >> 30
        q_s, k_s, P_s = m.qs.index(z), m.ks.index(z), m.Ps.index(z)
        L_s, X_s, N_s = m.inner.index(z), m.inner.index(1 + z), m.inner.index(2 + z)
        R_s = reinterpret(L_s, dtype, [BT, BT], tile)
        A_s = reinterpret(X_s, dtype, [BT, BT], tile)
        i_c, _, i_hv = item_at(n, H, G)
        gc_s, beta_s = m.gates.index(n % 2 * 2), m.gates.index(n % 2 * 2 + 1)
        mbarrier.wait(m.gates_full, n & 1)
        mbarrier.wait(m.full, n // G & 1)
        b_S, b_P = scores(q_s, k_s)
        tma.store_wait(0)
        barrier()  # no warp reads q and k any more, nor the copies what was made before
        mbarrier.arrive(m.empty, count=1)
        invert_blocks(b_S, beta_s, n_s, w_s, u_s, m.D_s, L_s, X_s, z)
        b_A, b_G = join_blocks(b_P, gc_s, P_s, L_s, X_s, N_s, z)
        R_s.store(resolvent(b_A, b_G, w_s, u_s).to(dtype))
        if A_desc is not None:
            b_A = inverse(b_A, b_G, n_s, w_s, GATED).to(dtype)
            barrier()
            A_s.store(b_A)
        fence_async_shared()
        barrier()
        at = [i_c * BT, i_hv * BT]
        async_store(P_desc, at, P_s)
        async_store(R_desc, at, R_s)
        if A_desc is not None:
            async_store(A_desc, at, A_s)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["NT"])
def intra_chunk_ring_gluon_kernel(
    q_desc, k_desc, P_desc, R_desc, A_desc, beta_ptr, gc_ptr,
    go_ptr, done_ptr,  # numbers: nothing is done if the one is negative, or the other not; or None
    NT,  # chunks of all sequences
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BT: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """intra_chunk_gluon_kernel for whole chunks: the next one is copied while one is worked on.

    One program: every so many-th chunk of a q/k head, with its value heads.  Any grid.

    Reference: linattn_edu.reference.fused.gdn_intra.intra_chunk.

    mbarriers, item by item::

        empty       computing warps, when the scores are made -> loading warp
        full        the copies of q and k, once a chunk and q/k head -> computing warps
        gates_full  loading warp, once an item -> computing warps
    """
    G: gl.constexpr = HV // H
    if go_ptr is not None:
        NT = gl.where(gl.load(go_ptr) < 0, 0, NT)
    if done_ptr is not None:
        NT = gl.where(gl.load(done_ptr) < 0, NT, 0)
    N = gl.maximum(gl.cdiv(NT * H - gl.program_id(0), gl.num_programs(0)), 0) * G
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    m = Memory(
        ring(q_desc, 1), ring(k_desc, 1), ring(P_desc, 1),
        gl.allocate_shared_memory(gl.float16, [3, BT, BT], P_desc.layout),
        gl.allocate_shared_memory(gl.float32, [4, 16, 16], cube), numbers([4, BT]),
        (numbers([BT]), numbers([BT]), numbers([BT])), bar(1), bar(1), bar(1),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (compute_items, (P_desc, R_desc, A_desc, m, N, H, G, BT, GATED)),
        (load_items, (q_desc, k_desc, gc_ptr, beta_ptr, m, N, H, G, K, BT)),
    ], [1], [24])  # fmt: skip


OPTIONS = {"num_warps": 4, "maxnreg": 128}
# of intra_chunk_ring_gluon_kernel on a multiprocessor -> options. Of its registers the loading warp
# keeps 24 a thread, the others take the rest
OPTIONS_CHUNKS = {2: {"num_warps": 4, "maxnreg": 120}, 3: {"num_warps": 4, "maxnreg": 80}}


@attempt
def intra_gluon(
    given: tuple[Tensor | None, ...], gated: bool, packing: Packing | None,
    go: tuple[Tensor | None, Tensor | None] = (None, None), rows: Tensor | None = None,
    near: int = 0,
) -> None:  # fmt: skip
    """Launch the kernel that suits the sequences: the same bits. given: the tensors of the first,
    whose P, R and, if there is one, A it writes. go: go and done of the one with the ring. rows,
    near: only so many chunks at the ends of these sequences of whole chunks.
    """
    q, k, beta, gc, P, R, A = given
    T, H, K = k.shape[1:]
    HV = beta.shape[-1]
    NT, *chunks = (len(rows) * near, None, rows) if near else chunk_args(k, CHUNK, packing)
    load = load_of(kind_of(k, HV, 0, CHUNK, packing), k, packing)
    programs = by_load.intra_ring(load, NT, not near and whole(k, CHUNK, packing)).takes
    if programs:
        out = (descriptor(x, CHUNK) for x in (P, R, A))
        intra_chunk_ring_gluon_kernel[(programs * load.processors,)](
            descriptor(q, K), descriptor(k, K), *out, beta, gc, *go, NT, H, HV, K, CHUNK, gated,
            **OPTIONS_CHUNKS[programs],
        )  # fmt: skip
        return
    intra_chunk_gluon_kernel[(NT * HV,)](
        *given, *chunks, T, H, HV, K, CHUNK, gated, near, **OPTIONS
    )
