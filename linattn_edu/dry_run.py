"""``linattn_edu.route`` and ``python -m linattn_edu route``: which kernels a call runs, and why.

The call is made on tensors without numbers. Whatever it would launch is written down in place of
being launched, with what was chosen on the way there.
"""

import argparse
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu import choices
from linattn_edu.choices import GPU, GPUS, INTERPRETER, Choice
from linattn_edu.ops import check
from linattn_edu.ops.ema import ema_scan
from linattn_edu.ops.gdn import chunk_gated_delta_rule
from linattn_edu.ops.gdn2 import chunk_gdn2
from linattn_edu.ops.kda import chunk_kda
from linattn_edu.ops.ssd import mamba_chunk_scan_combined

CANNOT = "impl='triton' cannot run here: "
# decision -> what it takes -> how that is said in a step, "" for what goes without saying; a text
# alone for whatever it takes
SETS = {"fused": "fused stages", "staged": "stage by stage"}
KERNELS = {"gluon": "Gluon", "triton": "plain Triton", "one": "plain Triton", "two": "plain Triton"}
IN_GLUON = f"{KERNELS['gluon']}: "
SAID = {
    "gdn_backward_stages": SETS,
    "kda_forward_stages": SETS,
    "kda_backward_stages": SETS,
    "ssd_stages": SETS,
    "chunk_limit": {64: "", None: "chunks of {} at most"},
    "kda_fused_intra_bwd": KERNELS,
    "kda_near": {"anchored": "near channels by their own kernel", "all": ""},
    "gluon": KERNELS,  # a launcher of a kernel in Gluon that is off in this process
    "kda_gate_prepare": KERNELS,
    "kda_halved": {"far": "", None: "halved rows: {}"},
    "pieces_by_maps": {0: "", None: "pieces of {}"},
    "pieces_by_warm_up": {0: "", None: "pieces of {}"},
    "scan_rows": {"table": "", "unpipelined": "2 warps a program"},
    "widest": "",
    "ssd_pieces": "",
    "ssd_piece": "",
    "ssd_piece_bwd": "",
    "ssd_heads": {1: "", None: "heads of a group in {} parts"},
    "transposed": {"upright": "", "transposed": "transposed"},
    "intra_ring": {0: "a program a chunk", None: "{} programs a multiprocessor"},
    "both_widths": {0: "", 1: "launched for two widths of tiles"},
    "together": {0: "two launches", 1: "one launch"},
    "workers": {1: "", None: "{} tiles of values a program"},
    "chunk_fwd": {"two": "", "one": "intra_chunk and scan in one"},
    "scan_intra_bwd": {"two": "", "one": "scan_bwd and intra_chunk_bwd in one"},
    "head_groups": {1: "", None: "{} groups of heads"},
    "exchange": {None: "maps of {} ranks are gathered"},
}
# decision -> the passes whose stages it takes
OF_PASS = {
    "gdn_backward_stages": ("backward",),
    "kda_forward_stages": ("forward", "backward"),
    "kda_backward_stages": ("backward",),
    "ssd_stages": ("forward", "backward"),
}


class Step(NamedTuple):
    """A kernel that is launched, and the reasons for it: what was chosen since the one before that
    does not go without saying.
    """

    kernel: str
    why: tuple[str, ...]
    times: int = 1

    def __str__(self) -> str:
        times = f" x {self.times}" if self.times > 1 else ""
        return f"  {self.kernel + times:<36}{'; '.join(self.why)}".rstrip()


@dataclass(frozen=True)
class Route:
    """The kernels of a call in their order, forward and backward.

    stages: Pass -> which stages it runs, and why.  choices: all that was chosen: (decision, what it
    took, why).
    """

    function: str
    gpu: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    stages: dict[str, str]
    choices: tuple[tuple[str, str | int, str], ...] = ()

    @property
    def kernels(self) -> list[str]:
        """The names of all kernels, in the order of their launches."""
        return [s.kernel for s in (*self.forward, *self.backward) for _ in range(s.times)]

    def __str__(self) -> str:
        lines = [f"{self.function} on {self.gpu}"]
        for name, steps in (("forward", self.forward), ("backward", self.backward)):
            if steps or name in self.stages:
                why = f": {self.stages[name]}" if name in self.stages else ""
                lines += [name + why, *map(str, steps)]
        return "\n".join(lines)


def route(function: Callable, *args, gpu: str | GPU | None = None, **kwargs) -> Route:
    """Which kernels a call runs, and why; nothing is compiled and nothing runs.

    Args:
        function: An operator of this library, as :func:`chunk_gated_delta_rule`.
        args, kwargs: What it would be called with. Of tensors only shape, strides, dtype and device
            count; with `gpu` they may be on the device ``meta``, which takes no memory. Numbers are
            needed of cu_seqlens alone. With a cp_context the route is that of its rank; nothing is
            sent, and no other rank need ask.
        gpu: The GPU that is asked about, which need not be there: "t4", "a100", "l4", "4090",
            "h100", "h200" or "b200". None: where the tensors are.

    Returns:
        A :class:`~linattn_edu.dry_run.Route`: ``forward`` and ``backward``, a step a launch, and
        ``kernels``, their names. Printed, it has a line a step: the kernel and the reasons for it.
        The backward pass is that of a call in which every floating-point tensor has a gradient;
        there is none where the function has none. Where the reference runs, ``stages`` says why.

    Raises:
        ValueError: the name of the GPU is unknown; tensors are on ``meta`` and no GPU is named;
            cu_seqlens without numbers. Beside these, what the function itself raises.

    The choices are made in ``linattn_edu.kernels.routes``.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    given = bound.arguments
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    about, refused = _gpu(gpu, device), None
    if about is None:  # the CPU: the function's own checks are made as if kernels ran
        about, refused = INTERPRETER, check._why_not(device, ())
    wanted = given.get("impl", "auto")
    if refused and wanted == "triton":
        raise ValueError(f"{CANNOT}{refused}; impl='reference' can")
    if wanted in ("auto", "reference") and "impl" in inspect.signature(function).parameters:
        given["impl"] = "triton"
    _sequences(function, given)
    name = getattr(function, "__name__", str(function))
    try:
        steps, told = _run(about, function, bound, None)
    except ValueError as error:
        if wanted != "auto" or CANNOT not in str(error):
            raise
        refused = str(error).split(CANNOT)[1].split("; impl=")[0]
        steps, told = (), []
    if refused or wanted == "reference":
        why = "reference stages, in PyTorch: " + (refused or 'impl="reference"')
        return Route(name, str(gpu or device), (), (), {"forward": why, "backward": why})
    try:
        back, told_back = _run(about, function, bound, "backward")
    except (RuntimeError, ValueError):
        back, told_back = (), []
    stages = {
        which: f"{_said(decision, takes)}: {why}"
        for decision, takes, why in (*told, *told_back)
        for which in OF_PASS.get(decision, ())
    }
    return Route(name, about.name, steps, back, stages, (*told, *told_back))


def _gpu(gpu: str | GPU | None, device: torch.device) -> GPU | None:
    """The GPU that is asked about; None: the CPU, without the interpreter."""
    if isinstance(gpu, GPU):
        return gpu
    if gpu is not None:
        if str(gpu).lower() not in GPUS:
            raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}")
        return GPUS[str(gpu).lower()]
    if device.type == "meta":
        raise ValueError(f"gpu must be named for tensors on meta: one of {', '.join(GPUS)}")
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device)
        return GPU(has.name, (has.major, has.minor), has.multi_processor_count)
    return INTERPRETER if check.interpreted() else None


def _sequences(function: Callable, given: dict) -> None:
    """Keep the boundaries of packed sequences where the host can read them."""
    bounds = given.get("cu_seqlens")
    if not isinstance(bounds, Tensor):
        return
    if given.get("cu_seqlens_cpu") is None:
        if bounds.device.type == "meta":
            raise ValueError("cu_seqlens must have numbers, got a tensor on meta")
        if "cu_seqlens_cpu" in inspect.signature(function).parameters:
            given["cu_seqlens_cpu"] = bounds.cpu()


def _run(gpu: GPU, function: Callable, bound, which: str | None) -> tuple[tuple[Step, ...], list]:
    """(steps, what was chosen) of the forward pass, or of the backward pass."""
    steps: list[Step] = []
    told: list[tuple[str, str | int, str]] = []
    fresh: list[str] = []
    listens = [which is None]

    def listen(name: str, choice: Choice, record: object, more: tuple) -> None:
        if not listens[0] and name not in OF_PASS:
            return
        fields = record._asdict() if hasattr(record, "_asdict") else {}
        fields |= fields.pop("kind")._asdict() if "kind" in fields else {}
        fields = {n: str(x).removeprefix("torch.") for n, x in fields.items()}
        fields["generation"] = fields.get("generation", "").capitalize()
        one = name, choice.takes, choice.why.format(*more, **fields)
        if name == "gluon":  # what was chosen before is not what runs
            fresh[:] = [text for text in fresh if not text.startswith(IN_GLUON)]
        if one not in told:
            told.append(one)
            if name not in OF_PASS and (said := _said(name, choice.takes)):
                fresh.append(f"{said}: {one[2]}")

    def launched(run: Callable, kernel, args: tuple, grid, kwargs: dict) -> None:
        if not listens[0]:
            return
        name = kernel.fn.__name__
        # what a scan enters with may be launched between the choice of its kernel and that one
        why = tuple(x for x in fresh if "_gluon_" in name or not x.startswith(IN_GLUON))
        fresh[:] = [x for x in fresh if x not in why]
        if steps and steps[-1].kernel == name and not why:
            steps[-1] = steps[-1]._replace(times=steps[-1].times + 1)
        else:
            steps.append(Step(name, why))

    def call() -> None:
        leaves = [_leaf(x, which) if n != "cu_seqlens_cpu" else x for n, x in arguments.items()]
        own = inspect.BoundArguments(bound.signature, dict(zip(arguments, leaves, strict=True)))
        with torch.set_grad_enabled(which is not None):
            out = function(*own.args, **own.kwargs)
        if which is None:
            return
        out = [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]
        out = [x for x in out if x.requires_grad]
        listens[0] = True
        wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(out, wanted, [torch.empty_like(x) for x in out], allow_unused=True)

    arguments = dict(bound.arguments)
    if check.triton_problem():
        call()
        return (), []
    from linattn_edu.kernels.host.watching import launches

    while True:
        with launches(launched) as seen, choices.ask(gpu, listen):
            if seen:
                call()
                return tuple(steps), told
        time.sleep(0.01)  # another thread's launches are seen


def _leaf(x: object, which: str | None) -> object:
    """x without its numbers."""
    if not isinstance(x, Tensor):
        return x
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return y.requires_grad_(which is not None and y.is_floating_point())


def _said(decision: str, takes: str | int) -> str:
    """What a decision took, in words."""
    said = SAID.get(decision, KERNELS)
    if isinstance(said, dict):
        said = said.get(takes, said.get(None, "{}"))
    return said.format(takes)


# -- the command

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _delta(B, T, H, HV, K, V):
    return {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "beta": (B, T, HV)}


def _gdn(B, T, H, HV, K, V):
    return _delta(B, T, H, HV, K, V) | {"g": (B, T, HV)}


def _kda(B, T, H, HV, K, V):
    return _delta(B, T, H, HV, K, V) | {"g": (B, T, HV, K)}


def _gdn2(B, T, H, HV, K, V):
    gates = {"g": (B, T, HV, K), "b": (B, T, HV, K), "w": (B, T, HV, V)}
    return {n: s for n, s in _delta(B, T, H, HV, K, V).items() if n != "beta"} | gates


def _ssd(B, T, H, G, P, N):
    return {"x": (B, T, H, P), "dt": (B, T, H), "A": (H,), "B": (B, T, G, N), "C": (B, T, G, N)}


def _ema(B, T, H, D):
    return {"x": (B, T, H, D), "g": (B, T, H)}


# name -> function, sizes -> shapes, arguments in float32, tokens of a chunk
OPERATORS = {
    "gdn": (chunk_gated_delta_rule, _gdn, ("g",), 64),
    "kda": (chunk_kda, _kda, ("g",), 64),
    "gdn2": (chunk_gdn2, _gdn2, ("g",), 64),
    "ssd": (mamba_chunk_scan_combined, _ssd, ("dt", "A"), 256),
    "ema": (ema_scan, _ema, ("g",), 64),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``python -m linattn_edu route``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "sizes:\n  gdn, kda, gdn2  B T H HV K V\n"
        "  ssd             B T H G P N\n  ema             B T H D\n\n"
        "example: python -m linattn_edu route gdn 8 4096 16 16 128 128 --gpu h100"
    )
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("sizes", type=int, nargs="+", metavar="SIZE", help="see below")
    parser.add_argument("--gpu", choices=GPUS, help="default: the GPU of this machine")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--chunk-size", type=int, metavar="C")
    parser.add_argument(
        "--packed", action="store_true", help="the B sequences one after the other, by cu_seqlens"
    )
    parser.add_argument("--forward", action="store_true", help="this pass alone")
    parser.add_argument("--backward", action="store_true", help="this pass alone")


def main(args: argparse.Namespace) -> int:
    """Print the route that is asked for; 2 for sizes that do not fit."""
    function, shapes, wide, chunk_size = OPERATORS[args.operator]
    names = list(inspect.signature(shapes).parameters)
    if len(args.sizes) != len(names):
        print(f"{args.operator} has the sizes {' '.join(names)}, got {len(args.sizes)} numbers")
        return 2
    gpu = _gpu(args.gpu, torch.device("cuda")) if args.gpu or torch.cuda.is_available() else None
    if gpu is None:
        print(f"there is no GPU here: name one with --gpu, of {', '.join(GPUS)}")
        return 2
    sizes = dict(zip(names, args.sizes, strict=True))
    options = {"chunk_size": args.chunk_size or chunk_size}
    if args.packed:
        bounds = torch.arange(sizes["B"] + 1) * sizes["T"]
        options |= {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds}
        sizes |= {"B": 1, "T": sizes["B"] * sizes["T"]}
    try:
        tensors = {
            n: torch.empty(
                s, dtype=torch.float32 if n in wide else DTYPES[args.dtype], device="meta"
            )
            for n, s in shapes(**sizes).items()
        }
        found = route(function, gpu=gpu, **tensors, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        print(error)
        return 2
    if args.forward != args.backward:
        left = "forward" if args.forward else "backward"
        stages = {n: s for n, s in found.stages.items() if n == left}
        none = {"backward" if args.forward else "forward": ()}
        found = replace(found, stages=stages, **none)
    print(found)
    return 0
