"""The two passes stage by stage: what the reference's stages read and give."""

from linattn_edu.figures import whole_pass
from linattn_edu.figures.whole_pass import CHUNK, K, V


def test_the_steps_are_those_of_the_two_passes():
    steps = whole_pass.trace()
    forward = ["gate_cumsum", "solve", "wy", "state", "output"]
    backward = ["wy", "state", "output_bwd", "state_bwd", "wy_bwd", "gate_bwd"]
    assert [s.stage for s in steps] == forward + backward
    assert [s.way for s in steps] == ["forward"] * 5 + ["backward"] * 6
    by_name = {(s.stage, s.way): s for s in steps}
    wy = by_name["wy", "forward"]
    assert wy.reads == ("k", "v", "beta", "gc", "A") and wy.gives == ("w", "u")
    last = by_name["wy_bwd", "backward"]
    assert " ".join(last.reads) == "k v beta gc A h v_new dh dv_new dk dgc"


def test_between_the_passes_there_are_the_arguments_gc_and_a_matrix_for_each_chunk():
    steps = whole_pass.trace()
    between = dict(steps[4].left)
    assert between.pop("o") == V
    assert between == {"q": K, "k": K, "v": V, "g": 1, "beta": 1, "gc": 1, "A": CHUNK}
    assert steps[3].left["h"] == K * V // CHUNK
    assert set(steps[-1].left) == {"dq", "dk", "dv", "dg", "dbeta"}
    largest = max(steps, key=lambda s: sum(s.left.values()))
    assert largest.stage == "output_bwd"
