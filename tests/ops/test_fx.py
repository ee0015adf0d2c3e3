"""torch.fx.symbolic_trace: an operator is one node where its caller's file wraps its name."""

import operator

import pytest
import torch
from torch import fx

import linattn_edu
from linattn_edu import chunk_gated_delta_rule, chunk_kda
from linattn_edu.testing import gdn_inputs, kda_inputs

fx.wrap("chunk_gated_delta_rule")
fx.wrap("chunk_kda")


def scalar_gate(q, k, v, g, beta):
    return 2 * chunk_gated_delta_rule(q, k, v, g, beta)[0]


def channel_gates(q, k, v, g, beta):
    return 2 * chunk_kda(q, k, v, g, beta)[0]


@pytest.mark.parametrize(
    ("f", "inputs", "name"),
    [(scalar_gate, gdn_inputs, "chunk_gated_delta_rule"), (channel_gates, kda_inputs, "chunk_kda")],
)
def test_a_wrapped_operator_is_one_node(f, inputs, name):
    traced = fx.symbolic_trace(f)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls == [getattr(linattn_edu, name), operator.getitem, operator.mul]
    i = inputs(1, 70, 1, 2, 16, 16)
    x = [t.requires_grad_() for t in (i.q, i.k, i.v, i.g, i.beta)]
    got, expected = traced(*x), f(*x)
    assert torch.equal(got, expected)
    gradients = (torch.autograd.grad(o.sum(), x) for o in (got, expected))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_without_the_wrap_a_proxy_is_refused_by_name():
    """The attribute of the package is not the name that was wrapped."""

    def f(q, k, v, g, beta):
        return linattn_edu.chunk_gated_delta_rule(q, k, v, g, beta)[0]

    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor .*, got Proxy"):
        fx.symbolic_trace(f)
