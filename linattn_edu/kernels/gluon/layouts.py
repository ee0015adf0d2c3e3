"""Where a product's numbers are, in four warps, and those that its rows or columns have."""

from triton.experimental.gluon import language as gl

MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
ALONG = gl.constexpr(gl.SliceLayout(0, MMA.value))
# two numbers a thread, in every warp the same
VECTOR = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])))
# with 128 columns
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WIDE_ROWS = gl.constexpr(gl.SliceLayout(1, WIDE.value))
WIDE_ALONG = gl.constexpr(gl.SliceLayout(0, WIDE.value))
