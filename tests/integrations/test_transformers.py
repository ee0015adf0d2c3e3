"""Models of transformers on our operators, against transformers' own PyTorch."""

import copy
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from forks import python
from integrations import models
from torch import Tensor

import linattn_edu
from linattn_edu.integrations import calls
from linattn_edu.integrations import transformers as in_use
from linattn_edu.integrations.transformers import undo, use
from linattn_edu.layers import GatedDeltaNet
from linattn_edu.testing import assert_close, relative_rms

transformers.logging.set_verbosity_error()  # that it has no kernels
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
every_model = pytest.mark.parametrize("name", models.NAMES)


def tokens(*shape: int) -> Tensor:
    return torch.randint(
        2, models.VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(0)
    )


def gradients(model: torch.nn.Module, out: Tensor) -> dict[str, Tensor]:
    """Of the logits, each times a number of chance."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    loss = (out * weight.to(out)).sum()
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def assert_same(
    got: dict[str, Tensor], exact: dict[str, Tensor], theirs: Callable[[], dict[str, Tensor]]
) -> None:
    """Each gradient next to its own size; where it cancels, to twice what transformers' own in
    fp32 is off.
    """
    assert got.keys() == exact.keys()
    off = {name for name, x in got.items() if relative_rms(x, exact[name]) > TOLERANCE}
    others = theirs() if off else {}
    for name in off:
        assert_close(name, got[name], exact[name], 2 * relative_rms(others[name], exact[name]))


def logits(model: torch.nn.Module, ids: Tensor, **given) -> Tensor:
    return model(input_ids=ids, use_cache=False, **given)[0]


@every_model
def test_logits_and_gradients(name):
    """Against transformers' own PyTorch in float64, of which norms and recurrence are in fp32."""
    model, ids = models.build(name), tokens(2, 100)
    exact = models.exact(model).train()  # Mamba-2's layers call another function then
    wanted = logits(exact, ids)
    of_wanted = gradients(exact, wanted)
    model.train()
    with use(model, impl="reference"):
        got = logits(model, ids)
        of_got = gradients(model, got)
    assert_close("logits", got, wanted, TOLERANCE)
    assert_same(of_got, of_wanted, lambda: gradients(model, logits(model, ids)))
    model.eval()


@pytest.mark.parametrize("name", models.WITH_HEAD)
def test_generation_with_left_padding(name):
    model, ids = models.build(name), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0,
        "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    wanted = model.generate(ids, **options)
    with use(model, impl="reference"):
        got = model.generate(ids, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    for step, x, y in zip(range(8), got.logits, wanted.logits, strict=True):
        assert_close(f"logits of step {step}", x, y, TOLERANCE)


LENGTHS = (37, 70, 1, 3, 64)
SEQUENCES = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
PACKED = {
    "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    "cu_seq_lens_q": torch.tensor([0, *LENGTHS]).cumsum(0).int(),
    "seq_idx": SEQUENCES.int(),
}
# Boundaries come under one name, the other, or both.
NAMED = {"a": ("cu_seq_lens_q",), "b": ("seq_idx",), "c": ("cu_seq_lens_q", "seq_idx")}


def softmax_apart(name: str) -> dict:
    """What keeps sequences apart in the layers with softmax attention too."""
    if name != "granitemoehybrid":
        return {"position_ids": PACKED["position_ids"]}
    # its mask does not look at positions: only flash attention keeps sequences apart, or a mask
    apart = (SEQUENCES.mT == SEQUENCES).tril()
    mask = torch.zeros(apart.shape).masked_fill(~apart, -1e30)[None, None]
    return {"attention_mask": {"full_attention": mask, "linear_attention": None}}


def packable(name: str) -> torch.nn.Module:
    """Glm5-Next's indexed attention knows no boundaries: a model without it."""
    if name == "glm5_next":
        return models.build(name, linear_only=True)
    return models.build(name)


@every_model
def test_packed_sequences_are_as_alone(name):
    model, ids = packable(name), tokens(1, sum(LENGTHS))
    more, exact = softmax_apart(name), models.exact(model)

    def one_by_one(model: torch.nn.Module) -> Tensor:
        return torch.cat([logits(model, part) for part in ids.split(LENGTHS, 1)], 1)

    alone = one_by_one(exact)
    wanted = gradients(exact, alone)
    with use(model, impl="reference"):
        for names in NAMED.values():
            got = logits(model, ids, **more, **{key: PACKED[key] for key in names})
            assert_close(f"logits, given {names}", got, alone, TOLERANCE)
        of_got = gradients(model, got)
        # the test sees sequences that run into each other
        mixed = logits(model, ids, **more)
        with pytest.raises(AssertionError, match="exceeds"):
            assert_close("logits without boundaries", mixed, alone, 0.05)
    assert_same(of_got, wanted, lambda: gradients(model, one_by_one(model)))


@every_model
def test_training_steps_and_the_way_back(name):
    model, ids = models.build(name), tokens(2, 70)
    before, kept = attributes(model), copy.deepcopy(model.state_dict())
    first = logits(model, ids)

    def train() -> list[float]:
        copied = copy.deepcopy(model).train()
        optimizer = torch.optim.AdamW(copied.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            out = logits(copied, ids)
            loss = torch.nn.functional.cross_entropy(
                out[:, :-1].flatten(0, 1), ids[:, 1:].flatten() % out.shape[-1]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    wanted = train()
    with use(model, impl="reference"):
        assert train() == pytest.approx(wanted, rel=TOLERANCE)
    assert attributes(model) == before
    assert torch.equal(logits(model, ids), first)
    assert all(torch.equal(x, kept[key]) for key, x in model.state_dict().items())


def attributes(model: torch.nn.Module) -> list[dict]:
    """The names in the model's files, and what its modules have that is no tensor."""
    files = {sys.modules[type(m).__module__] for m in model.modules()}
    own = [
        {k: v for k, v in vars(m).items() if callable(v) or k[0] != "_"} for m in model.modules()
    ]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    return [{f.__name__: dict(vars(f)) for f in files}, *own, {"hooks": hooks}]


def test_what_it_says():
    model = models.build("qwen3_next")
    undo = use(model, impl="reference")
    said = repr(undo)
    for words in (
        "Qwen3NextForCausalLM (model_type qwen3_next) on linattn_edu, impl='reference'",
        "modeling_qwen3_next, for every model of this file:",
        "torch_chunk_gated_delta_rule -> chunk_gated_delta_rule",
        "causal_conv1d_fn -> causal_conv1d_fn",
        "Qwen3NextRMSNormGated.forward -> rms_norm_gated, in 1 layers of this model",
    ):
        assert words in said
    undo()
    assert repr(undo) == "Qwen3NextForCausalLM (model_type qwen3_next): undone"


@pytest.mark.parametrize("name", ["olmo_hybrid", "qwen3_next"])
def test_a_layer_that_doubles_beta_says_so(name, monkeypatch):
    told, operator = [], calls.gdn.chunk_gated_delta_rule

    def listening(*args, **kwargs):
        told.append((kwargs.get("allow_neg_eigval", False), kwargs["beta"].max().item() > 1))
        return operator(*args, **kwargs)

    monkeypatch.setattr(calls.gdn, "chunk_gated_delta_rule", listening)
    with use(models.build(name)), torch.no_grad():
        models.build(name)(input_ids=tokens(2, 70))
    doubled = name == "olmo_hybrid"
    assert told and set(told) == {(doubled, doubled)}


def test_uses_may_be_undone_in_any_order():
    model, other = models.build("mamba2"), models.build("mamba2", num_heads=4, head_dim=16)
    before = attributes(model), attributes(other)
    first, second, third = (use(m, impl="reference") for m in (model, other, model))
    with pytest.raises(
        ValueError, match=r"impl must be 'reference', that of the use of .* not undone"
    ):
        use(other, impl="auto")
    first()
    first()  # no second time
    file = sys.modules[type(model).__module__]
    assert file.mamba2_chunk_scan.func is calls.mamba_chunk_scan_combined
    third()
    second()
    assert (attributes(model), attributes(other)) == before


def test_what_others_have_replaced_is_left_alone():
    model = models.build("mamba2")
    file = sys.modules[type(model).__module__]
    original, theirs = file.mamba2_chunk_scan, lambda *args, **kwargs: None
    undo = use(model)
    file.mamba2_chunk_scan = theirs
    with pytest.warns(UserWarning, match=r"mamba2_chunk_scan was replaced by someone else"):
        undo()
    assert file.mamba2_chunk_scan is theirs
    file.mamba2_chunk_scan = original


def test_what_others_replace_between_two_uses_comes_back():
    model = models.build("mamba2")
    file = sys.modules[type(model).__module__]
    original, theirs = file.mamba2_chunk_scan, lambda *args, **kwargs: None
    first = use(model)
    file.mamba2_chunk_scan = theirs
    second = use(model)
    assert file.mamba2_chunk_scan is calls.mamba_chunk_scan_combined
    first()
    second()
    assert file.mamba2_chunk_scan is theirs
    file.mamba2_chunk_scan = original


def test_a_warning_that_is_an_error_leaves_nothing_in_use():
    model = models.build("mamba2")
    before = attributes(model)
    file, theirs = sys.modules[type(model).__module__], lambda *args, **kwargs: None
    original, undo = file.causal_conv1d_fn, use(model)
    file.causal_conv1d_fn = theirs
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="replaced by someone else"):
        warnings.simplefilter("error")
        undo()
    assert file.causal_conv1d_fn is theirs
    file.causal_conv1d_fn = original
    assert attributes(model) == before


def test_an_undone_use_is_not_entered_again():
    undo = use(models.build("mamba2"))
    undo()
    with pytest.raises(RuntimeError, match=r"Mamba2ForCausalLM \(model_type mamba2\): undone"):
        undo.__enter__()


@pytest.mark.parametrize("name", ("qwen3_next", "mamba2"))
@pytest.mark.parametrize("copied", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))))
def test_a_copy_of_a_model_in_use_has_an_undo_of_its_own(name, copied):
    """Also on another impl than that of the first, which is undone."""
    model = models.build(name)
    before = private(model)
    with use(model, impl="reference"):
        other = copied(model)
    assert private(model) == before
    for impl in ("auto", "reference"):
        with use(other, impl=impl):
            assert private(other) != before
        assert private(other) == before


def private(model: torch.nn.Module) -> list[tuple]:
    """The names of what modules have that is not PyTorch's, and their hooks."""
    plain = vars(torch.nn.Module()).keys()
    return [(sorted(vars(m).keys() - plain), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("error", (ValueError, KeyboardInterrupt))
@pytest.mark.parametrize("at", (0, 1, 2, 5, None))
@pytest.mark.parametrize("name", ("qwen3_next", "mamba2"))
def test_an_exception_inside_use_leaves_nothing_in_use(name, at, error, monkeypatch):
    """While an attribute is set, or (None) hooks are added; alone, and beside another use."""
    model = models.build(name)
    untouched = attributes(model)
    for beside in (False, True):
        outer = use(model, impl="reference") if beside else None
        before, left = attributes(model), [at]

        def set_and_fail(owner, key, value, left=left):
            setattr(owner, key, value)
            left[0] -= 1
            if left[0] == -1:
                raise error("no more")

        def hooks_and_fail(model, original=in_use._hooks):
            yield from original(model)
            raise error("no more")

        with monkeypatch.context() as patch:
            if at is None:
                patch.setattr(in_use, "_hooks", hooks_and_fail)
            else:
                patch.setattr(in_use, "setattr", set_and_fail, raising=False)
            with pytest.raises(error, match="no more"):
                use(model, impl="reference")
        assert attributes(model) == before
        if outer is not None:
            outer()
    assert attributes(model) == untouched
    with use(model, impl="auto"):  # another impl: nothing is left of those that failed
        pass


def test_a_use_whose_result_is_dropped_can_be_undone():
    model, other = models.build("mamba2"), models.build("mamba2", num_heads=4, head_dim=16)
    before = attributes(model), attributes(other)
    use(model)
    use(model)
    kept = use(other)
    assert undo(model) == 2 and undo(model) == 0
    file = sys.modules[type(model).__module__]
    assert file.mamba2_chunk_scan is calls.mamba_chunk_scan_combined  # for the other
    kept()
    assert undo(other) == 0 and (attributes(model), attributes(other)) == before
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        undo("mamba2")


def test_layers_that_are_ours_already():
    with pytest.raises(ValueError, match="got GatedDeltaNet without one"):
        use(GatedDeltaNet(hidden_size=8, num_heads=1, head_dim=8))


def test_a_layer_as_in_mamba_ssm(monkeypatch):
    """Its fused function gives the output: there is no other way to go."""
    file = ModuleType("theirs")
    monkeypatch.setitem(sys.modules, "theirs", file)
    code = """
import torch
mamba_split_conv1d_scan_combined = None
class Mamba2(torch.nn.Module):
    def forward(self, *args, **kwargs):
        return mamba_split_conv1d_scan_combined(*args, **kwargs)
"""
    exec(code, vars(file))
    file.mamba_split_conv1d_scan_combined = theirs = lambda *args, **kwargs: None
    H, P, N, T = 2, 4, 3, 9
    shapes = (1, T, 2 * H * P + 2 * N + H), (H * P + 2 * N, 4), (H * P + 2 * N,), (H,)
    tensors = *map(torch.randn, shapes), -torch.rand(H), torch.rand(H)
    layer = file.Mamba2()
    with use(layer):
        out = layer(*tensors, 16, headdim=P, seq_idx=None)
        want = linattn_edu.mamba_split_conv1d_scan_combined(*tensors, 16, headdim=P)
    assert torch.equal(out, want)
    assert file.mamba_split_conv1d_scan_combined is theirs


def test_refusals():
    model = models.build("mamba2")
    before = attributes(model)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
        use({})
    with pytest.raises(ValueError, match=r"impl must be one of .*, got 'fast'"):
        use(model, impl="fast")
    unknown = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    )
    with pytest.raises(ValueError, match=r"got GPT2LMHeadModel \(model_type gpt2\) without one"):
        use(unknown)
    assert attributes(model) == before


def test_a_model_in_use_can_be_copied_and_saved():
    model, ids = models.build("qwen3_next"), tokens(1, 40)
    with use(model, impl="reference"):
        wanted = logits(model, ids)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(logits(other, ids), wanted)


@pytest.mark.parametrize("name", ("qwen3_next", "mamba2"))
def test_decoding_where_gradients_are_recorded(name):
    model, ids = models.build(name), tokens(2, 40)

    def decode() -> Tensor:
        out = model(input_ids=ids, use_cache=True)
        key = "cache_params" if name == "mamba2" else "past_key_values"
        more = {key: out[key], "use_cache": True}
        return model(input_ids=ids[:, -1:], **more)[0].detach()

    wanted = decode()
    with use(model, impl="reference"):
        assert_close("logits", decode(), wanted, TOLERANCE)


def test_what_a_step_is_given_reaches_it_where_gradients_are_recorded():
    """Slots, a ring, and numbers of every channel; the bits of the function itself."""
    draw = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=draw)
    weight, bias, slots = randn(6, 4).requires_grad_(), randn(6), torch.tensor([4, 0, 2])
    x, pool, seen = randn(3, 6), randn(5, 6, 9), torch.tensor([7, 0, 30])
    H, P, N = 2, 4, 3
    state = randn(5, H, P, N)
    rate = (-torch.rand(H, P, N, generator=draw)).requires_grad_()
    more = randn(3, H, P), rate, randn(3, 1, N), randn(3, 1, N), randn(H, P), None, randn(H, P)
    for lent, own, first, rest, where in (
        (calls.causal_conv1d_update, linattn_edu.causal_conv1d_update, (x, pool),
         (weight, bias, "silu"), {"cache_seqlens": seen, "conv_state_indices": slots}),
        (calls.selective_state_update, linattn_edu.selective_state_update,
         (state, randn(3, H, P)), more, {"dt_softplus": True, "state_batch_indices": slots}),
    ):  # fmt: skip
        copies = [tuple(t.clone() for t in first) for _ in range(2)]
        got = lent(*copies[0], *rest, **where, unknown=None)
        with torch.no_grad():
            want = own(*copies[1], *rest, **where)
        assert torch.equal(got, want) and all(map(torch.equal, *copies))


def run(code: str, **variables: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
    env.pop("TRITON_INTERPRET", None)
    done = python("-c", code, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_enable():
    code = """
import importlib.util, sys
import torch
from linattn_edu.integrations.transformers import disable, enable
enable()
enable()
from integrations import models
from linattn_edu.testing import assert_close
from transformers.utils import import_utils

assert import_utils._is_package_available("fla", return_version=True) == (True, "0.6.0")
assert import_utils._is_package_available("mamba_ssm", return_version=True) == (True, "2.3.2")
ids, got = torch.randint(2, 96, (2, 70)), {}
for name in models.NAMES:
    with torch.no_grad():
        got[name] = models.build(name)(input_ids=ids)[0]
from fla.ops.kda import chunk_kda
import fla.ops.kda
import fla.modules
import mamba_ssm.ops.triton.ssd_combined
assert fla.ops.kda.chunk_kda is chunk_kda and fla.__spec__.name == "fla"
assert "linattn_edu" in chunk_kda.__module__
try:
    enable(impl="reference")
except ValueError as error:
    assert "impl must be 'auto', that of the loan, got 'reference'" in str(error)
disable()
disable()
assert importlib.util.find_spec("fla") is None and "fla" not in sys.modules
for name in models.NAMES:  # their files once more, without ours
    del sys.modules[type(models.build(name)).__module__]
import transformers
for module in list(sys.modules):
    if module.startswith("transformers.models.") or module == "transformers":
        del sys.modules[module]
import transformers
models.transformers = transformers
models.build.cache_clear()
for name in models.NAMES:
    model = models.build(name)
    with torch.no_grad():
        assert_close(name, got[name], model(input_ids=ids)[0], 1e-5)
print(len(got))
"""
    assert int(run(code)) == len(models.NAMES)


def test_enable_refuses_packages_of_others(tmp_path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("")
    code = """
import sys
sys.path.insert(0, sys.argv[1] if sys.argv[1:] else PATH)
import fla
from linattn_edu.integrations.transformers import enable
before = list(sys.meta_path)
try:
    enable()
except RuntimeError as error:
    print(error)
assert sys.meta_path == before
"""
    said = run(f"PATH = {str(tmp_path)!r}\n" + code)
    assert said.startswith("fla must not be imported before enable()")


# Where transformers 4.57.6 lies, the other end of the range; `make venv` installs it.
OLD = Path(os.environ.get("LINATTN_EDU_OLD_TRANSFORMERS", ROOT / ".venv" / "transformers-4.57"))


@pytest.mark.skipif(not OLD.is_dir(), reason=f"transformers 4.57 is not in {OLD}")
def test_transformers_before_5_15():
    path = os.pathsep.join([str(OLD), str(ROOT), str(ROOT / "tests")])
    said = run((Path(__file__).parent / "before_5_15.py").read_text(), PYTHONPATH=path)
    assert said.split() == ["4.57.6", "qwen3_next", "mamba2", "bamba", "zamba2"]
