"""Every kernel, every row its launcher picks, compiled for GPUs that are not here.

The results are kept (kept.py): what has none is compiled, and every day another 960th of the rest.
With LINATTN_EDU_FULL set, and where the file is another Triton's, every row is compiled; but with
LINATTN_EDU_SAMPLE (tools/newest.py), and on Python 3.10, whose Triton is older, that part alone.
"""

import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import textwrap

import pytest
from grids import FULL
from kernels import kept
from kernels.workers import lines_of

from linattn_edu import kernels as package
from linattn_edu.choices import generation

triton = pytest.importorskip("triton")

KEPT = kept.read(triton.__version__)
PART = os.environ.get("LINATTN_EDU_SAMPLE") or sys.version_info < (3, 11)
ROWS = ["--all"] if FULL else ["--sample"] if PART else []

# shared memory one program may use, in bytes: CUDA C++ programming guide, compute capabilities
SHARED = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Kernels of the state keep S [BK, BV] and a chunk in registers, output_bwd and wy_bwd whole values.
# In fp32 each operand is split in three (tf32x3), without tensor cores whole operands are held, and
# heads that are no multiple of 16 bytes have masks and addresses beside them: these spill, by at
# most this many bytes.
STACK = {
    "half": 1 << 10,
    "half, K=256": 2 << 10,
    "half, odd heads": 12 << 10,
    "float32": 2 << 10,
    "float32, K=256": 10 << 10,
    "turing": 4 << 10,
}
# kernels without a matrix product, or with small ones only
SCALAR = (
    "gate_", "layer_gate_", "recurrent", "cumsum", "l2norm", "solve_tril", "chunk_cumsum",
    "state_passing", "selective_state_update", "ema_piece", "total", "causal_conv1d", "reach",
    "rms_norm_gated", "bound_kernel", "warm_up", "kda_gates", "replay", "ssd_replay", "commit",
    "dplr_recurrent", "those_kernel", "unit_rows",
)  # fmt: skip
# of one block, where nothing is left to merge; of numbers
SMALL = re.compile(r"^(kda_inverse.*\bBT=16\b|merge.*\bNUMBERS=True\b|join)")


def bound(cc, row):
    if generation(divmod(cc, 10)) == "turing":
        return STACK["turing"]
    if "ptr=torch.float32" in row and "ptr=torch.bfloat16" not in row:
        return STACK["float32, K=256" if "K=256" in row else "float32"]
    if re.search(r"\bK=(33|255)\b", row):
        return STACK["half, odd heads"]
    return STACK["half, K=256" if "K=256" in row else "half"]


# those where a multiprocessor is large
LARGE = {
    f"{name}_kernel"
    for name in (
        "chunk_cumsum_log", "chunk_scores", "ssd_ends", "ssd_fwd", "ssd_bwd_dc", "ssd_bwd_db",
        "ssd_bwd_da", "ssd_bwd_far", "ssd_bwd_sum", "ssd_bwd_dx",
        "intra_chunk", "intra_chunk_bwd", "scan_bwd", "scan_map_bwd", "scan_states",
        "scan_transposed", "cancels", "those", "unit_rows",
        "scans", "kda_fused_scan", "kda_fused_scan_transposed", "kda_fused_scan_map", "kda_gates",
        "kda_fused_scans", "kda_fused_scan_map_bwd", "kda_outer_bwd", "kda_intra_bwd_near",
    )
}  # fmt: skip


def modules():
    """Every file of kernels but those in Gluon, which compile_gluon.py compiles."""
    for info in pkgutil.walk_packages(package.__path__, "linattn_edu.kernels."):
        if not info.name.startswith("linattn_edu.kernels.gluon"):
            yield importlib.import_module(info.name)


def kernels_of(module):
    """The kernels of a file that are launched, by name."""
    named = ((n, f) for n, f in vars(module).items() if n.endswith("_kernel"))
    return {n: f for n, f in named if kept.is_kernel(f) and f.fn.__module__ == module.__name__}


def complaints(row):
    """What is wrong with a row: not kept, kept for nothing, not as kept, or out of bounds."""
    cc, name = row["cc"], row["name"]
    results = [kept.Result(*x) for x in (row["kept"], row["compiled"]) if x is not None]
    if name is None:
        yield "kept, but no launcher picks it"
    elif KEPT and row["kept"] is None:
        yield "not kept"
    if results[0] != results[-1]:
        yield f"kept are {results[0]}, found {results[-1]}"
    if name is not None:
        registers, stack, shared, mma = results[-1]
        if shared > SHARED[cc]:
            yield f"{shared} bytes of shared memory, there are {SHARED[cc]}"
        if stack > bound(cc, name):
            yield f"{stack} bytes spilled, at most {bound(cc, name)} may be"
        if registers > 255:
            yield f"{registers} registers"
        if not mma and cc >= 80 and not name.startswith(SCALAR) and not SMALL.match(name):
            yield "no matrix instruction"


def test_rows():
    """Every row is within bounds; the results kept are those of today's kernels."""
    rows = lines_of("compile_rows.py", *ROWS)
    kernels = {name for module in modules() for name in kernels_of(module)}
    for cc in SHARED:
        wanted = kernels if cc >= 90 else kernels - LARGE
        assert {row["kernel"] for row in rows if row["cc"] == cc and row["name"]} == wanted
    if "--sample" in ROWS:
        rows = [row for row in rows if row["compiled"]]
    found = {f"cc {r['cc']} {r['name'] or r['kernel']}: {x}" for r in rows for x in complaints(r)}
    assert not found, "\n".join([*sorted(found), "`make compile` compiles and keeps what changed"])
    assert any(row["compiled"] for row in rows), "no sample was compiled"


def test_no_number_of_tokens_is_compiled_in():
    """1 would be, as a constant, which is no tensor: a batch of one token then fails to compile."""
    checked = 0
    for info in pkgutil.walk_packages(package.__path__, "linattn_edu.kernels."):
        module = importlib.import_module(info.name)
        for name, f in vars(module).items():
            arguments = {"T", "tokens"} & set(getattr(f, "arg_names", ()))
            if name.endswith("_kernel") and arguments and f.fn.__module__ == info.name:
                source = inspect.getsource(module)
                head = re.split(r"@(?:triton|gluon)\.jit", source[: source.index(f"def {name}(")])[
                    -1
                ]
                assert all(f'"{x}"' in head for x in arguments), (name, head)
                checked += 1
    assert checked > 20


def test_key_changes_with_what_is_compiled(tmp_path, monkeypatch):
    """With the code of a kernel, of what it calls and its constants, not with words about it."""

    def key(*changes, rest=()):
        text = textwrap.dedent(SOURCE)
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("m", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return kept.key(module.f, *rest)

    same = [
        ("Its docstring.", "Another."),
        ("# why", "# or\n    # why else"),
        ("import triton\n", "import triton\n\n\nN = 3\n"),
    ]
    assert {key(change) for change in same} == {key()}
    for change in (("x + 1", "x + 2"), ("g(x)", "g(x,)"), ("* TWO", "- TWO"), ("(2.0)", "(2)")):
        assert key(change) != key()
    assert key(rest=("*fp32",)) != key()


SOURCE = """
    import triton
    import triton.language as tl

    TWO = tl.constexpr(2.0)

    @triton.jit
    def g(x):
        return x * TWO

    @triton.jit
    def f(x):
        \"\"\"Its docstring.\"\"\"
        # why
        if x:
            x = g(x)
        return x + 1
"""


def test_complaints():
    """Each way in which a row can be wrong is said."""
    name = "state_kernel k_ptr=torch.bfloat16 K=128"
    row = {"cc": 90, "name": name, "kernel": "state_kernel", "compiled": None}
    fine = [200, 0, 1000, True]
    assert list(complaints(row | {"kept": fine})) == []
    assert list(complaints(row | {"kept": fine, "compiled": fine})) == []
    for change in (
        {"kept": fine, "name": None},
        {"kept": fine, "compiled": [201, 0, 1000, True]},
        {"kept": [200, 2000, 1000, True]},
        {"kept": [200, 0, 228 << 10, True]},
        {"kept": [200, 0, 1000, False]},
    ):
        assert len(list(complaints(row | change))) == 1
