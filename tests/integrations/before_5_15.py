"""A program of test_transformers.py: models of transformers 4.57.6 on our operators."""

import torch
import transformers
from integrations import models

from linattn_edu.integrations.transformers import enable, use
from linattn_edu.testing import assert_close

transformers.logging.set_verbosity_error()
print(transformers.__version__)
ids = torch.randint(2, 96, (2, 70), generator=torch.Generator().manual_seed(0))
weight = torch.randn(2, 70, models.VOCABULARY)
mask = torch.ones_like(ids)
mask[0, :13] = 0
boundaries = torch.tensor([0, 70], dtype=torch.int32)


def passes(model):
    out = model(input_ids=ids, use_cache=False)[0]
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((out * weight).sum(), parameters, allow_unused=True)
    return [x for x in (out, *gradients) if x is not None]


def generate(model):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip


try:
    enable()
except RuntimeError as error:
    assert "use(model) works here" in str(error) and not torch.cuda.is_available()
for name in ("qwen3_next", "mamba2", "bamba", "zamba2"):
    # Zamba2's own PyTorch is wrong past a chunk, and bounds steps from below
    model = models.build(name, **({"chunk_size": 128} if name == "zamba2" else {}))
    for layer in model.modules():
        if name == "zamba2" and hasattr(layer, "time_step_min"):
            layer.time_step_min = 0.0
    model.train()
    wanted = passes(model)
    model.eval()
    text, before = generate(model), [dict(vars(m)) for m in model.modules()]
    with use(model, impl="reference") as undo:
        model.train()
        for x, y in zip(passes(model), wanted, strict=True):
            assert_close(name, x, y, 1e-5)
        model.eval()
        assert torch.equal(generate(model), text)
        try:
            model(input_ids=ids, cu_seq_lens_q=boundaries)
        except ValueError as error:
            assert "older than 5.15, would take packed sequences for one" in str(error)
        else:
            raise AssertionError("boundaries that no layer reads must be refused")
    assert [dict(vars(m)) for m in model.modules()] == before
    print(name)
