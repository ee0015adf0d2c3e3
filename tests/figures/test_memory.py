"""The memories of the figure, against the rules written out."""

import re

import torch

from linattn_edu.figures.memory import KEYS, RULES, TOKENS, VALUES, figure, states, wanted
from linattn_edu.testing import assert_close

EYE = torch.eye(4, dtype=torch.float64)


def written_out():
    """The same states by products of the transitions I - beta k^T k."""
    found = {rule: [torch.zeros(4, 4, dtype=torch.float64)] for rule in RULES}
    for name, value, beta, alpha, _ in TOKENS:
        k = torch.tensor(KEYS[name], dtype=torch.float64)
        write = beta * torch.outer(k, VALUES[value - 1])
        keep = EYE - beta * torch.outer(k, k)
        for rule, transition in zip(RULES, (EYE, keep, alpha * keep), strict=True):
            found[rule].append(transition @ found[rule][-1] + write)
    return found


def test_the_states_are_those_of_the_rules():
    found, want = states(), written_out()
    for rule in RULES:
        assert len(found[rule]) == len(TOKENS) + 1
        assert not found[rule][0].any()
        for S, S_want in zip(found[rule][1:], want[rule][1:], strict=True):
            assert_close(rule, S, S_want, 1e-14)


def test_the_numbers_in_the_frames_are_distances_of_what_is_read():
    frames, _ = figure()
    want = written_out()
    for t, (svg, _) in enumerate(frames):
        numbers = re.findall(r">(\d\.\d\d)</text>", svg)
        distances = [
            (torch.tensor(KEYS[key], dtype=torch.float64) @ want[rule][t] - VALUES[n - 1]).norm()
            for rule in RULES
            for key, n in wanted(t).items()
        ]
        assert numbers == [f"{x:.2f}" for x in distances]


def test_what_the_captions_say():
    adds, delta, gate = (written_out()[rule] for rule in RULES)
    a, b, c = (torch.tensor(x, dtype=torch.float64) for x in KEYS.values())
    assert all(torch.equal(adds[1], S[1]) for S in (delta, gate)), "1: the same"
    assert abs(b @ adds[1]).max() == 0 and abs((a @ gate[2])[0] - 0.9) < 1e-15, "2"
    assert abs((c @ adds[3])[0] - 0.6) < 1e-15 and abs((c @ delta[3])[:2]).max() < 1e-15, "3"
    assert all((a @ S[3])[2] > 0.5 for S in (adds, delta, gate)), "3: a finds a part of 3"
    assert (a @ adds[4])[0] == 1 and (a @ adds[4])[3] == 1, "4: a reads 1 and 4"
    assert_close("4: a reads 4 alone", a @ delta[4], VALUES[3], 1e-14)
    off = [(c @ S - VALUES[2]).norm() for S in (delta[3], delta[4])]
    assert off[0] < 1e-14 and off[1] > 0.5, "4: c pays"
    assert_close("5: fades to 0.3", gate[5], 0.3 * gate[4], 1e-14)
    assert torch.equal(adds[5], adds[4]) and torch.equal(delta[5], delta[4])
    assert_close("6: half way", b @ delta[6], (VALUES[1] + VALUES[2]) / 2, 1e-14)
    assert (b @ gate[5])[1] < 0.25, "6: little was left"
    missing = [VALUES[2] - b @ S for S in (delta[6], delta[7])]
    assert_close("7: halved", missing[1], missing[0] / 2, 1e-14)
