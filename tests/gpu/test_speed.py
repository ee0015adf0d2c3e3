"""No call is slower than its stored row on this card, as far as the card is as fast as it was."""

import pytest
import torch

from benchmarks import measure, results
from benchmarks.adapters import makers
from benchmarks.cases import ALL_CALLS, CASES

SLOWER = 1.05


def slower(ms: float, row: dict, copy: float, stored: float) -> str | None:
    """What is wrong where `ms` is more than SLOWER times the row's; None: nothing.

    copy, stored: Bytes a second of a copy now, and where the row was measured: a card that copies
    more slowly may take so much longer.
    """
    allowed = SLOWER * row["ms"] * max(1.0, stored / copy)
    if ms <= allowed:
        return None
    return (
        f"{row['case']} {row['what']}: {ms:.4f} ms, stored {row['ms']:.4f} of {row['date']}; a "
        f"copy {copy / 1e12:.2f} TB/s, then {stored / 1e12:.2f}"
    )


def test_what_is_slower():
    row = {"case": "gdn_train", "what": "forward", "ms": 1.0, "date": "2026-11-27"}
    assert slower(1.04, row, 3e12, 3e12) is None and slower(1.04, row, 4e12, 3e12) is None
    assert slower(1.2, row, 2.5e12, 3e12) is None
    said = slower(1.06, row, 3e12, 3e12)
    assert said.startswith("gdn_train forward: 1.0600 ms, stored 1.0000") and "3.00 TB/s" in said


def stored():
    """(file, row) of our calls on this card with these versions."""
    if not torch.cuda.is_available():
        return []
    import triton

    here = {"gpu": measure.gpu_name(), "torch": torch.__version__, "triton": triton.__version__}
    found = map(results.load, results.of_operators())
    return [
        (data["bytes_per_s"], row)
        for data in found if all(data[name] == x for name, x in here.items())
        for row in data["rows"]
        if row["library"] == "linattn_edu" and row["what"] in ALL_CALLS and "ms" in row
    ]  # fmt: skip


@pytest.mark.gpu
def test_no_call_is_slower_than_its_row():
    if not (rows := stored()):
        pytest.skip("nothing was measured on this card with these versions")
    wrong = []
    for rate, row in rows:
        case, what = CASES[row["case"]], row["what"]
        i, f = measure.inputs(case), makers(case, what)["linattn_edu"]()
        call = measure.prepare(what, i)
        once = lambda call=call, f=f: call(f)
        with torch.no_grad():
            once()
            graph = what == "decode_graph"
            ms = measure.time_ms(measure.captured(once) if graph else once)
        wrong.append(slower(ms, row, measure.copy_rate(), rate))
    assert not any(wrong), "\n".join(filter(None, wrong))
