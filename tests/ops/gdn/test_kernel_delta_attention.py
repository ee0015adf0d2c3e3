"""kernel_delta_attention and kda_decay: ejkernel's recurrence in float64, its cases, bad input."""

import pytest
import torch
import torch.nn.functional as F
from gdn_checks import launches
from grids import parametrize
from recurrent_cases import TOLERANCE, close, cotangents, double, run
from refusals import refuses

from linattn_edu import chunk_gated_delta_rule, kda_decay, kernel_delta_attention
from linattn_edu.testing import assert_close, poison, relative_rms

CUDA = torch.cuda.is_available()
IMPLS = ("triton", "reference")


def inputs(T, device, *, B=2, H=2, K=20, V=12, dtype=torch.float32, decay=True, state=True):
    generator = torch.Generator(device=device).manual_seed(T)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    randn = lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=wide)
    x = {"query": randn(B, T, H, K), "key": randn(B, T, H, K), "value": randn(B, T, H, V)}
    x["beta"] = randn(B, T, H).sigmoid()
    x = {n: t.to(dtype) for n, t in x.items()}
    if decay:
        x["decay"] = -F.softplus(randn(B, T, H) - 1)
    return x | ({"initial_state": randn(B, H, K, V)} if state else {})


def recurrence(
    query, key, value, beta, decay=None, *, initial_state=None, norm=True, scale=None,
    decay_first=True,
):  # fmt: skip
    """Token by token; the error is taken against the decayed state, or the one before."""
    if norm:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    (B, T, H, K), V = query.shape, value.shape[-1]
    scale = K**-0.5 if scale is None else scale
    S = query.new_zeros(B, H, K, V) if initial_state is None else initial_state
    outputs = []
    for t in range(T):
        decayed = S if decay is None else decay[:, t].exp()[..., None, None] * S
        held = torch.einsum("bhk,bhkv->bhv", key[:, t], decayed if decay_first else S)
        write = beta[:, t, :, None] * (value[:, t] - held)
        S = decayed + key[:, t, :, :, None] * write[:, :, None]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", query[:, t], S))
    return torch.stack(outputs, 1), S


@parametrize(dtype=TOLERANCE, chunked=(True, False), impl=IMPLS)
def test_outputs_and_gradients(dtype, chunked, impl, device):
    x = inputs(100 if CUDA else 9, device, dtype=dtype)
    want = run(recurrence, double(x))
    options = {"use_chunked": chunked, "impl": impl, "chunk_size": 16}
    with poison():
        outputs, gradients = run(kernel_delta_attention, x, cotangents(want[0]), **options)
    of_outputs, of_gradients, of_gates = TOLERANCE[dtype]
    for a, b in zip(outputs, want[0], strict=True):
        close("output", a, b, of_outputs)
    for name, a in gradients.items():
        close(f"d{name}", a, want[1][name], of_gates if name in ("beta", "decay") else of_gradients)


@parametrize(decay=(True, False), state=(True, False), T=(1, 17), impl=IMPLS)
def test_what_may_be_left_out(decay, state, T, impl, device):
    """Both come back whatever is given: o in the dtype of the query, the state in float32."""
    H = 16 if T == 1 else 2  # of one token q k may cancel in any head
    x = inputs(T, device, H=H, decay=decay, state=state, dtype=torch.bfloat16)
    want = recurrence(**double(x), scale=0.5)
    for chunked in (True, False):
        got = kernel_delta_attention(**x, softmax_scale=0.5, use_chunked=chunked, impl=impl)
        assert [y.dtype for y in got] == [torch.bfloat16, torch.float32]
        for a, b in zip(got, want, strict=True):
            assert_close("value", a, b, 5e-3)


def test_rows_are_normalised_unless_told_not_to(device):
    x = inputs(5, device)
    x |= {n: F.normalize(x[n], dim=-1) / 2 for n in ("query", "key")}
    for norm in (True, False):
        got = kernel_delta_attention(**x, use_qk_l2norm=norm)
        for a, b in zip(got, recurrence(**double(x), norm=norm), strict=True):
            assert_close("value", a, b, 1e-5)


def test_the_error_is_that_of_the_decayed_state(device):
    """As ejkernel computes it, and not as its documentation writes it."""
    x = inputs(9, device)
    o, S = kernel_delta_attention(**x)
    for decay_first in (True, False):
        o_other, S_other = recurrence(**double(x), decay_first=decay_first)
        errors = (relative_rms(o, o_other), relative_rms(S, S_other))
        assert max(errors) < 1e-5 if decay_first else min(errors) > 1e-2


def test_a_step_after_a_prompt(device):
    """The state of 9 tokens in chunks, then two single tokens, which take the recurrent kernel."""
    x = inputs(11, device)
    want = recurrence(**double(x))
    state, outputs = x.pop("initial_state"), []
    for part in (slice(0, 9), slice(9, 10), slice(10, 11)):
        now = {n: t[:, part] for n, t in x.items()}
        with launches() as ran:
            o, state = kernel_delta_attention(**now, initial_state=state, impl="triton")
        assert part.start == 0 or [f.__name__ for f in ran] == ["recurrent_kernel"]
        outputs.append(o)
    assert_close("o", torch.cat(outputs, 1), want[0], 1e-5)
    assert_close("state", state, want[1], 1e-5)


def test_is_the_chunked_gated_delta_rule(device):
    x = inputs(20, device)
    got = kernel_delta_attention(**x, chunk_size=32)
    query, key, value, beta, decay, state = x.values()
    want = chunk_gated_delta_rule(
        query, key, value, decay, beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, chunk_size=32,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_decay(dtype, device):
    generator = torch.Generator(device=device).manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, device=device)
    x = {"gate": 4 * randn(2, 5, 3), "A_log": randn(3), "dt_bias": randn(3)}
    x = {n: t.to(dtype) for n, t in x.items()}
    formula = lambda gate, A_log, dt_bias: (-A_log.exp() * (1 + (gate + dt_bias).exp()).log(),)
    want = run(formula, double(x))
    got = run(lambda **a: (kda_decay(**a),), x)
    assert got[0][0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (got[0][0] <= 0).all()
    assert_close("decay", got[0][0], want[0][0], 1e-6)
    for name, dx in run(formula, double(x), cotangents(got[0]))[1].items():
        assert_close(f"d{name}", got[1][name], dx, 8e-3 if dtype == torch.bfloat16 else 1e-5)
    zeros = torch.zeros(4)
    assert_close("at zero", kda_decay(torch.zeros(2, 10, 4), zeros, zeros),
                 torch.full((2, 10, 4), 0.5).log(), 1e-6)  # fmt: skip


new = torch.zeros
REFUSED = {
    "query": ({"query": [1.0]}, TypeError, "query must be a torch.Tensor .*got list"),
    "key": ({"key": new(2, 5, 1, 20)}, r"key must have shape \[B=2, T=5, H=2, K=20\]"),
    "heads": ({"value": new(2, 5, 4, 12)}, r"value must have shape \[B=2, T=5, H=2, V"),
    "value dtype": (
        {"value": new(2, 5, 2, 12).half()},
        TypeError,
        "value must be torch.float32 like query, got torch.float16",
    ),
    "no beta": ({"beta": None}, TypeError, "beta must be a torch.Tensor .*got NoneType"),
    "channel decay": ({"decay": new(2, 5, 2, 20)}, "decay must have 3 dimensions"),
    "decay > 0": ({"decay": new(2, 5, 2) + 1}, "decay must be a log decay, <= 0"),
    "decay device": (
        {"decay": new(2, 5, 2, device="meta")},
        "decay must be on cpu like query, got meta"
    ),
    "state": (
        {"initial_state": new(2, 2, 12, 20)},
        r"initial_state must have shape \[B=2, H=2, K=20, V=12\], got \(2, 2, 12, 20\)"
    ),
    "long keys": ({"query": new(2, 5, 2, 257), "key": new(2, 5, 2, 257), "initial_state": None},
                  "query and key must have K <= 256, got K=257"),
    "long values": ({"value": new(2, 5, 2, 513), "initial_state": None},
                    "value must have V <= 512, got V=513"),
    "chunk_size": ({"chunk_size": 48}, "chunk_size must be one of 16, 32, 64, got 48"),
    "scale": ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a number or None, got str"),
    "scale beyond floats": ({"softmax_scale": 10**400}, "must be finite, got 1000"),
    "sparse": ({"value": new(2, 5, 2, 12).to_sparse()}, TypeError,
               "value must be a dense tensor, got layout torch.sparse_coo"),
    "norm": ({"use_qk_l2norm": 2}, TypeError, "use_qk_l2norm must be True or False, got 2"),
    "chunked": ({"use_chunked": "0"}, TypeError, "use_chunked must be True or False, got '0'"),
    "impl": ({"impl": "xla"}, "impl must be one of 'auto', 'triton', 'reference'"),
}  # fmt: skip


token = {"use_chunked": False}
test_refused_in_chunks = refuses(kernel_delta_attention, lambda: inputs(5, "cpu"), REFUSED)
test_refused_by_token = refuses(kernel_delta_attention, lambda: inputs(5, "cpu") | token, REFUSED)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_beta_in_float64_makes_the_state_so(chunked, device):
    x = inputs(5, device)
    x["beta"] = x["beta"].double()
    o, S = kernel_delta_attention(**x, use_chunked=chunked)
    assert (o.dtype, S.dtype) == (torch.float32, torch.float64)


def test_decay_is_refused():
    with pytest.raises(ValueError, match=r"A_log must have shape \[H=3\], got \(2,\)"):
        kda_decay(new(2, 5, 3), new(2), new(3))
    with pytest.raises(TypeError, match=r"dt_bias must be a torch.Tensor .*got NoneType"):
        kda_decay(new(2, 5, 3), new(3), None)
    with pytest.raises(ValueError, match=r"gate must have 3 dimensions \[B, T, H\]"):
        kda_decay(new(5, 3), new(3), new(3))
