"""What routes choose: of some seventy calls, by each condition, and from what they may know."""

import ast
import inspect
import os
import re
from pathlib import Path

import pytest
import torch
from forks import python

pytest.importorskip("triton")

import linattn_edu
from linattn_edu import choices, dry_run
from linattn_edu.choices import GPUS
from linattn_edu.cp import build_cp_context, simulate
from linattn_edu.dry_run import DTYPES, OPERATORS, route
from linattn_edu.kernels import rows as tables
from linattn_edu.kernels.fused import gdn_scans
from linattn_edu.kernels.gluon import gdn_intra_bwd, gdn_scan
from linattn_edu.kernels.routes import (
    Kind,
    Load,
    by_kind,
    by_load,
    choosing,
    forced,
    kind_of,
    limits,
    load_of,
    scan_launch,
)
from linattn_edu.kernels.tiles import block

pytestmark = pytest.mark.whole
PACKAGE = Path(linattn_edu.__file__).parent
# -- the routes of calls

PARTS = {
    "RING": "gate_cumsum intra_chunk_ring_gluon",
    "ALONE": "gate_cumsum intra_chunk_gluon",
    "TWO": "gate_cumsum scores resolvent",
    "JOINED": "gate_cumsum chunk_fwd_gluon",
    "EITHER": "gate_cumsum bound warm_up chunk_fwd_gluon intra_chunk_ring_gluon scan_gluon",
    "PART": "scan_states_gluon scan_bwd_gluon intra_chunk_bwd_gluon",
    "WHOLE": "scan_states_gluon scan_intra_bwd_gluon",
    "MAPS": "scan_map merge scan_map_bwd merge",
    "CUT": "bound warm_up scan_states_gluon bound warm_up scan_bwd_gluon intra_chunk_bwd_gluon",
    "APART": "bound warm_up scan_states bound warm_up scan_bwd",
    "FUSED": "scan_states scan_bwd intra_chunk_bwd gate_bwd",
    "FUSED_ONE": "scans intra_chunk_bwd gate_bwd",
    "SMALL": "intra_chunk_bwd_gluon gate_bwd",
    "STAGED": "wy state output_bwd state_bwd wy_bwd gate_bwd",
    "KDA": "gate_cumsum kda_scores kda_inverse",
    "KDA_FRONT": "kda_prepare_gluon",
    "KDA_END": "kda_intra_bwd_gluon kda_intra_bwd gate_bwd",
    "KDA_AGAIN": "gate_cumsum wy kda_scans kda_output_bwd kda_wy_bwd",
    "KDA_NEAR": "KDA_AGAIN kda_intra_bwd_near kda_intra_bwd gate_bwd",
    "KDA_STAGED": "KDA_AGAIN kda_intra_bwd gate_bwd",
    "SSD_FUSED": "chunk_cumsum_log chunk_scores ssd_fwd",
    "SSD_PARTS": "chunk_cumsum_log chunk_scores ssd_ends ssd_fwd",
    "SSD_FORTH": "chunk_cumsum_log chunk_scores ssd_fwd_gluon",
    "SSD_CUT": "chunk_cumsum_log chunk_scores ssd_ends ssd_fwd_gluon",
    "SSD_END": "ssd_bwd_dc ssd_bwd_db ssd_bwd_da ssd_bwd_far ssd_bwd_dx ssd_bwd_sum "
    "chunk_cumsum_bwd",
    "SSD_GLUON": "ssd_bwd_dc_gluon ssd_bwd_dx_gluon ssd_bwd_sum chunk_cumsum_bwd",
    "SSD_STATES": "chunk_cumsum_log ssd_states_gluon ssd_states_gluon",
    "SSD": "chunk_cumsum chunk_state state_passing chunk_scan",
    "SSD_BWD": "chunk_cumsum chunk_state state_passing chunk_scan_bwd_dstates state_passing_bwd "
    "chunk_state_bwd_db chunk_scan_bwd_dc chunk_scan_chunk_state_bwd_dx chunk_scan_bwd_da_cs "
    "chunk_cumsum_bwd",
}
# operator and sizes, as the command takes them | what is not a bf16 call on an H100 | both passes
CALLS = """
gdn 8 4096 16 16 128 128  |           | JOINED | WHOLE gate_bwd
gdn 8 4096 16 16 128 128  | gpu=h200  | JOINED | WHOLE gate_bwd
gdn 8 4096 16 16 128 128  | gpu=b200  | TWO scan_transposed | FUSED
gdn 8 4096 16 16 128 128  | gpu=a100  | TWO scan | STAGED
gdn 8 4096 16 16 128 128  | gpu=4090  | TWO scan | STAGED
gdn 8 4096 16 16 128 128  | gpu=l4    | TWO scan | STAGED
gdn 8 4096 16 16 128 128  | gpu=t4    | TWO scan | STAGED
gdn 8 4096 16 16 128 128  | dtype=fp16 | TWO scan_gluon | WHOLE gate_bwd
gdn 8 4096 16 16 128 128  | dtype=fp32 | TWO scan | STAGED
gdn 8 4096 16 16 128 128  | packed    | ALONE scan_transposed | FUSED
gdn 8 4096 16 16 128 128  | gluon=off | TWO scan_transposed | FUSED
gdn 8 4100 16 16 128 128  |           | ALONE scan_transposed | FUSED
gdn 8 4096 16 16 128 128  | chunk=32  | TWO scan_transposed | FUSED
gdn 1 64 1 1 128 128      |           | ALONE scan | FUSED_ONE
gdn 1 64 1 2 128 128      |           | ALONE scan |
        scans intra_chunk_bwd intra_chunk_bwd gate_bwd
gdn 8 4096 8 16 128 128   |           | JOINED | PART PART gate_bwd
gdn 8 4096 8 16 128 128   | gluon=off | TWO scan_transposed |
        scan_states scan_bwd intra_chunk_bwd intra_chunk_bwd gate_bwd
gdn 8 4096 16 16 64 64    |           | RING scan_gluon | scans SMALL
gdn 8 4096 16 16 64 64    | packed    | ALONE scan | FUSED_ONE
gdn 16 4096 16 16 64 64   |           | JOINED | scan_states scan_bwd SMALL
gdn 8 2048 16 16 64 64    |           | RING scan_gluon | scans SMALL
gdn 64 192 16 16 128 128  |           | RING scan_transposed | FUSED
gdn 8 4096 16 16 128 256  |           | RING scan_gluon | STAGED
gdn 8 4096 16 16 256 128  |           | TWO scan | STAGED
gdn 8 4096 16 16 96 128   |           | TWO scan_transposed | FUSED
gdn 8 4096 16 16 33 128   |           | TWO scan | STAGED
gdn 8 4096 16 16 128 96   |           | RING scan_transposed | FUSED
gdn 1 32768 4 4 128 128   |           | RING scan_map merge scan_gluon |
        MAPS scans_gluon intra_chunk_bwd_gluon gate_bwd
gdn 1 32768 4 4 128 128   | packed    | ALONE scan_map merge scan |
        scan_map merge scan_states scan_map_bwd merge scan_bwd intra_chunk_bwd gate_bwd
gdn 1 32768 4 4 128 128   | gpu=t4    | TWO scan | STAGED
gdn 1 32768 4 4 128 128   | gpu=a100  | TWO scan_map merge scan |
        wy piece_map merge state output_bwd piece_map_bwd merge state_bwd wy_bwd gate_bwd
gdn 1 32768 4 4 128 128   | gpu=l4    | TWO scan | STAGED
gdn 4 32768 4 4 128 128   |           | RING scan_map merge scan_gluon | MAPS PART PART gate_bwd
gdn 1 8191 4 4 128 128    |           | ALONE scan | FUSED_ONE
gdn 1 8192 4 4 128 128    |           | RING scan_map merge scan_gluon |
        MAPS scans_gluon intra_chunk_bwd_gluon gate_bwd
gdn 1 32768 16 32 128 128 |           | EITHER | CUT gate_bwd
gdn 1 32768 32 32 128 128 |           | EITHER | CUT gate_bwd
gdn 1 32768 16 32 128 128 | gluon=off | TWO bound warm_up scan_transposed scan |
        APART scans intra_chunk_bwd intra_chunk_bwd gate_bwd
gdn 32 4096 16 16 128 128 |           | JOINED | WHOLE WHOLE WHOLE WHOLE gate_bwd
gdn 32 4096 16 16 128 128 | gluon=off | TWO scan_transposed | FUSED
gdn 1 1024 16 16 128 128  |           | ALONE scan_gluon |
        scans_gluon intra_chunk_bwd_gluon gate_bwd
gdn 1 960 16 16 128 128   |           | ALONE scan | FUSED_ONE
gdn 2 32768 16 32 128 128 | packed    | ALONE bound warm_up scan_transposed scan_transposed |
        APART scans intra_chunk_bwd intra_chunk_bwd gate_bwd
kda 8 4096 16 16 128 128  |           | KDA_FRONT kda_scan_gluon |
        kda_gates kda_scan_states_gluon kda_scan_bwd_gluon KDA_END
kda 8 4096 16 16 128 128  | gluon=off | KDA kda_fused_scan_transposed | KDA_NEAR
kda 8 4096 16 16 128 128  | gpu=b200  | KDA kda_fused_scan_transposed | KDA_NEAR
kda 8 4096 16 16 128 128  | gpu=a100  | KDA wy kda_scan | KDA_STAGED
kda 8 4096 16 16 128 128  | gpu=t4    | KDA wy kda_scan | KDA_STAGED
kda 8 4096 16 16 128 128  | dtype=fp16 | KDA kda_scan_gluon | KDA_STAGED
kda 8 4096 16 16 128 128  | dtype=fp32 | KDA wy kda_scan | KDA_STAGED
kda 8 4096 16 16 128 128  | packed    | KDA_FRONT kda_fused_scan_transposed | KDA_NEAR
kda 8 4096 8 16 128 128   |           | KDA_FRONT kda_scan_gluon | KDA_NEAR
kda 8 4096 16 16 64 64    |           | KDA kda_fused_scan | KDA_NEAR
kda 1 512 16 16 128 128   |           | KDA_FRONT kda_fused_scan | KDA_NEAR
kda 1 32768 4 4 128 128   |           | KDA_FRONT kda_fused_scan_map merge kda_scan_gluon |
        kda_gates kda_fused_scan_map merge kda_fused_scan_map_bwd merge kda_scans_gluon
        KDA_END
kda 2 4096 32 32 128 128  |           | KDA_FRONT kda_scan_gluon | kda_gates kda_scans_gluon KDA_END
kda 2 4096 16 16 128 128  |           | KDA_FRONT kda_scan_gluon | kda_gates kda_scans_gluon KDA_END
kda 8 4100 16 16 128 128  |           | KDA_FRONT kda_fused_scan_transposed | KDA_NEAR
kda 8 4096 16 16 256 256  |           | KDA wy kda_scan | KDA_NEAR
gdn2 8 4096 16 16 128 128 |           | KDA_FRONT kda_scan_gluon |
        kda_gates kda_scan_states_gluon kda_scan_bwd_gluon KDA_END
gdn2 8 4096 16 16 128 128 | gpu=b200  | KDA kda_fused_scan_transposed | KDA_NEAR
gdn2 8 4096 16 16 128 128 | gpu=a100  | KDA wy kda_scan | KDA_STAGED
gdn2 8 4096 16 16 128 128 | dtype=fp16 | KDA kda_scan_gluon | KDA_STAGED
gdn2 8 4096 8 16 128 128  | packed    | KDA_FRONT kda_fused_scan_transposed | KDA_NEAR
gdn2 1 32768 4 4 128 128  |           | KDA_FRONT kda_fused_scan_map merge kda_scan_gluon |
        kda_gates kda_fused_scan_map merge kda_fused_scan_map_bwd merge kda_scans_gluon
        KDA_END
ssd 8 4096 16 1 64 128    |           | SSD_FORTH | SSD_STATES SSD_GLUON
ssd 8 4096 16 1 64 128    | gpu=b200  | SSD_FUSED | chunk_cumsum_log state state_bwd SSD_END
ssd 8 4096 16 1 64 128    | gpu=a100  | SSD | SSD_BWD
ssd 8 4096 16 1 64 128    | dtype=fp32 | SSD | SSD_BWD
ssd 8 4096 16 1 64 256    |           | SSD | SSD_BWD
ssd 8 4096 16 1 128 128   |           | SSD | SSD_BWD
ssd 2 8192 16 1 64 128    |           | SSD_CUT |
        chunk_cumsum_log ssd_ends ssd_states_gluon ssd_ends ssd_states_gluon SSD_GLUON
ssd 2 4096 16 1 64 128    | packed    | SSD_PARTS | chunk_cumsum_log state state_bwd SSD_END
ssd 8 4096 16 1 64 128    | step=-1   | SSD | SSD_BWD
ema 2 4096 1 512          |           | gate_cumsum ema | ema_bwd total
ema 1 65536 1 512         |           | gate_cumsum ema_piece ema | ema_piece ema_bwd total
ema 2 4096 1 512          | packed    | gate_cumsum ema_piece ema | ema_piece ema_bwd total
"""
CALLS = re.split(r"\n(?=\w)", CALLS.strip())
CALLS = [tuple(part.strip() for part in row.split("|")) for row in CALLS]


def expanded(text):
    names = text.split()
    while any(n in PARTS for n in names):
        names = " ".join(PARTS.get(n, n) for n in names).split()
    return [f"{n}_kernel" for n in names]


def asked(call, more="", **options):
    """The route of a row."""
    operator, *sizes = call.split()
    function, shapes, wide, chunk_size = OPERATORS[operator]
    sizes = dict(zip(inspect.signature(shapes).parameters, map(int, sizes), strict=True))
    more = dict(x.split("=") if "=" in x else (x, True) for x in more.split())
    options |= {"chunk_size": int(more.get("chunk", chunk_size)), "gpu": more.get("gpu", "h100")}
    if "step" in more:
        options["dt_limit"] = (float(more["step"]), 1.0)
    if "packed" in more:
        options["cu_seqlens"] = torch.arange(sizes["B"] + 1) * sizes["T"]
        sizes |= {"B": 1, "T": sizes["B"] * sizes["T"]}
    dtype = DTYPES[more.get("dtype", "bf16")]
    tensors = {
        n: torch.empty(s, dtype=torch.float32 if n in wide else dtype, device="meta")
        for n, s in shapes(**sizes).items()
    }
    return route(function, **tensors, **options)


@pytest.fixture(autouse=True)
def gluon(monkeypatch):
    """As if this Triton's Gluon were on, and of the table's version."""
    monkeypatch.setattr(choosing, "GLUON", "")
    monkeypatch.setattr(by_load.support, "THIS", (3, 6))


@pytest.mark.parametrize(("call", "more", "forward", "backward"), CALLS, ids=lambda x: x or "-")
def test_calls(call, more, forward, backward, monkeypatch):
    if "gluon=off" in more:
        monkeypatch.setattr(choosing, "GLUON", "off, Triton 3.5.1: it needs 3.6 or newer")
    found = asked(call, more)
    names = [[s.kernel for s in steps for _ in range(s.times)]
             for steps in (found.forward, found.backward)]  # fmt: skip
    assert names == [expanded(forward), expanded(backward)]
    assert found.kernels == [*names[0], *names[1]]
    assert "{" not in str(found)
    if "gluon=off" in more and call.startswith("gdn"):
        assert "Gluon is off, Triton 3.5.1" in str(found)


@pytest.mark.parametrize("shared", [False, True])
def test_a_triton_with_other_bits_has_no_ring_of_shared_heads(shared, monkeypatch):
    monkeypatch.setattr(by_load.support, "THIS", (3, 9))
    found = asked(f"gdn 8 4096 {8 if shared else 16} 16 128 128")
    (step,) = (s for s in found.forward if "intra_chunk" in s.kernel or "chunk_fwd" in s.kernel)
    assert step.kernel == f"{'intra_chunk' if shared else 'chunk_fwd'}_gluon_kernel"
    assert any("a Triton with which the last bits would be others" in x for x in step.why) == shared


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_ranks_have_the_one_kernel(layout):
    """With maps where a sequence goes on, before the state is waited for; but not for documents,
    nor where it would not fill a GPU.
    """

    def forward(call, bounds, rank=0):
        context = build_cp_context(torch.tensor(bounds), groups[rank], layout=layout)
        return [s.kernel for s in asked(call, cp_context=context).forward]

    groups, call = simulate(2, lambda group: group), "gdn 1 32768 32 32 128 128"
    near = "intra_chunk_gluon scan_map intra_chunk_ring_gluon scan_map bound warm_up"
    merge = "merge" * (layout == "zigzag")
    apart = "chunk_fwd_gluon intra_chunk_ring_gluon scan_gluon"
    names = expanded(f"gate_cumsum {near} {merge} {apart}")
    assert forward(call, [0, 65536]) == names
    if layout == "contiguous":  # what ends here is no map
        assert forward(call, [0, 65536], 1) == expanded("EITHER")
    for other, bounds in ((call, [0, 100, 65536]), ("gdn 1 4096 4 4 128 128", [0, 8192])):
        assert "chunk_fwd_gluon_kernel" not in forward(other, bounds)
        assert "scan_map_kernel" in forward(other, bounds)


# -- each condition by itself turns a kernel away

GOOD = Kind(4096, 16, 16, 128, 128, 64, torch.bfloat16, "hopper", True, True, "", False, True)
NOT_GLUON = (
    {"compiled": False}, {"generation": "ampere"}, {"generation": "blackwell"}, {"C": 32},
    {"gluon": "off"},
)  # fmt: skip
NOT_WHOLE = ({"packed": True}, {"T": 4097}, {"T": 32 * 127})
NOT_BFLOAT16 = ({"dtype": torch.float16}, {"dtype": torch.float32})
NOT_FUSED = (
    {"generation": "turing"}, {"generation": "ampere"}, {"dtype": torch.float32},
    {"K": 126 + 1}, {"K": 130}, {"V": 129},
)  # fmt: skip
SHORT = {"T": 960}  # 15 chunks of 16 heads: fewer than 2^14
CONDITIONS = {
    "gdn_backward_stages": ("fused", NOT_FUSED),
    "kda_forward_stages": ("fused", NOT_FUSED),
    "kda_backward_stages": ("fused", (
        *NOT_FUSED, *NOT_WHOLE, *NOT_BFLOAT16, SHORT, {"H": 8}, {"generation": "blackwell"},
        {"C": 32}, {"gluon": "off"}, {"K": 64}, {"V": 64},
    )),
    "intra_chunk": ("gluon", (
        *NOT_GLUON, *NOT_BFLOAT16, {"K": 96}, {"K": 256}, {"aligned": False},
    )),
    "intra_chunk_bwd": ("gluon", (
        *NOT_GLUON, *NOT_WHOLE, SHORT, {"dtype": torch.float32}, {"K": 64}, {"V": 256},
        {"aligned": False},
    )),
    "kda_fused_scans": ("gluon", (
        *NOT_GLUON, *NOT_WHOLE, {"dtype": torch.float32}, {"K": 64}, {"V": 96}, {"aligned": False},
    )),
    "kda_fused_intra_bwd": ("gluon", (
        *NOT_GLUON, *NOT_WHOLE, *NOT_BFLOAT16, SHORT, {"H": 8}, {"K": 64}, {"V": 256},
        {"aligned": False},
    )),
    "kda_gate_prepare": ("gluon", (
        *NOT_GLUON, *NOT_BFLOAT16, {"K": 64}, {"K": 256}, {"aligned": False},
    )),
    "kda_near": ("anchored", (*NOT_BFLOAT16, {"generation": "ampere"})),
    "kda_halves": ("halves", (
        *NOT_BFLOAT16, {"generation": "ampere"}, {"generation": "blackwell"}, {"K": 33}, {"K": 256},
        {"V": 256},
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_condition_turns_it_away(name):
    decide, (takes, others) = getattr(by_kind, name), CONDITIONS[name]
    assert decide(GOOD).takes == takes
    for other in others:
        choice = decide(GOOD._replace(**other))
        assert choice.takes != takes and choice.why, other


def test_what_keeps_them():
    """At the edges of the conditions; neither length nor packing turns intra_chunk away."""
    for other in ({"T": 1}, {"packed": True}, {"K": 64}, {"V": 33}, {"H": 2}, {"large": False}):
        assert by_kind.intra_chunk(GOOD._replace(**other)).takes == "gluon", other
        if other.get("K", 128) == 128:
            assert by_kind.kda_gate_prepare(GOOD._replace(**other)).takes == "gluon", other
    for other in ({"T": 1024}, {"dtype": torch.float16}, {"H": 2}):
        assert by_kind.intra_chunk_bwd(GOOD._replace(**other)).takes == "gluon", other
    assert by_kind.kda_backward_stages(GOOD._replace(T=1024)).takes == "fused"
    # the interpreter runs whatever the kernels hold
    held = GOOD._replace(compiled=False, T=5, K=10, V=6, H=8, C=16, packed=True)
    assert by_kind.kda_backward_stages(held).takes == "fused"
    for other in ({"K": 96}, {"dtype": torch.float16}, {"generation": "ampere"}):
        assert by_kind.intra_chunk(GOOD._replace(**other)).takes == "two", other
    for other in ({"V": 33}, {"K": 33}, {"dtype": torch.float16}):
        assert by_kind.kda_backward_stages(held._replace(**other)).takes == "staged", other


@pytest.mark.parametrize("name", ["scan", "scans", "kda_scan"])
def test_scans_in_gluon(name):
    """Each condition by itself turns a scan away, and where it would not pay."""

    def takes(sequences=8, **other):
        kind = GOOD._replace(HV=8, **other)
        return getattr(by_load, name)(Load(kind, sequences, 132)).takes == "gluon"

    wide = name != "scan"
    assert takes() and takes(dtype=torch.float16) and takes(V=256)
    for other in (
        *NOT_GLUON, *NOT_WHOLE, {"dtype": torch.float32}, {"K": 96}, {"K": 256}, {"V": 96},
        {"aligned": False},
    ):  # fmt: skip
        assert not takes(**other), other
    # a program for each multiprocessor at most: 2^14 tokens times heads
    assert takes(T=256) and not takes(T=192)
    # more, or small keys: 2^18, and no short sequences
    assert takes(9) and not takes(9, T=2048)
    assert takes(K=64, V=64) == (not wide) and not takes(K=64, V=64, T=2048)
    assert takes(256, T=256) and not takes(256, T=192)


MAPS = {"T": 8192, "H": 8, "HV": 8}  # pieces are entered by maps


def test_the_forward_pass_in_one_kernel(monkeypatch):
    def takes(sequences=8, cancelling=False, **other):
        load = Load(GOOD._replace(**other), sequences, 132)
        return by_load.chunk_fwd(load, cancelling).takes == "one"

    narrow = {"K": 64, "V": 64}
    assert takes() and takes(16) and takes(H=4) and takes(16, **narrow)
    assert takes(T=8192) and takes(1, T=32768) and not takes(1, T=16384)  # in 2, 8 and 4 pieces
    assert takes(cancelling=True) and not takes(T=8192, cancelling=True)  # marked in no piece
    for other in (
        *NOT_GLUON, *NOT_WHOLE, *NOT_BFLOAT16, {"K": 64}, {"V": 64}, {"V": 256}, MAPS,
        {"aligned": False},
    ):  # fmt: skip
        assert not takes(**other), other
    assert not takes(7) and not takes(9) and takes(15)  # 112, 144 and 240 heads
    assert not takes(13, **narrow) and takes(15, **narrow)
    monkeypatch.setattr(by_load.support, "THIS", (3, 7))
    assert takes() and takes(H=4)
    monkeypatch.setattr(by_load.support, "THIS", (3, 9))
    assert takes() and not takes(H=4) and takes(16, H=4, **narrow)
    monkeypatch.setattr(by_load.support, "THIS", (3, 10))
    assert not takes()


def test_the_backward_pass_in_one_kernel(monkeypatch):
    def takes(sequences=8, waits=False, **other):
        load = Load(GOOD._replace(**other), sequences, 132)
        return by_load.scan_intra_bwd(load, waits).takes == "one"

    assert takes() and takes(16) and takes(dtype=torch.float16)
    for other in (
        *NOT_GLUON, *NOT_WHOLE, {"K": 64}, {"V": 64}, {"H": 8}, {"T": 8192}, MAPS
    ):  # fmt: skip
        assert not takes(**other), other
    assert not takes(waits=True)
    assert not takes(7) and not takes(9) and takes(15)  # 112, 144 and 240 heads
    monkeypatch.setattr(by_load.support, "THIS", (3, 10))
    assert not takes()


def test_the_ring_of_shared_keys_is_for_tritons_with_its_bits(monkeypatch):
    for version, taken in (((3, 6), True), ((3, 7), True), ((3, 8), False), ((3, 9), False)):
        monkeypatch.setattr(by_load.support, "THIS", version)
        for heads, ring in (((4, 8), taken), ((8, 8), True)):
            load = Load(GOOD._replace(K=128, H=heads[0], HV=heads[1]), 1, 132)
            assert bool(by_load.intra_ring(load, 10_000, True).takes) == ring


def test_kernels_are_for_tritons_with_which_they_were_run(monkeypatch):
    states = GOOD._replace(H=1, K=128, V=64, C=128)
    for version, taken in (((3, 6), "gluon"), ((3, 9), "gluon"), ((3, 10), "triton")):
        monkeypatch.setattr(by_load.support, "THIS", version)
        assert by_kind.kda_gate_prepare(GOOD).takes == taken
        assert by_kind.ssd_fwd(states, False, False).takes == taken
        assert by_kind.ssd_bwd_dx(states, False, False).takes == taken
        assert by_kind.ssd_states(states, False).takes == taken
        assert by_kind.ssd_bwd_dc(states, False).takes == taken


def test_the_scan_of_mamba_in_gluon_takes_whole_tiles_and_pairs_of_heads():
    states = GOOD._replace(H=1, K=128, V=64, C=64)
    assert by_kind.ssd_fwd(states, False, False).takes == "gluon"
    for documents, gate in ((True, False), (False, True)):
        assert by_kind.ssd_fwd(states, documents, gate).takes == "triton"
    for other in (
        {"HV": 17}, {"T": 4100}, {"packed": True}, {"K": 64}, {"aligned": False}, {"C": 16},
        {"C": 32}, *NOT_GLUON,
    ):  # fmt: skip
        assert by_kind.ssd_fwd(states._replace(**other), False, False).takes == "triton", other


def test_pieces():
    few = GOOD._replace(HV=4, T=8192)
    assert by_kind.pieces_by_maps(few).takes == 2048 and by_kind.pieces_by_warm_up(few).takes == 0
    for other in ({"T": 8191}, {"HV": 9}, {"large": False}):
        assert by_kind.pieces_by_maps(few._replace(**other)).takes == 0, other
    more = GOOD._replace(HV=32, T=16384)
    assert by_kind.pieces_by_warm_up(more).takes == 8192 and by_kind.pieces_by_maps(more).takes == 0
    for other in ({"T": 16383}, {"HV": 8}, {"HV": 65, "T": 1 << 20}, {"large": False}):
        assert by_kind.pieces_by_warm_up(more._replace(**other)).takes == 0, other


def test_the_rows_of_a_scan():
    """The widest that occupies 7 of 10 multiprocessors; keys of odd size on Hopper have their own,
    and a kernel with one row has that.
    """
    for programs, n in (((93, 186), 0), ((92, 93), 1), ((1, 2), 1), ((400, 800), 0), ((5,), 0)):
        assert by_load.widest(programs, 132, 7).takes == n
    assert by_load.widest((527, 1054), 132, 40).takes == 1
    rows = [tables.row(4, n, BV=BV) for n, BV in ((2, 64), (1, 32))]
    table = tables.scan_table(ampere={128: rows}, hopper={128: rows})
    for gpu, K, heads, BV, warps in (
        ("h100", 128, 47, 64, 4), ("h100", 128, 46, 32, 4), ("h100", 100, 2, 32, 4),
        ("h100", 33, 200, 16, 2), ("b200", 33, 200, 16, 2), ("a100", 33, 200, 64, 4),
    ):  # fmt: skip
        k = torch.empty(1, 1, 1, K, dtype=torch.bfloat16, device="meta")
        with choices.ask(GPUS[gpu], lambda *_: None):
            grid, row = scan_launch(table, k, heads, 128)
            assert (row["BV"], row["num_warps"]) == (BV, warps) and row["BK"] == block(K)
            assert grid == (heads * 128 // BV,)
            assert scan_launch((rows[1],), k, heads, 32)[0] == (heads,)
    found = asked("gdn 8 4096 16 16 33 128")
    assert ("scan_rows", "unpipelined") in [x[:2] for x in found.choices]
    assert "2 warps a program: keys of 66 bytes, no whole words" in str(found)


def test_pieces_of_mamba_2():
    """By heads and a sequence's own length: as many as fill 132 multiprocessors with two each, or
    twice that many, ... Back in time over ranks by eighths.
    """
    counts = {1: 64, 8: 30, 24: 10, 48: 5, 80: 3, 128: 2, 160: 3, 240: 1, 264: 1, 270: 8, 1000: 1}
    for heads, n in counts.items():
        assert by_kind.ssd_pieces(GOOD._replace(HV=heads)).takes == n
    kind = GOOD._replace(HV=80)
    lengths = {4096: 4096, 4097: 1536, 4608: 1536, 4609: 2048, 16384: 5632, 65536: 22016}
    for T, tokens in lengths.items():
        assert by_kind.ssd_piece(kind._replace(T=T)).takes == tokens
        assert by_kind.ssd_piece(kind._replace(T=T), True).takes == (1536 if T == 4096 else tokens)
    back = {1: 512, 4096: 512, 4097: 640, 16384: 2048, 16385: 2176, 65536: 4096}
    for T, tokens in back.items():
        assert by_kind.ssd_piece_bwd(kind._replace(T=T)).takes == tokens


# -- what decisions may know


def test_what_is_decided_by_kind_sees_no_batch():
    """No field of a Kind has it, no decision is told it, and the file cannot ask for it."""
    loads = {"sequences", "processors", "pieces", "programs", "chunks", "batch", "N", "B"}
    assert not {*Kind._fields} & loads and {*Load._fields} == {"kind", "sequences", "processors"}
    tree = ast.parse(inspect.getsource(by_kind))
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not used & {"Load", "load_of", "processors", "sequences", "by_load", "device_of"}
    more = {
        p for f in vars(by_kind).values() if hasattr(f, "__wrapped__")
        for p in [*inspect.signature(f).parameters][1:]
    }  # fmt: skip
    assert more == {
        "ranks", "gates", "low", "kept", "lower_bound", "size", "documents", "channels",
        "gate", "halves",
    }  # fmt: skip
    with choices.ask(GPUS["h100"], lambda *_: None):
        one, many = (torch.empty(B, 100, 2, 64, device="meta") for B in (1, 64))
        assert kind_of(one, 4, 32, 64, None) == kind_of(many, 4, 32, 64, None)
        kind = kind_of(many, 4, 32, 64, None)
        assert load_of(kind, many, None) == Load(kind, 64, 132)


def test_a_kind_has_what_the_gpu_is():
    q = torch.empty(2, 100, 2, 64, dtype=torch.float16, device="meta")
    want = {"t4": ("turing", False), "l4": ("ampere", False), "a100": ("ampere", True),
            "h100": ("hopper", True), "b200": ("blackwell", True)}  # fmt: skip
    for name, (generation, large) in want.items():
        with choices.ask(GPUS[name], lambda *_: None):
            kind = kind_of(q, 4, 32, 16, True)
        rest = (torch.float16, generation, large, True, "", True, True)
        assert kind == Kind(100, 2, 4, 64, 32, 16, *rest)
    assert not kind_of(q, 4, 32, 16, None).compiled  # nobody asks


def test_kernels_in_gluon_are_chosen_for_what_they_take():
    assert (limits.CHUNK, limits.COLUMNS) == (gdn_scan.CHUNK, gdn_scan.BV)
    assert [x.launch()["BV"] for x in gdn_scans.SCAN] == [limits.COLUMNS]
    assert {*gdn_intra_bwd.OPTIONS} == {*limits.HEADS}


def test_nothing_else_chooses():
    """No predicate of these names outside; no version of Triton but once."""
    files = [p for room in ("kernels", "ops") for p in (PACKAGE / room).rglob("*.py")]
    texts = {p: p.read_text() for p in files}
    names = r"def fits\b|\bfits\(|import fits\b|def pays\b|def crowded\b|\bVERSIONS\b"
    found = {p.name for p, text in texts.items() if re.search(names, text)}
    assert found <= {"by_load.py", "support.py"}  # pays; and with which versions Gluon is on
    asked = {p.name for p, text in texts.items() if re.search(r"triton\.__version__", text)}
    assert len(asked) == 1
    for path in (PACKAGE / "ops").rglob("*.py"):  # no operator names an implementation
        assert not re.search(r"kernels(\.|/)(fused|gluon|pieces)\b", texts[path]), path


def test_forced():
    before = limits.LENGTH
    with forced(intra_chunk="two", LENGTH=7):
        assert by_kind.intra_chunk(GOOD) == ("two", "forced") and limits.LENGTH == 7
        with forced(intra_chunk="gluon"):
            assert by_kind.intra_chunk(GOOD) == ("gluon", "forced")
        assert by_kind.intra_chunk(GOOD).takes == "two"
    assert by_kind.intra_chunk(GOOD).takes == "gluon" and before == limits.LENGTH
    with pytest.raises(KeyError), forced(intra_chunk="two", LENGTH=7):
        raise KeyError
    assert by_kind.intra_chunk(GOOD).takes == "gluon" and before == limits.LENGTH
    for name in ("no_such", "NO_SUCH"):
        with pytest.raises(AttributeError, match=name), forced(**{name: 1}):
            pass


# -- the public function


def test_a_route_is_printed_a_line_a_step():
    text = str(asked("gdn 7 4096 16 16 128 128"))
    head, *lines = text.splitlines()
    assert head == "chunk_gated_delta_rule on H100"
    steps = [line.split() for line in lines if line.startswith("  ")]
    assert [s[0] for s in steps][:3] == expanded("RING scan_gluon")
    assert any("Gluon: Hopper, bfloat16, K=128, chunks of 64" in line for line in lines)
    assert any(line.startswith("backward: fused stages: Hopper, bfloat16") for line in lines)


@pytest.mark.parametrize(
    ("off", "call", "took", "instead", "said"),
    [
        ("scan_gluon", "gdn 7 4096 16 16 128 128", "RING scan_gluon", "RING scan_transposed", 2),
        ("intra_gluon", "gdn 7 4096 16 16 128 128", "RING scan_gluon", "TWO scan_gluon", 1),
        ("", "gdn 7 4096 16 16 128 128", "RING scan_gluon", "TWO scan_transposed", 1),
        ("scan_gluon", "gdn 1 49152 16 32 128 128", "RING bound warm_up scan_gluon",
         "RING bound warm_up scan_transposed", 4),
    ],
)  # fmt: skip
def test_a_kernel_that_is_off_in_this_process(off, call, took, instead, said, monkeypatch):
    """A newer Triton failed with it: the kernel that takes its place, and why it does."""
    support = by_load.support
    monkeypatch.setattr(support, "VERSIONS", ((3, 0), (3, 1)))
    monkeypatch.setattr(support, "_off", {})
    assert [s.kernel for s in asked(call).forward] == expanded(took)
    support._off[off] = why = "off, Triton 99.0: it failed: {no such} layout"
    found = asked(call)
    assert [s.kernel for s in found.forward] == expanded(instead)
    (step,) = (s for s in found.forward if f"plain Triton: {why}" in s.why)
    assert step.kernel == expanded(instead)[said]
    for step in found.forward:
        assert any(x.startswith("Gluon: ") for x in step.why) == ("gluon" in step.kernel)
    assert ("gluon", "triton", why) in found.choices


def test_real_tensors():
    """In the interpreter kernels run on the CPU, with one multiprocessor and without Gluon."""
    x = torch.randn(1, 70, 2, 16)
    given = (x, x, x, -x[..., 0].abs(), x[..., 0].abs().clamp(max=1))
    found = route(linattn_edu.chunk_gated_delta_rule, *given)
    if torch.cuda.is_available():
        assert "reference" in found.stages["forward"] and not found.kernels
        return
    assert found.gpu == "Triton's interpreter" and "scan_kernel" in found.kernels
    from gdn_checks import launches

    leaves = [t.clone().requires_grad_() for t in given]
    with launches() as ran:
        linattn_edu.chunk_gated_delta_rule(*leaves)[0].sum().backward()
    assert [kernel.fn.__name__ for kernel in ran] == found.kernels


def test_a_function_without_a_gradient():
    x = torch.empty(2, 3, 64, dtype=torch.bfloat16, device="meta")
    found = route(linattn_edu.l2norm, x, gpu="a100")
    assert found.kernels == ["l2norm_kernel", "l2norm_bwd_kernel"]
    state = torch.empty(2, 3, 8, 16, device="meta")
    one, dt = torch.empty(2, 3, 8, device="meta"), torch.empty(2, 3, 8, device="meta")
    A, B = torch.empty(3, 8, 16, device="meta"), torch.empty(2, 1, 16, device="meta")
    found = route(linattn_edu.selective_state_update, state, one, dt, A, B, B, gpu="h100")
    assert found.kernels == ["selective_state_update_kernel"]


def test_the_reference_says_why():
    x = torch.empty(1, 5, 2, 16, dtype=torch.float64, device="meta")
    given = (x, x, x, x[..., 0], x[..., 0])
    found = route(linattn_edu.chunk_gated_delta_rule, *given, gpu="h100")
    assert "float64 was given" in found.stages["forward"] and not found.kernels
    given = tuple(t.bfloat16() for t in given)
    found = route(linattn_edu.chunk_gated_delta_rule, *given, gpu="h100", impl="reference")
    assert 'impl="reference"' in str(found) and not found.kernels
    code = "import torch, linattn_edu as a; x = torch.ones(1, 5, 2, 16); g = x[..., 0]\n"
    code += "print(a.route(a.chunk_gated_delta_rule, x, x, x, -g, g))"
    assert "TRITON_INTERPRET" in run("-c", code)
    hide = "import sys; sys.modules['triton'] = None; "
    assert "triton is not installed" in run("-c", hide + code)


def run(*args):
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": ""}
    done = python(*args, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_errors_are_the_operators_own():
    x = torch.empty(1, 5, 2, 16, device="meta")
    g = x[..., 0]
    f = linattn_edu.chunk_gated_delta_rule
    with pytest.raises(ValueError, match="k must have"):
        route(f, x, x[:, :3], x, g, g, gpu="h100")
    with pytest.raises(ValueError, match="chunk_size"):
        route(f, x, x, x, g, g, gpu="h100", chunk_size=48)
    with pytest.raises(ValueError, match="gpu must be one of t4"):
        route(f, x, x, x, g, g, gpu="h900")
    with pytest.raises(ValueError, match="gpu must be named"):
        route(f, x, x, x, g, g)
    with pytest.raises(ValueError, match=r"cannot run here: .*float64"):
        route(f, *(t.double() for t in (x, x, x, g, g)), gpu="h100", impl="triton")
    with pytest.raises(ValueError, match="cu_seqlens must have numbers"):
        bounds = torch.empty(2, dtype=torch.int64, device="meta")
        route(f, x, x, x, g, g, gpu="h100", cu_seqlens=bounds)
    with pytest.raises(TypeError):
        route(f, x, gpu="h100")


def test_the_command(capsys):
    from linattn_edu.__main__ import main

    sizes = ["gdn", "2", "256", "4", "4", "128", "128"]
    assert main(["route", *sizes, "--gpu", "h100", "--forward"]) == 0
    text = capsys.readouterr().out
    assert "intra_chunk_gluon_kernel" in text and "backward" not in text
    assert main(["route", *sizes, "--gpu", "t4", "--dtype", "fp16", "--packed", "--backward"]) == 0
    text = capsys.readouterr().out
    assert "stage by stage: Turing GPU" in text and "forward" not in text
    assert main(["route", "ssd", "1", "2", "--gpu", "h100"]) == 2
    assert "ssd has the sizes B T H G P N, got 2 numbers" in capsys.readouterr().out
    assert main(["route", *sizes, "--gpu", "h100", "--chunk-size", "48"]) == 2
    assert "chunk_size" in capsys.readouterr().out
    assert dry_run.OPERATORS.keys() == {"gdn", "kda", "gdn2", "ssd", "ema"}
