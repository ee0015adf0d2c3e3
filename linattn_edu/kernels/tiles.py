"""The few device functions all kernels share, and the rows of their tables."""

import math

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
TF32X3 = tl.constexpr("tf32x3")
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x.to(dtype), rounded to nearest even: the interpreter's own cast to bf16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def load_tile(x_ptr, o_row, o_col, stride, n_row, n_col):
    """x[o_row, o_col] of a row-major matrix; out-of-range lanes read 0."""
    mask = (o_row[:, None] < n_row) & (o_col[None, :] < n_col)
    return tl.load(x_ptr + o_row[:, None] * stride + o_col[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(x_ptr, b_x, o_row, o_col, stride, n_row, n_col):
    """x[o_row, o_col] = b_x, cast to x's dtype; out-of-range lanes are dropped."""
    mask = (o_row[:, None] < n_row) & (o_col[None, :] < n_col)
    b_x = cast(b_x, x_ptr.dtype.element_ty)
    tl.store(x_ptr + o_row[:, None] * stride + o_col[None, :], b_x, mask=mask)


@triton.jit
def load_row(x_ptr, o_row, stride, n_row):
    """x[o_row] of a strided vector in fp32; out-of-range lanes read 0."""
    return tl.load(x_ptr + o_row * stride, mask=o_row < n_row, other=0.0).to(tl.float32)


@triton.jit
def load_vector(x_ptr, o, n):
    """x[o] in fp32; out-of-range lanes read 0."""
    return tl.load(x_ptr + o, mask=o < n, other=0.0).to(tl.float32)


@triton.jit
def silu_derivative(x):
    """sigmoid(x) (1 + x sigmoid(-x)), from one exponential."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)  # of x and -x, the sigmoid of that above 0
    back = tl.where(x < 0, large, e * large)
    return tl.where(x < 0, e * large, large) * (1.0 + x * back)


@triton.jit
def load_gate(gc_ptr, o_t, stride, n_t):
    """gc[o_t] of one chunk; a missing token repeats the last one's, as if it did not decay."""
    return tl.load(gc_ptr + tl.minimum(o_t, n_t - 1) * stride)


@triton.jit
def gated(x, gate_ptr, o_row, o_col, stride, n_row, n_col):
    """x, in fp32, times the gate of each channel; without a gate x."""
    if gate_ptr is None:
        return x
    else:
        return x * load_tile(gate_ptr, o_row, o_col, stride, n_row, n_col).to(tl.float32)


@triton.jit
def weighted(x, b_beta, ROWS: tl.constexpr = True):
    """diag(beta) x, or x diag(beta) where beta is of columns; without beta x."""
    if b_beta is None:
        return x
    elif ROWS:
        return b_beta[:, None] * x
    else:
        return b_beta[None, :] * x


@triton.jit
def load_once(x_ptr, o):
    """The numbers at a vector of offsets o, each read twice.

    Of a vector of fewer numbers than a program has threads Triton makes a load for each layout in
    which it is used; those that feed no product are not loaded ahead, and a loop waits for them.
    Offsets are joined, not pointers: of those Triton 3.8 and 3.9 compile no product.
    """
    x, _ = tl.split(tl.load(x_ptr + tl.join(o, o)))
    return x


@triton.jit
def mask_if(m, condition):
    """m & condition, a scalar: in the interpreter of Triton 3.9 what `&` gives is no mask."""
    return tl.where(condition, m, False)


@triton.jit
def load_gates(gc_ptr, o_t, o_k, stride, n_t, K):
    """gc[o_t, o_k] of one chunk with a gate for each channel; a missing token as in `load_gate`."""
    o_t = tl.minimum(o_t, n_t - 1)
    return tl.load(gc_ptr + o_t[:, None] * stride + o_k[None, :], mask=o_k[None, :] < K, other=0.0)


@triton.jit
def dot(a, b, acc=None, precision: tl.constexpr = TF32X3):
    """a @ b (+ acc) in fp32; `precision` is that of fp32 operands.

    The interpreter's bf16 product is wrong, so there the operands go up to fp32, which is exact.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc=acc, input_precision=precision)


@triton.jit
def as_factor(x, dtype: tl.constexpr):
    """x in fp32, but rounded as a product in dtype reads it.

    A sum has x times v and x times S: where v and S cancel, both x must be the same.
    """
    return cast(x, dtype).to(tl.float32)


@triton.jit
def in_halves(x, dtype: tl.constexpr):
    """x in fp32 as two numbers of 16 bit: x rounded to dtype, and what that cuts off."""
    if INTERPRETED:
        b_high = cast(x, dtype)
    else:
        # two an instruction: what fp32 needs again the compiler would round one by one, far slower
        name: tl.constexpr = "bf16" if dtype == tl.bfloat16 else "f16"
        asm: tl.constexpr = "cvt.rn." + name + "x2.f32 $0, $2, $1;"
        b_high = tl.inline_asm_elementwise(asm, "=r,r,r", [x], tl.int16, is_pure=True, pack=2)
        b_high = b_high.to(dtype, bitcast=True)
    return b_high, cast(x - b_high.to(tl.float32), dtype)


@triton.jit
def joined(x, low):
    """x + low in fp32, where low may be None."""
    if low is None:
        return x.to(tl.float32)
    else:
        return x.to(tl.float32) + low.to(tl.float32)


@triton.jit
def store_halves(x_ptr, low_ptr, b_x, o_row, o_col, stride, n_row, n_col):
    """`store_tile`, and the low half where there is a place for it."""
    if low_ptr is not None:
        b_x, b_low = in_halves(b_x, x_ptr.dtype.element_ty)
        store_tile(low_ptr, b_low, o_row, o_col, stride, n_row, n_col)
    store_tile(x_ptr, b_x, o_row, o_col, stride, n_row, n_col)


@triton.jit
def load_halves(x_ptr, i, o_row, o_col, heads, n_row, n: tl.constexpr, FINE: tl.constexpr):
    """Row i of n numbers, and those of the same head after it; with FINE rows of n high halves and
    then n low ones, both. Without it twice the same: no product of halves reads the second.
    """
    if FINE:
        x_ptr += i * 2 * n
        b_x = load_tile(x_ptr, o_row, o_col, 2 * heads * n, n_row, n)
        return b_x, load_tile(x_ptr + n, o_row, o_col, 2 * heads * n, n_row, n)
    else:
        b_x = load_tile(x_ptr + i * n, o_row, o_col, heads * n, n_row, n)
        return b_x, b_x


@triton.jit
def store_rows(x_ptr, i, b_x, o_row, o_col, heads, n_row, n: tl.constexpr, FINE: tl.constexpr):
    """What `load_halves` loads."""
    if FINE:
        x_ptr += i * 2 * n
        store_halves(x_ptr, x_ptr + n, b_x, o_row, o_col, 2 * heads * n, n_row, n)
    else:
        store_tile(x_ptr + i * n, b_x, o_row, o_col, heads * n, n_row, n)


@triton.jit
def parted(x, FINE: tl.constexpr):
    """With FINE both halves of x in fp32; else x twice."""
    if FINE:
        return in_halves(x, tl.bfloat16)
    else:
        return x, x


@triton.jit
def dot_halves(a, a_low, b, b_low, acc=None):
    """(a + a_low) @ (b + b_low) + acc, where a low half may be None; without that of both."""
    if a_low is not None:
        acc = dot(a_low, b, acc)
    if b_low is not None:
        acc = dot(a, b_low, acc)
    return dot(a, b, acc)


@triton.jit
def dot_as(a, b, acc, precision: tl.constexpr):
    """`dot`, or with "halves" each operand of fp32 as two numbers of bf16, 16 bits together."""
    if precision == "halves":
        a_low, b_low = None, None
        if a.dtype == tl.float32:
            a, a_low = in_halves(a, tl.bfloat16)
        if b.dtype == tl.float32:
            b, b_low = in_halves(b, tl.bfloat16)
        return dot_halves(a, a_low, b, b_low, acc)
    else:
        return dot(a, b, acc, precision)


@triton.jit
def dot_right(a, a_low, x, acc, FINE: tl.constexpr):
    """a @ x + acc with x, in fp32, rounded to a's dtype; with FINE in two halves, and a_low's.

    The order of the sums is that of `dot_left`.
    """
    if FINE:
        b_high, b_low = in_halves(x, a.dtype)
        return dot_halves(a, a_low, b_high, None, dot(a, b_low, acc))
    else:
        return dot(a, cast(x, a.dtype), acc)


@triton.jit
def dot_left(x, a, a_low, acc, FINE: tl.constexpr):
    """x @ a + acc, as `dot_right`."""
    if FINE:
        b_high, b_low = in_halves(x, a.dtype)
        return dot_halves(b_high, b_low, a, a_low, acc)
    else:
        return dot(cast(x, a.dtype), a, acc)


@triton.jit
def significand(x):
    """x in fp32 as a number in [1, 2) and a power of two with the sign of x, or 0: their product.

    A matrix times the first rounds to 16 bit as it does times x: the power of two is exact.
    """
    n = x.to(tl.int32, bitcast=True)
    one = ((n & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return one, (n & -0x800000).to(tl.float32, bitcast=True)


@triton.jit
def decay_matrix(b_gc, o_t):
    """G_ij = 2^(gc_i - gc_j) for i >= j, else 0; the mask comes first, so nothing overflows."""
    causal = o_t[:, None] >= o_t[None, :]
    return tl.exp2(tl.where(causal, b_gc[:, None] - b_gc[None, :], float("-inf")))


@triton.jit
def decay_matrix_transposed(b_gc, o_t):
    """The transpose of `decay_matrix`, computed as such."""
    causal = o_t[None, :] >= o_t[:, None]
    return tl.exp2(tl.where(causal, b_gc[None, :] - b_gc[:, None], float("-inf")))


@triton.jit
def documents(seq_ptr, i_t, o_t, n_t):
    """Documents of a chunk: of each token, of the state that enters it, of the one that leaves.

    seq_ptr: at the chunk's first token.  i_t: the chunk's number in its sequence: no document goes
    on from before a sequence, whose initial state belongs to the first token's.
    """
    b_id = tl.load(seq_ptr + tl.minimum(o_t, n_t - 1))
    before = tl.load(seq_ptr - tl.minimum(i_t, 1))
    return b_id, before, tl.load(seq_ptr + tl.minimum(o_t.shape[0], n_t) - 1)


@triton.jit
def listed(pid, items_ptr, G: tl.constexpr):
    """What program pid works on of the items, G programs each, that items_ptr lists behind their
    number: a program of a grid for all of them, or -1; pid itself without a list.
    """
    if items_ptr is not None:
        some = pid // G < tl.load(items_ptr)
        item = tl.load(items_ptr + 1 + pid // G, mask=some, other=0)
        pid = tl.where(some, item * G + pid % G, -1)
    return pid


@triton.jit
def chunk_of(pid, cu_ptr, chunks_ptr, T, HV: tl.constexpr, BT: tl.constexpr):
    """What program pid of a chunk-parallel kernel works on, heads varying fastest.

    cu_ptr, chunks_ptr: Packing.cu_seqlens and .chunk_indices, or None for B sequences of T tokens.
    Returns the head, the number of the chunk (through all sequences), its first token (through all
    sequences), and the tokens from there to the end of its sequence.
    """
    i_h, i_c = pid % HV, (pid // HV).to(tl.int64)
    if cu_ptr is not None:
        i_n, i_t = tl.load(chunks_ptr + 2 * i_c), tl.load(chunks_ptr + 2 * i_c + 1)
        first = tl.load(cu_ptr + i_n) + i_t * BT
        n_t = (tl.load(cu_ptr + i_n + 1) - first).to(tl.int32)
    else:
        NT = tl.cdiv(T, BT)
        first = i_c // NT * T + i_c % NT * BT
        n_t = (T - i_c % NT * BT).to(tl.int32)
    return i_h, i_c, first, n_t


@triton.jit
def channels_of(cu_ptr, chunks_ptr, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """What a program of a grid (NT * D / BD) works on: BD of the D numbers of a chunk's tokens.

    Returns what `chunk_of` says of the chunk, the numbers of its tokens, and which of the D.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, ND, BT)
    return i_c, first, n_t, tl.arange(0, BT), i_d * BD + tl.arange(0, BD)


@triton.jit
def sequence_of(i_n, cu_ptr, offsets_ptr, T, BT: tl.constexpr):
    """Sequence i_n: its first token, its tokens, and the number of its first chunk.

    cu_ptr, offsets_ptr: Packing.cu_seqlens and .chunk_offsets, or None for B sequences of T tokens.
    """
    if cu_ptr is not None:
        first = tl.load(cu_ptr + i_n)
        n_t = (tl.load(cu_ptr + i_n + 1) - first).to(tl.int32)
        i_c = i_n if offsets_ptr is None else tl.load(offsets_ptr + i_n)
    else:
        first = i_n * T
        n_t = T
        i_c = i_n * tl.cdiv(T, BT)
    return first, n_t, i_c  # without offsets_ptr, the last means nothing


@triton.jit
def columns_of(pid, cu_ptr, offsets_ptr, T, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
               BV: tl.constexpr):  # fmt: skip
    """What program pid of a sequential kernel works on: BV columns of one state.

    Returns which columns, which state and which head, then what `sequence_of` says.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = pid % NV, (pid // NV).to(tl.int64)
    first, n_t, i_c = sequence_of(i_nh // HV, cu_ptr, offsets_ptr, T, BT)
    return i_v, i_nh, i_nh % HV, first, n_t, i_c


@triton.jit
def first_state(x_ptr, i, i_v, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
             BV: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """The numbers of a chunk's tokens, of the keys and of the values of tile i_v; and these columns
    of state i of [.., K, V] in fp32, or their transpose; zeros without x_ptr.
    """
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_S = tl.zeros([BV, BK] if TRANSPOSED else [BK, BV], dtype=tl.float32)
    if x_ptr is not None:
        b_x = load_tile(x_ptr + i * K * V, o_k, o_v, V, K, V)
        b_S += (tl.trans(b_x) if TRANSPOSED else b_x).to(tl.float32)
    return o_t, o_k, o_v, b_S


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. triton.cdiv serves kernels too, and costs the host microseconds a call."""
    return -(-a // b)


def block(n: int) -> int:
    """The tile that holds n columns: the next power of two, 16 at least, as tl.dot needs."""
    return max(16, 1 << (n - 1).bit_length())


def blocks_of(B: int, T: int, N: int, cu_seqlens: Tensor | None) -> tuple[int, int, Tensor | None]:
    """Tokens between two states that a backward pass keeps, how many states these are, and where
    those of each sequence begin.
    """
    length = math.isqrt((B * T - 1) // N) + 1  # the root of a sequence's length, or of the average
    if cu_seqlens is None:
        return length, B * cdiv(T, length), None
    counts = (cu_seqlens.diff() + length - 1).div(length, rounding_mode="floor")
    # as many as there can be: how many there are, the device knows
    return length, T // length + N, counts.cumsum(0) - counts
