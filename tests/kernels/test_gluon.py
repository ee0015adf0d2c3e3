"""The kernels in Gluon compiled for Hopper, which need not be present."""

from importlib import import_module

import pytest
from kernels.workers import lines_of

triton = pytest.importorskip("triton")
by_load = import_module("linattn_edu.kernels.routes.by_load")
if not triton.__version__.startswith(("3.6.", "3.7.")):
    pytest.skip("Gluon has other names in other versions", allow_module_level=True)

(
    forward_gluon, intra_gluon, scan_gluon, scans_gluon, channel_gluon, kda_fused_scans,
    channel_intra, fused, fused_intra, fused_scans, fused_bwd, kda_fused, kda_scans, kda_fused_bwd,
) = (
    import_module(f"linattn_edu.kernels.{name}")
    for name in (
        "gluon.gdn_intra", "gluon.gdn_intra_bwd", "gluon.gdn_scan", "gluon.gdn_scans",
        "gluon.kda_scan", "gluon.kda_scans", "gluon.kda_intra_bwd",
        "fused.gdn_fwd", "fused.gdn_intra", "fused.gdn_scans", "fused.gdn_bwd",
        "fused.kda_fwd", "fused.kda_scans", "fused.kda_bwd",
    )
)  # fmt: skip
# products of 64 terms and 64 columns, for the first chunk and in the loop: K S twice 64 terms, the
# state twice 64 columns; forward Q S, R W and P v_new, or v_new; back P^T dO, Z and the state again
PRODUCTS = {
    "scan_gluon_kernel": 2 + (2 + 2 + 1 + 1 + 2),
    "scan_states_gluon_kernel": 2 + (2 + 1 + 2),
    "scan_bwd_gluon_kernel": 2 + (2 + 1 + 1 + 2 + 2),
    "kda_scan_gluon_kernel": 2 + (2 + 2 + 1 + 1 + 2),
    "kda_scan_states_gluon_kernel": 2 + (2 + 1 + 2),
    "kda_scan_bwd_gluon_kernel": 3 + (2 + 1 + 1 + 2 + 2),
}
PRODUCTS["scans_gluon_kernel"] = (
    PRODUCTS["scan_states_gluon_kernel"] + PRODUCTS["scan_bwd_gluon_kernel"]
)
PRODUCTS["kda_scans_gluon_kernel"] = (
    PRODUCTS["kda_scan_states_gluon_kernel"] + PRODUCTS["kda_scan_bwd_gluon_kernel"]
)


def test_the_launchers_have_them():
    """What fails to import is left out in silence: it may be for another Triton."""
    assert fused.gdn_scan is scan_gluon and fused_intra.gdn_intra is forward_gluon
    assert kda_fused.kda_scan is channel_gluon
    assert kda_scans.kda_scans is kda_fused_bwd.kda_scans is kda_fused_scans
    assert kda_fused_bwd.kda_intra_bwd_gluon is channel_intra
    assert fused_scans.gdn_scans is fused_bwd.gdn_scans is scans_gluon
    assert fused_bwd.gdn_intra_bwd is intra_gluon


def test_compiled_for_hopper():
    """Nothing is spilled, the products run beside one another, and shared memory suffices."""
    rows = lines_of("compile_gluon.py")
    assert {row["kernel"] for row in rows} == {*PRODUCTS}
    for row in rows:
        assert not row["spilled"], row
        assert not row["serialized"], row
        assert 0 < row["shared"] <= 227 << 10, row
        # of 64 keys those of twice 64 terms or columns are half as many
        products = PRODUCTS[row["kernel"]] if row["K"] == 128 else 1 + (1 + 1 + 1 + 1 + 1)
        assert row["from_registers"] == 4 * products * row["workers"], row


def test_intra_bwd_compiled_for_hopper():
    """Products run beside one another, shared memory suffices, next to nothing is spilled."""
    rows = lines_of("compile_intra_gluon.py")
    rows, channel, forward = rows[:2], rows[2], rows[3:]
    assert [row["form"] for row in rows] == [["bf16", 1], ["fp16", 4]]
    for row in rows:
        assert row["spilled"] <= (16 if row["form"][1] == 1 else 128), row
        assert not row["serialized"], row
        assert 0 < row["shared"] <= 227 << 10, row
        # a half: four products of 128 terms and four of 64, 64 columns each
        assert row["products"] == 2 * (4 * 8 + 4 * 4), row
    assert channel["form"] == "channel" and not channel["serialized"], channel
    assert channel["spilled"] <= 512 and 0 < channel["shared"] <= 227 << 10, channel
    assert channel["products"] == 2 * (4 * 8 + 4 * 4), channel
    assert len(forward) == 7
    for row in forward:
        (form, K), chunks = row["form"], row["form"][0].startswith("chunks")
        assert row["spilled"] <= (16 if chunks else 64), row
        assert not row["serialized"], row
        programs = by_load.ring_programs(K, int(form.split()[1][0]), 4) if chunks else 4
        assert 0 < row["shared"] + 1024 <= (228 << 10) // programs, row
        # K K^T and Q K^T, and four products of 64 terms
        assert row["products"] == 2 * (K // 16) + 4 * 4, row
