"""python -m benchmarks.blocks: layers of models in transformers, on ours and on others' operators.

Three of Qwen3-Next's Gated DeltaNet layers and one with softmax attention, and two of Mamba-2's, of
the width of a real model with random weights: tokens a second of prefill, of a training step and of
decoding. "linattn_edu" is use(model); "fla" and "mamba_ssm" have their functions in the same
places, where they are installed; "transformers" is its own PyTorch. Every time is the median of a
few calls. It needs transformers 5.15, whose files call such functions by name.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from unittest import mock

import torch

from benchmarks import measure
from benchmarks.adapters import version_of
from benchmarks.cases import FUNCTIONS
from benchmarks.progress import fail
from benchmarks.results import default_path, load, merge, save, stamped
from linattn_edu.integrations.transformers import use
from linattn_edu.testing import relative_rms

# (batch, tokens) of prefill and a training step, batches of decoding, calls before and in a median
SIZES = {"cuda": ((4, 4096), (1, 32), 3, 10), "cpu": ((1, 512), (1,), 1, 5)}
WIDTH = {  # arguments of the configurations
    "cuda": {
        "gdn_block": {
            "hidden_size": 2048, "intermediate_size": 512, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
        "mamba2_block": {"hidden_size": 2560, "num_heads": 80, "head_dim": 64, "state_size": 128},
    },
    "cpu": {
        "gdn_block": {
            "hidden_size": 256, "intermediate_size": 64, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
        "mamba2_block": {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128},
    },
}  # fmt: skip
LAYERS = {  # Qwen3-Next's have one with softmax attention after three
    "gdn_block": [*["linear_attention"] * 3, "full_attention"],
    "mamba2_block": ["linear_attention"] * 2,
}
VOCABULARY = 1024
# What a library has in place of a function of the models' files: module and name of it.
THEIRS = {
    "fla": {
        "torch_chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        "torch_recurrent_gated_delta_rule": (
            "fla.ops.gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
        ),
    },
    "mamba_ssm": {
        "mamba2_chunk_scan": ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
        "mamba2_split_conv1d_scan_combined": (
            "mamba_ssm.ops.triton.ssd_combined",
            "mamba_split_conv1d_scan_combined",
        ),
        "mamba2_selective_state_update": (
            "mamba_ssm.ops.triton.selective_state_update",
            "selective_state_update",
        ),
    },
}
CONVOLUTION = {
    name: ("causal_conv1d", name) for name in ("causal_conv1d_fn", "causal_conv1d_update")
}
PEERS = {"gdn_block": "fla", "mamba2_block": "mamba_ssm"}
# what `use` puts into each
RAN = {
    "gdn_block": (
        FUNCTIONS["gdn"], FUNCTIONS["gdn_decode"], "causal_conv1d_fn", "causal_conv1d_update",
    ),
    "mamba2_block": (
        FUNCTIONS["ssd"], FUNCTIONS["ssd_decode"], "causal_conv1d_fn", "causal_conv1d_update",
    ),
}  # fmt: skip


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Whoever asks for these packages meanwhile does not find them."""
    kept = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(kept)


@hidden(*PEERS.values(), "causal_conv1d", "kernels")
def build(case: str, device: torch.device) -> torch.nn.Module:
    """A model whose functions are PyTorch: transformers takes peers' that it finds."""
    import transformers

    transformers.logging.set_verbosity_error()  # that it has no kernels
    torch.manual_seed(0)
    arguments = {"vocab_size": VOCABULARY, **WIDTH[device.type][case]}
    arguments["num_hidden_layers"] = len(LAYERS[case])
    if case == "gdn_block":
        arguments |= {"num_experts": 0, "layer_types": LAYERS[case]}
        config = transformers.Qwen3NextConfig(**arguments)
        model = transformers.Qwen3NextForCausalLM(config)
    else:
        config = transformers.Mamba2Config(**arguments, n_groups=1)
        model = transformers.Mamba2ForCausalLM(config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return model.to(device, dtype)


def functions(library: str) -> dict[str, Callable] | None:
    """A library's functions by the names that they replace; None where it is not installed.

    The short convolution is that of causal_conv1d where it is installed, else transformers' own.
    """
    found = {}
    for names in (THEIRS[library], CONVOLUTION):
        try:
            theirs = {n: getattr(importlib.import_module(m), f) for n, (m, f) in names.items()}
        except ImportError:
            if names is not CONVOLUTION:
                return None
            continue
        found |= theirs
    if "causal_conv1d_fn" not in found:  # mamba_ssm's fused function needs it
        found.pop("mamba2_split_conv1d_scan_combined", None)
    return found


@contextlib.contextmanager
def running_on(library: str, model: torch.nn.Module) -> Iterator[None]:
    """A model on the functions of a library."""
    with contextlib.ExitStack() as stack:
        if library == "linattn_edu":
            stack.enter_context(use(model))
        elif library != "transformers":
            file = sys.modules[type(model).__module__]
            for name, function in functions(library).items():
                if hasattr(file, name):
                    stack.enter_context(mock.patch.object(file, name, _known(function)))
        yield


def _known(function: Callable) -> Callable:
    """A function without the keywords that it does not know."""
    known = inspect.signature(function).parameters
    return lambda *args, **kwargs: function(
        *args, **{k: x for k, x in kwargs.items() if k in known}
    )


def prefill(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    @torch.no_grad()
    def call():
        return model(input_ids=ids, use_cache=False, logits_to_keep=1)[0]

    return call


def step(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Both passes and the optimizer's step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=ids.is_cuda or None)

    def call():
        model.train()
        out = model(input_ids=ids, use_cache=False)[0]
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.eval()
        return loss.detach()

    return call


def decoding(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A token after a prompt of 64."""
    with torch.no_grad():
        out = model(input_ids=ids[:, :64], use_cache=True)
    name = "cache_params" if "cache_params" in out else "past_key_values"
    cache = {name: out[name]}

    @torch.no_grad()
    def call():
        return model(input_ids=ids[:, -1:], use_cache=True, **cache)[0]

    return call


def time_ms(f: Callable[[], object], device: torch.device, warmup: int, repeats: int) -> float:
    """The median, by the host's clock: a server waits for the host too."""
    times = []
    for turn in range(warmup + repeats):
        _wait(device)
        begun = time.perf_counter()
        f()
        _wait(device)
        if turn >= warmup:
            times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rows_of(case: str, device: torch.device) -> Iterator[dict]:
    """A row for each library and call."""
    (B, T), batches, warmup, repeats = SIZES[device.type]
    model = build(case, device).eval()
    ids = torch.randint(VOCABULARY, (max(B, *batches), T), device=device)
    calls = {
        f"prefill_{B}x{T}": (prefill, ids[:B], B * T),
        f"step_{B}x{T}": (step, ids[:B], B * T),
        **{f"decode_{n}": (decoding, ids[:n], n) for n in batches},
    }
    peer, wanted = PEERS[case], {}
    libraries = ["transformers", "linattn_edu"]
    if device.type == "cuda" and functions(peer) is not None:
        libraries.append(peer)
    for library in libraries:
        for what, (make, given, tokens) in calls.items():
            row = {"case": case, "library": library, "what": what}
            try:
                with running_on(library, model):
                    call = make(model, given)
                    got = call()
                    ms = time_ms(call, device, warmup, repeats)
            except torch.cuda.OutOfMemoryError:
                model.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                yield row | {"refused": "out of memory"}
                continue
            row |= {"ms": round(ms, 4), "tokens_per_s": round(1e3 * tokens / ms, 1)}
            if library == "transformers":
                wanted[what] = got
            elif what in wanted:
                row["difference"] = relative_rms(got, wanted[what])
            yield row


def heading(device: torch.device) -> dict:
    """Where and with what it was measured."""
    import triton

    gpu = "CPU" if device.type == "cpu" else measure.gpu_name()
    data = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    data |= {name: version_of(name) for name in ("fla", "mamba_ssm")}
    data["cuda"] = torch.version.cuda
    data["transformers"] = importlib.metadata.version("transformers")
    return data | {"date": date.today().isoformat()}


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=__doc__)
    p.add_argument("--cases", default=",".join(PEERS), help="comma-separated (default: both)")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--out", type=Path, help="file of results (chapters/data/blocks_<gpu>.json)")
    args = p.parse_args(argv)
    refused = measure.usable_gpu() if args.device == "cuda" else None
    if refused:
        return fail(refused)
    device = torch.device(args.device)
    name = "cpu" if args.device == "cpu" else measure.gpu_name()
    path, rows = args.out or default_path(name, "blocks"), []
    old, top = load(path), heading(device)
    if old and old["transformers"] != top["transformers"]:
        old = None  # other layers
    for case in args.cases.split(","):
        if case not in PEERS:
            return fail(f"there is no case {case!r}: {', '.join(PEERS)}")
        for row in rows_of(case, device):
            print(json.dumps(row), flush=True)
            rows.append(stamped(row, RAN[case]))
            save(path, merge(old, {**top, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
