"""Sizes that are no multiple of a block, and sequences without tokens, each tensor an allocation of
its own: a read far past the end of one is an error, as it is not in a cache of memory. One that
stays in its last page only compute-sanitizer sees.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 python tests/gpu/ends.py

causal-conv1d #67 and #101, vllm-ascend #11438, fla #1140.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gdn_checks
from gdn_checks import boundaries
from ops.contract import BY_CHANNEL, conv, ema, gdn, kda, recurrent_gdn, recurrent_kda, ssd

from linattn_edu import causal_conv1d_fn
from linattn_edu.testing import assert_close

SIZES = ((1024, 4099, 4), (64, 131, 4), (8, 67, 3), (24, 5, 8), (16, 1, 2))  # D, T, W
LENGTHS = ([128, 0, 128], [0, 33, 0, 0, 31, 0], [1, 2, 1], [640, 783], [640, 768])
FORMS = (gdn, kda, recurrent_gdn, recurrent_kda, *BY_CHANNEL, ssd[-1], ema, conv)


def documents(D, T, W):
    """Tensors, and a convolution of documents that begin anywhere."""
    generator = torch.Generator().manual_seed(T)
    sizes = {"x": (2, D, T), "weight": (D, W), "bias": (D,), "do": (2, D, T)}
    x = {n: torch.randn(*s, generator=generator) for n, s in sizes.items()}
    x["seq_idx"] = torch.randint(0, 9, (2, T), generator=generator).sort(1)[0].int()

    def run(impl, do, **x):
        f = lambda **x: (causal_conv1d_fn(**x, activation="silu", impl=impl), None)
        return gdn_checks.run(x, do, None, f)

    return x, run


def packed(form, lengths):
    """Tensors, and the operator over sequences of these lengths, in both passes."""
    x, do, dht, options = form.packed(lengths, torch.float32, "cpu")
    x |= {"do": do, "dht": dht, "cu_seqlens": boundaries(lengths)}

    def run(impl, do, dht, cu_seqlens, **x):
        found = form.run(x, do, dht, cu_seqlens=cu_seqlens, impl=impl, **options)
        # sums over tokens may cancel
        return {n: t for n, t in found.items() if form is conv or n not in form.sums()}

    return x, run


def main(device="cuda", sizes=SIZES, lengths=LENGTHS):
    cases = [(f"conv of {s}", *documents(*s), 1e-4) for s in sizes]
    cases += [
        (f"{form} of {n}", *packed(form, n), 1e-4 if form is conv else 1e-3)
        for n in lengths
        for form in FORMS
    ]
    for name, x, run, tol in cases:
        got, want = run("triton", **{n: t.to(device) for n, t in x.items()}), run("reference", **x)
        for n, y in want.items():
            assert_close(f"{name}: {n}", got[n].cpu(), y, tol)
    print("right", len(cases))


if __name__ == "__main__":
    main()
