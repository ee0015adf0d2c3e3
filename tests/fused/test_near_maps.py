"""Maps of a piece over ranks: made of its last chunks, and of all for heads that do not forget.

Back in time the last chunks are the first.
"""

from itertools import pairwise, product

import pytest
import torch
import triton
import triton.language as tl
from grids import FULL, few, name

from linattn_edu.kernels.delta import cp_merge
from linattn_edu.kernels.delta.cp_merge import FORGOTTEN, store_map
from linattn_edu.kernels.fused.gdn_fwd import scan_map
from linattn_edu.kernels.fused.gdn_scans import scan_map_bwd
from linattn_edu.kernels.fused.kda_fwd import kda_fused_scan_map
from linattn_edu.kernels.fused.kda_scans import kda_fused_scan_map_bwd
from linattn_edu.ops.gdn.chunk import fused_stages as gdn_stages
from linattn_edu.ops.kda.chunk import fused_stages as kda_stages
from linattn_edu.packing import pack
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs

pytestmark = pytest.mark.usefixtures("poison", "few_are_near")

C, H, K, V = 16, 5, 16, 24
NEAR = 5  # in place of 16, which take the interpreter three times as long
LONG = (NEAR + 4) * C + 5  # more chunks than a near map has, the last one short
# heads: forgets in no time; never; only in the last of the near chunks to be read; only in the
# chunk beyond these; from token to token so little that 5 chunks forget and 4 would not
ALL, NONE, FIRST_NEAR, LAST_FAR, SLOW = range(H)
FORGET = (ALL, FIRST_NEAR, SLOW)
THRESHOLD = FORGOTTEN.value / K


@pytest.fixture
def few_are_near(monkeypatch):
    monkeypatch.setattr(cp_merge, "NEAR", NEAR)


def gates(g, bounds, back):
    """Log decays as the heads are to have them, in each sequence."""
    g.copy_(torch.zeros(H).reshape(H, *[1] * (g.ndim - 3)).expand_as(g))
    g[:, :, ALL], g[:, :, SLOW] = -2.0, -0.368
    for begin, end in pairwise(bounds):
        near = begin + max(0, -((begin - end) // C) - NEAR) * C  # the first token that is near
        if back:
            near = min(end, begin + NEAR * C) - 1
        if begin < near < end - 1:
            g[:, near, FIRST_NEAR] = -60.0
            g[:, near + (1 if back else -1), LAST_FAR] = -60.0


def before(bounds, device):
    """(what makes the maps' arguments, options): kernels where there are several sequences."""
    if len(bounds) == 2:
        return "reference", {}
    return "triton", {"packing": pack(torch.tensor(bounds, device=device), C)}


def gdn(bounds, dtype, device, back, B=1, change=lambda x: None):
    """(the kernel, what it reads but the state, options) of Gated DeltaNet, some packed."""
    x = gdn_inputs(B, bounds[-1], H, H, K, V, dtype=dtype, device=device)
    gates(x.g, bounds, back)
    change(x)
    impl, packed = before(bounds, device)
    room = gdn_stages(impl)
    gc = room.gate_cumsum(x.g, chunk_size=C, **packed)
    P, R, _ = room.intra_chunk(x.q, x.k, x.beta, gc, chunk_size=C, **packed)
    if not back:
        return scan_map, (x.k, x.v, gc, R), packed
    *_, AG = room.intra_chunk(
        x.q, x.k, x.beta, gc, chunk_size=C, return_inverse=True, gated=True, **packed
    )
    do = x.v.flip(1).contiguous()
    return scan_map_bwd, (x.q, x.k, x.beta, gc, P, AG, do), {"scale": 0.3, **packed}


def kda(bounds, dtype, device, back, B=1, change=lambda x: None):
    """The same of Kimi Delta Attention."""
    x = kda_inputs(B, bounds[-1], H, H, K, V, dtype=dtype, device=device)
    gates(x.g, bounds, back)
    change(x)
    impl, packed = before(bounds, device)
    room = kda_stages(impl)
    gc = room.gate_cumsum(x.g, chunk_size=C, **packed)
    P, A, kd, kg, qg = room.kda_prepare(x.q, x.k, x.beta, gc, chunk_size=C, **packed)
    if not back:
        return kda_fused_scan_map, (kg, kd, x.v, x.beta, gc, A), packed
    do = x.v.flip(1).contiguous()
    options = {"scale": 0.3, **packed}
    return kda_fused_scan_map_bwd, (qg, kg, kd, x.beta, gc, P, A, do), options


PARTS = {"gdn": gdn, "kda": kda}
NEAR_MAPS = [*product(PARTS, (False, True), (torch.float32, torch.bfloat16))]
ways = pytest.mark.parametrize("back", [False, True], ids=["forth", "back"])


def place(n, device, transition=True):
    return torch.full((n, H, K, V + K * transition), torch.nan, device=device)


def compare(found, whole, forget=FORGET):
    """Heads that do not forget have the bits of the whole piece's map; of the others the state is
    within rounding of it, and the transition takes what it is given below 2^-32.
    """
    (S, M), (S_whole, M_whole) = found, whole
    for h in range(S.shape[1]):
        if h not in forget:
            assert torch.equal(S[:, h], S_whole[:, h]) and torch.equal(M[:, h], M_whole[:, h]), h
            continue
        assert_close(f"S_ext of head {h}", S[:, h], S_whole[:, h], 1e-6)
        assert M[:, h].abs().max() <= THRESHOLD and M_whole[:, h].abs().max() <= THRESHOLD, h


@pytest.mark.parametrize(
    ("family", "back", "dtype"),
    NEAR_MAPS if FULL else [NEAR_MAPS[i] for i in (0, 3, 5, 6)],
    ids=name,
)
def test_a_near_map_is_that_of_the_piece(family, back, dtype, device):
    """In float32 of both entries of a batch, the second first, with a state."""
    given = dtype == torch.float32
    B = 2 if given else 1
    make, args, options = PARTS[family]([0, LONG], dtype, device, back, B=B)
    rows = torch.arange(B, device=device).flip(0)
    state = torch.randn(B, H, K, V, device=device) if given else None
    whole = make(*args, state, rows=rows, **options)
    found = make(*args, state, rows=rows, out=place(B, device), **options)
    compare(found, whole)
    # where no rank needs M it has no place
    options |= {"rows": rows, "transition": False}
    S, none = make(*args, state, out=place(B, device, False), **options)
    assert none is None and torch.equal(S, found[0])
    # where only others do, it is what the near chunks made of it
    S, M = make(*args, state, out=place(B, device), **options)
    assert torch.equal(S, found[0]) and torch.equal(M[:, FORGET], found[1][:, FORGET])
    assert M.isfinite().all()


@pytest.mark.parametrize(
    ("family", "back"), few(("gdn", True), ("kda", False), more=(("gdn", False), ("kda", True)))
)
def test_packed_pieces(family, back, device):
    """Short ones are whole at once; one has a token more than is near; one has none."""
    near = NEAR * C
    bounds = [0, 20, near + 20, 2 * near + 21, 2 * near + 21, 2 * near + 21 + LONG]
    rows = torch.tensor([4, 2, 1, 0, 3], device=device)
    make, args, options = PARTS[family](bounds, torch.float32, device, back)
    state = torch.randn(5, H, K, V, device=device)
    whole = make(*args, state, rows=rows, **options)
    found = make(*args, state, rows=rows, out=place(5, device), **options)
    compare([x[:1] for x in found], [x[:1] for x in whole])
    compare([x[1:2] for x in found], [x[1:2] for x in whole])
    assert all(torch.equal(x[2:], y[2:]) for x, y in zip(found, whole, strict=True))


def decayed(back, left, device):
    """(kernel, arguments, options) where no key writes or reads in the near chunks, and head h of
    all leaves 2^left[h] there: M is that number, times I.
    """
    x = gdn_inputs(1, LONG, H, H, K, V, device=device)
    near = slice(0, NEAR * C) if back else slice(LONG - (NEAR - 1) * C - 5, LONG)
    x.k[:, near] = x.q[:, near] = x.g[:] = 0
    gc = torch.zeros_like(x.g)
    where = near.start + C
    gc[:, where : where + C] = torch.tensor(left, device=device)
    P, R, AG = gdn_stages("reference").intra_chunk(
        x.q, x.k, x.beta, gc, chunk_size=C, return_inverse=True, gated=True
    )
    if back:
        return scan_map_bwd, (x.q, x.k, x.beta, gc, P, AG, x.v), {"scale": 0.3}
    return scan_map, (x.k, x.v, gc, R), {}


@ways
def test_the_threshold_is_2_to_the_minus_32(back, device):
    """|M S| <= K max |M| |S|: a head is forgotten at 2^-32 / K, and not a step above it."""
    least = -32.0 - 4
    make, args, options = decayed(back, [least, least + 0.001, least + 1, least - 1, 0.0], device)
    whole, found = make(*args, **options), make(*args, out=place(1, device), **options)
    assert found[1][0, 0].abs().max() == THRESHOLD
    for h, forgotten in enumerate([True, False, False, True, False]):
        assert (found[0][:, h] == 0).all() == forgotten, h
        assert forgotten or torch.equal(found[0][:, h], whole[0][:, h]), h
        assert whole[0][:, h].any(), h


@pytest.mark.parametrize(
    ("family", "back", "what"),
    [("gdn", False, "k"), ("gdn", True, "g"), ("kda", False, "beta"), ("kda", True, "k")],
)
def test_nan_is_not_forgotten(family, back, what, device):
    """In a near chunk of a head that forgets: the map is the whole piece's, which has it too."""
    at = 2 if back else LONG - 3

    def spoil(x):
        getattr(x, what)[0, at, ALL] = torch.nan

    make, args, options = PARTS[family]([0, LONG], torch.float32, device, back, B=2, change=spoil)
    whole, found = make(*args, **options), make(*args, out=place(2, device), **options)
    for x, y in zip(found, whole, strict=True):
        assert x[0, ALL].isnan().any()
        assert torch.equal(x[0, ALL].isnan(), y[0, ALL].isnan())
        assert x[1].isfinite().all() and x[0, 1:].isfinite().all()
    left = [h for h in FORGET if h != ALL]
    compare([x[:1, 1:] for x in found], [x[:1, 1:] for x in whole], [h - 1 for h in left])


@triton.jit
def store_kernel(S_ptr, map_ptr, left_ptr, made, K: tl.constexpr, V: tl.constexpr):
    o = tl.arange(0, K)
    b_S = tl.load(S_ptr + o[:, None] * K + o[None, :])
    store_map(map_ptr, left_ptr, b_S, 0, 0, o, o, made, K, V, K, K, 1, 1)


@pytest.mark.parametrize(
    ("place", "value", "made", "left"),
    [
        ((3, 9), torch.nan, 2, torch.inf),
        ((3, 9), -7.0, 2, 7.0),
        ((3, 2), torch.nan, 2, 1.0),  # of S_ext, which does not matter
        ((3, 9), torch.nan, 1, 0.0),  # the near chunks are all there are
    ],
)
def test_one_nan_is_not_forgotten(place, value, made, left, device):
    S, found = torch.ones(K, K, device=device), torch.empty(1, device=device)
    S[place] = value
    out = torch.empty_like(S)
    store_kernel[(1,)](S, out, found, made, K, 4)
    assert found.item() == left
    assert torch.equal(out.nan_to_num(9.0), S.nan_to_num(9.0))


def test_few_columns_decide_for_all(device):
    """A head that forgets all but one number of the state does not forget."""
    make, args, options = gdn([0, LONG], torch.float32, device, False, B=2)
    k, _, gc, R = args
    gc[:, :, ALL] = 0  # with keys that are unit vectors and written whole, all is forgotten but
    k[:, :, ALL] = 0  # what none of them reads
    T = torch.arange(LONG, device=device)
    k[:, T, ALL, T % (K - 1)] = 1
    R[:, :, ALL] = 0
    R[:, T, ALL, T % C] = 1
    whole, found = make(*args, **options), make(*args, out=place(2, device), **options)
    assert torch.equal(found[0][:, ALL], whole[0][:, ALL])
    assert torch.equal(found[1][:, ALL], whole[1][:, ALL])
    assert (found[1][:, ALL].abs() > THRESHOLD).sum() <= 2 * K  # a column, or a row, of each entry
