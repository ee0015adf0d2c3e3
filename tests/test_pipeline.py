"""The maps of the stages of Kimi Delta Attention, of Mamba-2 and of a rank of several."""

import xml.etree.ElementTree as ET

import pytest

from linattn_edu import pipeline, teaching
from linattn_edu.ops import kda


def words(svg):
    root = ET.fromstring(svg)
    return {w for e in root.iter("{http://www.w3.org/2000/svg}text") for w in e.text.split()}


def test_the_maps_show_the_stages_of_the_composition():
    known = {*pipeline.KDA_STAGES, *pipeline.KDA_BACKWARD}
    known |= {*pipeline.CP_STAGES, *pipeline.CP_BACKWARD} - {"cp_conv"}
    known |= {"kda_scan"}  # in the place of state and output
    known |= {"state_bwd"}  # of kda_scans, where the states were kept
    assert known == set(kda.Stages.__dataclass_fields__)


@pytest.mark.parametrize("lit", [None, "recurrent", *pipeline.KDA_STAGES])
def test_the_forward_map_has_its_stages_and_one_lit(lit):
    svg = pipeline.kda_svg(lit)
    assert {"recurrent", *pipeline.KDA_STAGES, "P", "A", "w", "u", "kg", "qg", "gc"} <= words(svg)
    assert svg.count("#f2a33a") == (lit is not None)
    assert "id=" not in svg, "ids would clash when a page shows two maps"


@pytest.mark.parametrize("lit", [None, *pipeline.KDA_BACKWARD])
def test_the_backward_map_has_its_stages_and_what_goes_in_and_out(lit):
    svg = pipeline.kda_backward_svg(lit)
    assert {*pipeline.KDA_BACKWARD, "do", "dht", "dq", "dk", "dv", "dβ", "dg", "dh0"} <= words(svg)
    assert {"dqg", "dP", "dkb", "dkg", "dL", "dgc"} <= words(svg)
    assert svg.count("#f2a33a") == (lit is not None)
    assert "id=" not in svg


@pytest.mark.parametrize("lit", [None, "selective_state_update", *pipeline.SSD_STAGES])
def test_the_forward_map_of_mamba2_has_its_stages_and_one_lit(lit):
    svg = pipeline.ssd_svg(lit)
    assert {"recurrence", *pipeline.SSD_STAGES, "dt", "A", "B", "C", "D", "z", "x"} <= words(svg)
    assert {"step", "gc", "s", "h", "S₀", "out"} <= words(svg)
    assert svg.count("#f2a33a") == (lit is not None)
    assert "id=" not in svg


def test_the_whole_forward_pass_of_mamba2_can_be_lit():
    assert pipeline.ssd_svg("ssd").count("#f2a33a") == len(pipeline.SSD_STAGES)


@pytest.mark.parametrize("lit", [None, *pipeline.SSD_BACKWARD])
def test_the_backward_map_of_mamba2_has_its_stages_and_what_goes_in_and_out(lit):
    svg = pipeline.ssd_backward_svg(lit)
    assert {*pipeline.SSD_BACKWARD, "dy", "dht", "dx", "dD", "dC", "dB", "ddt", "dA"} <= words(svg)
    assert {"dh0", "dh_out", "ds", "dB_state", "dgc", "dlast", "dstep"} <= words(svg)
    assert svg.count("#f2a33a") == (lit is not None)
    assert "id=" not in svg


@pytest.mark.parametrize(("lit", "lights"), [(None, 0), ("cp_conv", 1), ("cp_merge", 2)])
def test_the_map_of_a_rank_has_what_is_exchanged_and_its_stages_lit(lit, lights):
    svg = pipeline.cp_svg(lit)
    assert {*pipeline.CP_STAGES, "gather", "S_ext", "M", "S_in", "S₀", "o"} <= words(svg)
    assert svg.count("#f2a33a") == lights
    assert "id=" not in svg


@pytest.mark.parametrize(("lit", "lights"), [(None, 0), ("cp_merge_bwd", 2)])
def test_the_backward_map_of_a_rank_has_what_is_exchanged_and_its_stages_lit(lit, lights):
    svg = pipeline.cp_backward_svg(lit)
    assert {*pipeline.CP_BACKWARD, "gather", "dS_ext", "dM", "dS_out", "dht", "do"} <= words(svg)
    assert svg.count("#f2a33a") == lights
    assert "id=" not in svg


@pytest.mark.parametrize(
    ("lit", "draw"),
    [
        ("kda_intra", pipeline.kda_svg),
        ("kda_scans", pipeline.kda_backward_svg),
        ("kda_output_bwd", pipeline.kda_backward_svg),
        ("kda_wy_bwd", pipeline.kda_backward_svg),
        ("kda_intra_bwd", pipeline.kda_backward_svg),
        ("state", pipeline.pipeline_svg),
        ("state_bwd", pipeline.backward_svg),
        *((stage, pipeline.ssd_svg) for stage in pipeline.SSD_STAGES),
        *((stage, pipeline.ssd_backward_svg) for stage in pipeline.SSD_BACKWARD),
        ("cp_conv", pipeline.cp_svg),
        ("cp_merge", pipeline.cp_svg),
        ("cp_merge_bwd", pipeline.cp_backward_svg),
    ],
)
def test_a_stage_chooses_its_map(lit, draw, capsys):
    assert pipeline.pipeline_svg(lit) == draw(lit)
    teaching.pipeline_map(lit)
    line = capsys.readouterr().out
    assert line.endswith(f"[here: {lit}]\n") and f"-> {lit} ->" in line


@pytest.mark.parametrize("lit", ["ssd", "selective_state_update"])
def test_mamba2_as_a_whole_and_its_recurrence_choose_the_forward_map(lit, capsys):
    assert pipeline.pipeline_svg(lit) == pipeline.ssd_svg(lit)
    teaching.pipeline_map(lit)
    assert capsys.readouterr().out.endswith(f"-> chunk_scan -> out   [here: {lit}]\n")


@pytest.mark.parametrize(
    "draw",
    [
        pipeline.kda_svg,
        pipeline.kda_backward_svg,
        pipeline.ssd_svg,
        pipeline.ssd_backward_svg,
        pipeline.cp_svg,
        pipeline.cp_backward_svg,
    ],
)
def test_an_unknown_stage_is_refused(draw):
    with pytest.raises(ValueError, match="lit must be"):
        draw("solve")
