"""A kernel in Gluon of one idea: tiles come in through a ring, are doubled, and leave."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from linattn_edu.kernels.gluon.blocks import bar_pairs, descriptor, ring
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier


@gluon.jit
def load(x_desc, xs, full, empty, N, BYTES: gl.constexpr):
    """The warp that loads."""
    for n in range(N):
        i = n % 2
        mbarrier.wait(empty.index(i), (n // 2 & 1) ^ 1)
        mbarrier.expect(full.index(i), BYTES)
        async_load(x_desc, [n * 64, 0], full.index(i), xs.index(i))


@gluon.jit
def double(y_desc, xs, out, full, empty, N):
    """The warps that compute."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    for n in range(N):
        i = n % 2
        mbarrier.wait(full.index(i), n // 2 & 1)
        b_y = xs.index(i).load(layout) * 2
        tma.store_wait(0)
        barrier()  # all have read, and what was written before has left
        mbarrier.arrive(empty.index(i), count=1)
        out.index(0).store(b_y)
        fence_async_shared()
        barrier()  # all have written
        async_store(y_desc, [n * 64, 0], out.index(0))
    tma.store_wait(0)


@gluon.jit
def double_gluon_kernel(x_desc, y_desc, N, BYTES: gl.constexpr):
    """y = 2 x, N tiles of [64, 64]."""
    xs, out = ring(x_desc, 2), ring(y_desc, 1)
    full, empty = bar_pairs(2, 1, 1)
    fence_async_shared()
    gl.warp_specialize([
        (double, (y_desc, xs, out, full, empty, N)), (load, (x_desc, xs, full, empty, N, BYTES)),
    ], [1], [24])  # fmt: skip


def double_gluon(x: torch.Tensor) -> torch.Tensor:
    """2 x of x [1, T, 1, 64]."""
    y = torch.empty_like(x)
    N = x.shape[1] // 64
    double_gluon_kernel[(1,)](descriptor(x, 64), descriptor(y, 64), N, 64 * 64 * 2, num_warps=4)
    return y
