"""The calls of fla's own tests of the other rules, by the names under which ours are lent.

Forms, dtypes and layouts are theirs: tests/ops/test_{delta,gdn2,gdp,dplr_delta,rwkv7,simple_gla}.py
and the naive functions that these compare with. Values are asked of the functions in tests/ops.
"""

from itertools import pairwise

import gdn_checks
import pytest
import torch
import torch.nn.functional as F
from gdn_checks import launches

from linattn_edu.integrations.lent import MODULES
from linattn_edu.integrations.packages import _with_impl
from linattn_edu.testing import assert_close

HALF, FLOAT = torch.float16, torch.float32
BOUNDS = (0, 10, 25, 25, 40)
# relative RMS, of outputs and of gradients, as in fla's tests
TOLERANCES = {True: 0.005, False: 0.02}


def lent(path):
    """As enable(impl="reference") lends it."""
    module, _, name = path.rpartition(".")
    return _with_impl(MODULES[f"fla.ops.{module}"][name], "reference")


class Draw:
    """Tensors as fla's tests make them, of 40 tokens of 3 heads, K = 12, V = 8."""

    def __init__(self, packed, n=1):
        self.generator = torch.Generator().manual_seed(42)
        self.shape, self.n = (1 if packed else 2, 40, 3), n
        self.states = len(BOUNDS) - 1 if packed else 2
        self.bounds = {"cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)} if packed else {}

    def randn(self, *shape, dtype=HALF):
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def of(self, *last, steps=1, dtype=HALF):
        B, T, H = self.shape
        return self.randn(B, T * steps, H, *last, dtype=dtype)

    def key(self, steps=1, dtype=HALF):
        return F.normalize(self.of(12, steps=steps, dtype=FLOAT), dim=-1).to(dtype)

    def state(self, dtype=FLOAT):
        return self.randn(self.states, 3, 12, 8, dtype=dtype)

    def cotangents(self):
        return self.of(8), self.state()


def agree(f, reference, x, draw, **options):
    """f against another of its names, o, the last state and the gradients of all tensors."""
    do, dht = draw.cotangents()
    do = do.to(x.get("v", x.get("r")).dtype)
    got, want = (gdn_checks.run(x, do, dht, g, **options) for g in (f, reference))
    for name, y in got.items():
        assert y.dtype == want[name].dtype
        assert_close(name, y, want[name], TOLERANCES[name in ("o", "ht")])


packs = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
scales = pytest.mark.parametrize("scale", [None, 1, 0.1])


@packs
@scales
def test_delta_rule(packed, scale):
    """By position; the states in 16 bits where sequences are packed."""
    d = Draw(packed)
    x = {"q": d.of(12), "k": d.key(), "v": d.of(8), "beta": d.of().sigmoid()}
    x["initial_state"] = d.state(HALF if packed else FLOAT)

    def by_position(name):
        def f(q, k, v, beta, **more):
            return lent(f"delta_rule.{name}")(q, k, v, beta, **more)

        return f

    chunk, recurrent = map(by_position, ("chunk_delta_rule", "fused_recurrent_delta_rule"))
    agree(chunk, recurrent, x, d, scale=scale, output_final_state=True, **d.bounds)


@packs
@scales
def test_gdn2(packed, scale):
    """The naive one takes sequences one by one, with a state [H, K, V]."""
    d, names = Draw(packed), ("chunk.chunk_gdn2", "fused_recurrent.fused_recurrent_gdn2")
    x = {"q": d.key(), "k": d.key(), "v": d.of(8), "g": F.logsigmoid(d.of(12, dtype=FLOAT))}
    x |= {"b": d.of(12).sigmoid(), "w": d.of(8).sigmoid(), "initial_state": d.state()}
    options = {"scale": scale, "output_final_state": True, **d.bounds}
    chunk, recurrent = (lent(f"gdn2.{n}") for n in names)
    agree(chunk, recurrent, x, d, **options, use_qk_l2norm_in_kernel=False)
    agree(chunk, one_by_one(lent("gdn2.naive.naive_recurrent_gdn2")), x, d, **options)


def one_by_one(naive):
    """A naive function over packed sequences, as fla's tests call it."""

    def f(initial_state, cu_seqlens=None, **x):
        options = {n: x.pop(n) for n in ("scale", "output_final_state")}
        if cu_seqlens is None:
            return naive(**x, initial_state=initial_state, **options)
        parts = []
        for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
            one = {m: t[:, a:b] for m, t in x.items()}
            parts.append(naive(**one, initial_state=initial_state[n], **options))
        return [torch.cat(y, i) for i, y in zip((1, 0), zip(*parts, strict=True), strict=True)]

    return f


@packs
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("normalise", [False, True])
def test_gated_delta_product(packed, n, normalise):
    """g and states in 16 bits where sequences are packed; chunks that the caller counted."""
    d, kind = Draw(packed), HALF if packed else FLOAT
    x = {"q": d.key(), "k": d.key(steps=n), "v": d.of(8, steps=n)}
    x |= {"g": F.logsigmoid(d.of(dtype=FLOAT)).to(kind), "beta": d.of(steps=n).sigmoid()}
    x["initial_state"] = d.state(kind)
    options = {"num_householder": n, "output_final_state": True, **d.bounds}
    chunk = lent("gated_delta_product.chunk_gated_delta_product")

    def naive(q, k, v, g, beta, initial_state, num_householder, cu_seqlens=None, **more):
        return lent("gated_delta_product.naive.naive_recurrent_gated_delta_product")(
            q, k, v, g, beta, 0.5, cu_seqlens, initial_state=initial_state,
            num_householder=num_householder, output_final_state=True,
        )  # fmt: skip

    agree(
        lambda **y: chunk(**y, chunk_indices=None, chunk_indices_dp=None),
        lent("gated_delta_product.chunk_ref.chunk_gated_delta_product_ref"),
        x, d, scale=0.1, use_qk_l2norm_in_kernel=normalise, **options,
    )  # fmt: skip
    agree(chunk, naive, x, d, scale=0.5, **options)


@packs
@scales
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_dplr(packed, scale, dtype):
    """a of unit length and b = -a, gk in float32."""
    d, a = Draw(packed), Draw(packed).key(dtype=dtype)
    x = {"q": d.of(12, dtype=dtype), "k": d.of(12, dtype=dtype), "v": d.of(8, dtype=dtype)}
    x |= {"a": a, "b": -a, "gk": F.logsigmoid(d.of(12, dtype=FLOAT)), "initial_state": d.state()}
    chunk, recurrent = (
        lent(f"generalized_delta_rule.dplr.{n}_dplr_delta_rule")
        for n in ("chunk", "fused_recurrent")
    )
    agree(chunk, recurrent, x, d, scale=scale, output_final_state=True, **d.bounds)


HEADS_FIRST = {
    "generalized_delta_rule.dplr.fused_recurrent_dplr_delta_rule": (
        ("q", "k", "v", "a", "b", "gk"), "generalized_delta_rule.dplr.naive",
        ("dplr_recurrence", "dplr_chunkwise"),
    ),
    "delta_rule.fused_recurrent_delta_rule": (
        ("q", "k", "v", "beta"), "delta_rule.naive",
        ("delta_rule_recurrence", "delta_rule_chunkwise"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("own", HEADS_FIRST)
def test_naive_functions_with_heads_first(own):
    order, module, names = HEADS_FIRST[own]
    d = Draw(False)
    x = {"q": d.key(dtype=FLOAT), "k": d.key(dtype=FLOAT), "v": d.of(8, dtype=FLOAT)}
    x |= {"a": -x["k"], "b": x["k"], "gk": F.logsigmoid(d.of(12, dtype=FLOAT))}
    x = {n: (x | {"beta": d.of(dtype=FLOAT).sigmoid()})[n] for n in order}
    o, state = lent(own)(*x.values(), output_final_state=True)
    for name in names:
        got = lent(f"{module}.{name}")(*(t.transpose(1, 2) for t in x.values()))
        assert_close("o", got[0].transpose(1, 2), o, 1e-5)
        assert_close("state", got[1], state, 1e-5)


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("scale", [None, 1])
def test_rwkv7(T, scale):
    """Numbers far from zero, rates of a removal key; nothing but o unless a state is asked for."""
    draw = torch.Generator().manual_seed(42)
    r, w, k, v = torch.empty(4, 2, T, 1, 12).uniform_(-8, -6, generator=draw)
    kk = F.normalize(torch.empty(2, T, 1, 12).uniform_(-1, 1, generator=draw), dim=-1)
    rates = torch.empty(2, T, 1, 12).uniform_(0, 0.1, generator=draw)
    h0 = torch.randn(2, 1, 12, 12, generator=draw)
    options = {"scale": scale, "initial_state": h0, "output_final_state": True}
    want = lent("generalized_delta_rule.dplr.fused_recurrent.fused_recurrent_dplr_delta_rule")(
        q=r, k=k, v=v, a=-kk, b=kk * rates, gk=w, **options
    )
    tensors = {"r": r, "w": w, "k": k, "v": v}
    mul, plain = (lent(f"rwkv7.{n}_recurrent_rwkv7") for n in ("fused_mul", "fused"))
    given = tensors | {"a": -kk, "b": kk * rates}
    for got in (
        mul(**tensors, kk=kk, a=rates, **options), plain(**given, **options),
        lent("rwkv7.chunk_rwkv7")(**given, **options),
    ):  # fmt: skip
        assert_close("o", got[0], want[0], 2e-3)
        assert_close("ht", got[1], want[1], 2e-3)


@packs
@scales
def test_simple_gla(packed, scale):
    """Token by token against the naive one, which returns its state unless told not to."""
    d = Draw(packed)
    x = {"q": d.of(12, dtype=FLOAT), "k": d.of(12, dtype=FLOAT), "v": d.of(8, dtype=FLOAT)}
    x |= {"g": F.logsigmoid(d.of(dtype=FLOAT)), "initial_state": d.state()}
    recurrent = lent("simple_gla.fused_recurrent.fused_recurrent_simple_gla")
    naive = lent("simple_gla.naive.naive_recurrent_simple_gla")
    agree(recurrent, one_by_one(naive), x, d, scale=scale, output_final_state=True, **d.bounds)
    del x["initial_state"]
    if not packed:
        assert naive(**x)[1].shape == (2, 3, 12, 8)
    assert recurrent(**x, output_final_state=False, **d.bounds)[1] is None


SERVED = {
    "generalized_delta_rule.chunk_dplr_delta_rule": ("q", "k", "v", "a", "b", "gk"),
    "rwkv7.chunk_rwkv7": ("r", "w", "k", "v", "a", "b"),
    "rwkv7.fused_recurrent_rwkv7": ("r", "w", "k", "v", "a", "b"),
    "gdn2.chunk_gdn2": ("q", "k", "v", "g", "b", "w"),
    "simple_gla.fused_recurrent_simple_gla": ("q", "k", "v"),
    "delta_rule.chunk_delta_rule": ("q", "k", "v", "beta"),
}


@pytest.mark.parametrize("path", SERVED)
def test_keywords_that_are_not_ours(path):
    """Dropped, as fla does; but not heads before tokens, which it refuses too. The boundaries have
    their other name.
    """
    d = Draw(True)
    x = {n: d.of(*(() if n == "beta" else (8,)), dtype=FLOAT) for n in SERVED[path]}
    gates = {n: -x[n].abs() for n in ("g", "gk", "w") if n in x and not (n == "w" and "g" in x)}
    x |= gates
    f, bounds = lent(path), d.bounds["cu_seqlens"]
    want = f(**x, cu_seqlens=bounds)
    got = f(**x, cu_seq_lens_q=bounds, head_first=False, use_cache=True)
    assert torch.equal(got[0], want[0])
    with launches() as ran, pytest.raises(ValueError, match="head_first is not supported"):
        f(**x, head_first=True)
    assert not ran
