"""python -m benchmarks.fusion: Gated DeltaNet in stages and in fused stages, kernel by kernel.

Both passes of both compositions, and each stage of each on the arguments that it gets in its pass.
Times are medians as CUDA graphs, the kernels without the host, L2 emptied before each. Gradients
are compared with the float64 recurrence on few tokens and heads (error_d*), and on all of them with
those of the staged pass (apart).
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import torch

from benchmarks import measure, tables
from benchmarks.cases import FUNCTIONS, Case, work
from benchmarks.progress import EXIT_USAGE
from benchmarks.rows import significant
from linattn_edu.kernels.delta import state, state_bwd
from linattn_edu.kernels.fused import gdn_fwd, gdn_scans
from linattn_edu.kernels.pieces import by_maps, by_warm_up
from linattn_edu.kernels.routes import scan_launch
from linattn_edu.kernels.tiles import cdiv
from linattn_edu.ops import gdn
from linattn_edu.testing import relative_rms

# B, T, H, HV, K = V
SHAPES = (
    (8, 4096, 16, 16, 128), (32, 4096, 8, 8, 128), (1, 32768, 8, 8, 128), (1, 32768, 16, 16, 128),
    (1, 32768, 16, 32, 128), (4, 8192, 16, 16, 64), (1, 7000, 8, 8, 128), (1, 4096, 4, 4, 128),
)  # fmt: skip
TRIAL = ((1, 100, 1, 2, 16), (2, 64, 1, 1, 16))  # on a CPU
FORMS = {"staged": gdn.stages, "fused": gdn.fused_stages}
KEPT = {"staged": ("gc", "A"), "fused": ("gc", "P", "AG")}  # for the backward pass
# the stages that carry a state, and the tables that their launchers choose a tile from
SCANS = {
    "state": state.CONFIGS,
    "state_bwd": state_bwd.CONFIGS,
    "scan": gdn_fwd.SCAN_CONFIGS,
    "scan_states": gdn_fwd.SCAN_CONFIGS,
    "scan_bwd": gdn_scans.SCAN,
    "scans": gdn_scans.SCAN,
}
GRADIENTS = ("q", "k", "v", "g", "beta")


def case_of(shape: tuple[int, ...], size: int) -> Case:
    """A shape under a name: sequences x tokens, heads of q and k / of v, and the head size."""
    B, T, H, HV, D = shape
    return Case(f"{B}x{T} {H}/{HV} {D}", "gdn", B, T, H, HV, D, D, size)


def time_ms(f: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call, which is made once before."""
    f()
    if device.type == "cuda":
        return measure.time_ms(measure.captured(f))
    begun = time.perf_counter()
    f()
    return 1e3 * (time.perf_counter() - begun)


def recorded(stages) -> tuple[object, dict[str, Callable[[], object]]]:
    """The same stages, and each that has run as a call on the arguments it had."""
    calls = {}

    def keeping(name, f):
        def stage(*args, **kwargs):
            calls[name] = partial(f, *args, **kwargs)
            return f(*args, **kwargs)

        return stage

    names = [f.name for f in fields(stages)]
    return replace(stages, **{n: keeping(n, getattr(stages, n)) for n in names}), calls


def each_stage(stages, calls: dict[str, Callable]) -> None:
    """In the calls of a pass, those of the stages that chunk_fwd or chunk_bwd runs in its place."""
    if "chunk_fwd" in calls:
        whole = calls.pop("chunk_fwd")
        (q, k, v, beta, gc, h0, _), options = whole.args, dict(whole.keywords)  # without ranks
        del options["cancelling"]  # of a beta of which nothing is said
        chunks, keep = {"chunk_size": options.pop("chunk_size")}, options.pop("keep")
        chunks |= {"return_inverse": keep, "gated": keep}
        calls["intra_chunk"] = partial(stages.intra_chunk, q, k, beta, gc, **chunks)
        P, R, _ = calls["intra_chunk"]()
        calls["scan"] = partial(stages.scan, q, k, v, gc, P, R, h0, **options)
    if "chunk_bwd" not in calls:
        return
    whole = calls.pop("chunk_bwd")
    q, k, v, beta, gc, P, AG, do, h0, dht, *_ = whole.args  # without low halves
    calls["scans"] = partial(stages.scans, *whole.args[:10], **whole.keywords)
    h, v_new, dh, Z, _, _ = calls["scans"]()
    calls["scan_states"] = partial(stages.scan_states, k, v, beta, gc, AG, h0)
    args = (q, k, beta, gc, P, AG, do, dht)
    calls["scan_bwd"] = partial(stages.scan_bwd, *args, **whole.keywords)
    args = (q, k, v, beta, gc, h, v_new, do, dh, Z)
    options = {**whole.keywords, "chunk_size": AG.shape[-1]}
    calls["intra_chunk_bwd"] = partial(stages.intra_chunk_bwd, *args, **options)


def passes(form: str, i, do) -> tuple[Callable, Callable, Callable]:
    """Of a form: forward and backward pass as functions of the stages, and what is kept."""
    inputs, scale = (i.q, i.k, i.v, i.g, i.beta), i.q.shape[-1] ** -0.5
    *_, kept = gdn.forward(FORMS[form]("triton"), *inputs, scale=scale, keep=KEPT[form])
    return (
        lambda stages: gdn.forward(stages, *inputs, scale=scale, keep=())[0],
        lambda stages: gdn.backward(stages, *inputs, kept, do, scale=scale)[:5],
        kept,
    )


def programs(name: str, i, chunk: int = 64) -> dict:
    """Programs of a scan and the columns of each, and whether its sequences are cut."""
    HV, V = i.v.shape[2:]
    pieces = by_maps(i.q, HV, V, chunk, None)
    if not pieces.several and name not in ("state", "state_bwd"):
        pieces = by_warm_up(i.q, HV, V, chunk, None)
    heads = pieces.N * HV
    columns = scan_launch(SCANS[name], i.k, heads, V)[1]["BV"]
    both = 2 if name == "scans" else 1
    return {"programs": both * heads * cdiv(V, columns), "columns": columns, "cut": pieces.several}


def errors_of(case: Case, device: torch.device) -> dict[str, dict[str, float]]:
    """Of each form's gradients on few tokens and heads, against the recurrence in float64."""
    i = measure.inputs(measure.short(case), device.type)
    do = measure.gradient(i.v)
    want = measure.reference_gradients(i.double(), do.double())
    errors = {}
    for form, stages_of in FORMS.items():
        pairs = zip(GRADIENTS, passes(form, i, do)[1](stages_of("triton")), strict=True)
        errors[form] = {f"error_d{n}": significant(relative_rms(x, want[n])) for n, x in pairs}
    return errors


def rows_of(case: Case, device: torch.device, rates: tuple[float, float]) -> Iterator[dict]:
    """Whole passes and stages of both forms."""
    i = measure.inputs(case, device.type)
    do, first, errors = measure.gradient(i.v), None, errors_of(case, device)
    for form, stages_of in FORMS.items():
        stages = stages_of("triton")
        runs = dict(zip(("forward", "backward", "kept"), passes(form, i, do), strict=True))
        kept = sum(x.nbytes for x in runs.pop("kept") if x is not None) / 2**20
        for what, run in runs.items():
            once, row = partial(run, stages), {"case": case.name, "form": form, "what": what}
            row |= {"ms": significant(time_ms(once, device))}
            if device.type == "cuda":
                row |= {"peak_mib": significant(measure.peak_mib(once))}
            if what == "backward":
                got = once()
                first = got if first is None else first
                apart = max(relative_rms(x, y) for x, y in zip(got, first, strict=True))
                row |= {"kept_mib": significant(kept), "apart": significant(apart)}
                row |= errors[form]
                del got
            yield row
            recording, calls = recorded(stages)
            run(recording)
            each_stage(stages, calls)
            for name, call in calls.items():
                w = work(case, f"stage:{name}")
                row = {"case": case.name, "form": form, "what": f"{what}:{name}"}
                row |= {"ms": significant(time_ms(call, device))}
                row |= {"bytes": w.bytes, "flops": w.flops}
                row |= {"floor_ms": significant(w.floor_ms(*rates))}
                yield row | (programs(name, i) if name in SCANS else {})
            del recording, calls
        del run, runs, once


def ran(row: dict) -> tuple[str, ...]:
    """What of the package a row is the time of."""
    stage = row["what"].partition(":")[2]
    return (f"kernels.{stage}",) if stage else (FUNCTIONS["gdn"],)


def main(argv: list[str]) -> int:
    args = tables.parser("fusion", __doc__).parse_args(argv)
    if (table := tables.opened(args, "fusion", "case", "form", "what", ran=ran)) is None:
        return EXIT_USAGE
    cuda = table.device.type == "cuda"
    rates = measure.rates() if cuda else (1e9, 1e9)
    table.top |= {"bytes_per_s": rates[0], "flops_per_s": rates[1]}
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        table.top["multiprocessors"] = properties.multi_processor_count
    with torch.no_grad():
        for shape in SHAPES if cuda else TRIAL:
            for row in rows_of(case_of(shape, 2 if cuda else 4), table.device, rates):
                table.add(row)
            if cuda:
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
