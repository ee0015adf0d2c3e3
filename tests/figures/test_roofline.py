"""The roofs: bounds from the counts of the benchmarks, times from the GPU that was measured."""

import re

import pytest

from benchmarks.cases import CASES, work
from linattn_edu import teaching
from linattn_edu.figures import roofline

DATA = teaching.measured()


@pytest.mark.parametrize("gpu", roofline.GPUS, ids=lambda gpu: gpu.name)
def test_bounds_are_those_of_the_counts(gpu):
    for b in roofline.bounds(DATA, gpu):
        w = work(CASES[roofline.CASE], f"stage:{b.stage}")
        floor = w.floor_ms(gpu.bandwidth * 1e9, gpu.products * 1e12)
        assert max(b.bytes_ms, b.products_ms) == pytest.approx(floor, rel=1e-9)
        assert (b.products_ms > b.bytes_ms) == (b.intensity > gpu.corner)
    assert gpu.source.startswith("https://")


def test_times_are_shown_for_the_measured_gpu_alone():
    rows = {r["what"]: r["ms"] for r in DATA["rows"] if r["case"] == roofline.CASE and "ms" in r}
    for gpu in roofline.GPUS:
        found = [b.measured_ms for b in roofline.bounds(DATA, gpu)]
        here = DATA["gpu"] == f"NVIDIA {gpu.name}"
        assert found == [rows[f"stage:{s}"] if here else None for s in roofline.STAGES]
    assert sum(DATA["gpu"] == f"NVIDIA {gpu.name}" for gpu in roofline.GPUS) == 1


def test_a_point_lies_on_the_roof_and_its_measured_square_below():
    frames, _, (_, names) = roofline.figure(DATA)
    for gpu, (svg, _) in zip(roofline.GPUS, frames, strict=True):
        found = roofline.bounds(DATA, gpu)
        dots = [float(y) for y in re.findall(r'<circle[^>]* cy="([^"]+)"', svg)]
        roofs = [min(gpu.products, b.intensity * gpu.bandwidth / 1e3) for b in found]
        assert dots == pytest.approx([roofline._y(rate) for rate in roofs], abs=0.1)
        squares = re.findall(r'<rect x="[^"]+" y="([^"]+)" width="8"', svg)
        assert len(squares) == (len(found) if found[0].measured_ms else 0)
        assert all(float(y) + 4 > dot for y, dot in zip(squares, dots, strict=False))
    assert names == [gpu.name for gpu in roofline.GPUS]


def test_the_table_has_each_gpu_and_its_source():
    lines = roofline.table().splitlines()[2:]
    for gpu, row in zip(roofline.GPUS, lines, strict=True):
        assert row.startswith(f"| {gpu.name} |") and f"({gpu.source})" in row
