"""``python -m linattn_edu puzzle``: kernels with blanks, checked against their references."""

import argparse
import ast
import importlib.util
import math
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from linattn_edu import testing
from linattn_edu.ops.check import interpreted, triton_problem
from linattn_edu.puzzle_compare import Wrong, compare
from linattn_edu.puzzle_stages import STAGES, Puzzle
from linattn_edu.puzzle_warm_ups import WARM_UPS
from linattn_edu.teaching import choose_device

WHERE = "https://github.com/linattn-edu/linattn_edu"
MINE = "my_puzzles"  # the reader's folder, beside puzzles/; git ignores it
HINTS = 3
GUARD = 64  # numbers; as many as keep an address aligned
UNSAID = {"chunk_size", "scale", "eps"}  # options that a case's sizes say, or that follow from them
PUZZLES = WARM_UPS | STAGES
# minutes for a blank, and for a line of a kernel's body; estimates
PACE = 0.5, 1.5  # of someone who has just read the stage's chapter
PACE_WARM_UP = 2, 2  # of someone who has never written Triton
GPU_MODE = "https://github.com/gpu-mode/reference-kernels/tree/main/problems/helion"
LEETGPU = "https://leetgpu.com/challenges"
# number -> a public judge, and where it has the same function, or nearly
JUDGES = {
    "w2": ("LeetGPU", f"{LEETGPU}/vector-addition"),
    "w5": ("LeetGPU", f"{LEETGPU}/matrix-multiplication"),
    "w6": ("LeetGPU", f"{LEETGPU}/prefix-sum"),
    "w9": ("LeetGPU", f"{LEETGPU}/linear-recurrence"),
    "04": ("GPU MODE", f"{GPU_MODE}/gated_deltanet_recompute_w_u_py"),
    "05": ("GPU MODE", f"{GPU_MODE}/gated_deltanet_chunk_fwd_h_py"),
    "06": ("GPU MODE", f"{GPU_MODE}/gated_deltanet_chunk_fwd_o_py"),
    "23": ("LeetGPU", f"{LEETGPU}/causal-depthwise-conv1d"),
}
STILL = "still a blank"
SOLVED = "solved"
BLANK = re.compile(r"^(?P<left>\s*(?:return\b|[^=#]*?[-+*/]?=)) (?P<right>.*?)  # blank: ")


# ---- files


def folder() -> Path:
    """The folder ``puzzles``: of the working directory, of one above it, or beside the library."""
    for root in (Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[1]):
        if any((root / "puzzles").glob("*_solved.py")):
            return root / "puzzles"
    raise Wrong(
        "The puzzles are files of the repository, which the installed package does not have.\n"
        f"Get them with: git clone {WHERE}\n"
        "and run the command in that folder."
    )


def source(puzzle: Puzzle) -> Path:
    """The one file that a puzzle is made from: the solved stage with marks, and the hints."""
    return folder() / f"{puzzle.chapter}_solved.py"


def readers_file(puzzle: Puzzle) -> Path:
    """The reader's file, which need not be there yet."""
    return _short(folder().parent / MINE / f"{puzzle.chapter}.py")


def _short(path: Path) -> Path:
    """The path as seen from the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def text_of(path: Path) -> str:
    """The text of a file, which is UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise Wrong(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise Wrong(f"{path}:{line}: byte {byte:#x} is not UTF-8; save the file as UTF-8") from None
    return text.replace("\r\n", "\n")


def find(name: str) -> Puzzle:
    """The puzzle of a number ("05", "5", "12d", "w1") or of a stage ("state", "05_state")."""
    for puzzle in PUZZLES.values():
        if name.zfill(2) == puzzle.number or name in (puzzle.stage, puzzle.chapter):
            return puzzle
    raise Wrong(f"There is no puzzle {name}; there are {', '.join(PUZZLES)}.")


def parts(puzzle: Puzzle) -> list[str]:
    """The solved stage, then its hints, which stand in comments ``# hint 1`` to 3 at the end."""
    solved, *hints = re.split(r"^# hint \d\n", text_of(source(puzzle)), flags=re.M)
    return [f"{solved.rstrip()}\n", *(re.sub(r"^# ?", "", x, flags=re.M).strip() for x in hints)]


def solution(puzzle: Puzzle) -> str:
    """The solved stage."""
    return parts(puzzle)[0]


def hint(puzzle: Puzzle, level: int) -> str:
    """Hint 1 (the idea), 2 (what is multiplied by what) or 3 (nearly the lines)."""
    if not 1 <= level <= HINTS:
        raise Wrong(f"Hints are numbered from 1 to {HINTS}, got {level}.")
    return parts(puzzle)[level]


def blanked(solution: str) -> str:
    """The puzzle of a solution: what a line marked ``# blank:`` assigns or returns becomes ``...``.

    Raises:
        ValueError: a mark stands on a line that assigns and returns nothing.
    """
    lines = solution.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if "# blank:" in line:
            found = BLANK.match(line)
            if found is None:
                raise ValueError(f"line {i + 1} is marked as a blank and assigns nothing: {line}")
            lines[i] = f"{found['left']} ...  # blank: {line[found.end() :]}"
    return "".join(lines)


def kernels(solution: str) -> list[ast.FunctionDef]:
    """The kernels with a blank, in the order of their lines."""
    return [
        x
        for x in ast.parse(solution).body
        if isinstance(x, ast.FunctionDef)
        and any(ast.unparse(y) == "triton.jit" for y in x.decorator_list)
        and "# blank: " in "\n".join(_body(solution, x))
    ]


def _body(solution: str, kernel: ast.FunctionDef) -> list[str]:
    """The lines of a kernel behind its docstring."""
    return solution.splitlines()[kernel.body[0].end_lineno : kernel.end_lineno]


def emptied(solution: str) -> str:
    """`blanked`, and of the kernels with blanks the whole body, but for the equations it names."""
    lines = blanked(solution).splitlines()
    for kernel in reversed(kernels(solution)):
        tags = dict.fromkeys(re.findall(r"# eq:[\w-]+", "\n".join(_body(solution, kernel))))
        lines[kernel.body[0].end_lineno : kernel.end_lineno] = [
            *(f"    {tag}" for tag in tags),
            "    ...  # blank: the whole body",
        ]
    return "\n".join(lines) + "\n"


def minutes(puzzle: Puzzle, *, whole: bool = False) -> int:
    """About how long a puzzle takes, at the pace above; with whole, its kernels' bodies too."""
    text, warm_up = solution(puzzle), puzzle.number in WARM_UPS
    blank, line = PACE_WARM_UP if warm_up else PACE
    body = [x for kernel in kernels(text) for x in _body(text, kernel)] if whole else []
    code = sum(bool(x.strip()) and not x.strip().startswith("#") for x in body)
    blanks = text.count("# blank: ") - sum("# blank: " in x for x in body)
    return math.ceil(blanks * blank + code * line)


def begin(puzzle: Puzzle, *, again: bool = False, whole: bool = False) -> str:
    """Write the reader's file with blanks where there is none, and say so; "" if there is one.

    With ``again``, one that is there is kept under another name first. No file is overwritten.
    With ``whole``, the bodies of its kernels are blank.
    """
    path, kept = readers_file(puzzle), ""
    if path.is_file() and not again:
        return ""
    text, new = (emptied if whole else blanked)(solution(puzzle)), path.with_suffix(".new")
    try:
        path.parent.mkdir(exist_ok=True)
        new.write_text(text, "utf-8")
        if path.is_file():
            names = (path.with_stem(f"{path.stem}_{i}") for i in count(1))
            kept = f"{path.rename(next(x for x in names if not x.exists()))} is what you had.\n"
        new.rename(path)
    except OSError as error:
        raise Wrong(f"{kept}{path} cannot be written: {error.strerror}") from None
    about = f"about {minutes(puzzle, whole=whole)} minutes"
    return f"{kept}{path} is new, and yours: fill in every `...` in it, {about}."


# ---- the reader's file


def load(path: Path) -> ModuleType:
    """Run a reader's file. Its kernels are compiled or interpreted, as Triton was imported."""
    spec = importlib.util.spec_from_file_location(f"puzzle_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with reported(path):
        spec.loader.exec_module(module)
    return module


def open_blanks(path: Path) -> dict[str, list[str]]:
    """Function -> its blanks that are still open, as "file:line: what belongs there"."""
    text = text_of(path)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        at = f":{error.lineno}" if error.lineno else ""  # of a null byte no line is told
        raise Wrong(f"{path}{at}: SyntaxError: {error.msg}") from None
    except ValueError as error:  # a null byte, before Python 3.12
        raise Wrong(f"{path}: {error}") from None
    lines, found = text.splitlines(), {}
    for function in (x for x in tree.body if isinstance(x, ast.FunctionDef)):
        nodes = (x for x in ast.walk(function) if isinstance(x, ast.stmt))
        for node in sorted(nodes, key=lambda x: x.lineno):
            value = getattr(node, "value", None)
            statement = isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.Expr)
            if statement and isinstance(value, ast.Constant) and value.value is ...:
                what = lines[node.lineno - 1].partition("# blank: ")[2]
                blank = f"{path}:{node.lineno}: {STILL}" + (f": {what}" if what else "")
                found.setdefault(function.name, []).append(blank)
    return found


@contextmanager
def reported(path: Path | None) -> Iterator[None]:
    """Turn what a reader's code raises into `Wrong`, with the line of the reader's file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise Wrong(_where(error, path)) from None


def _where(error: BaseException, path: Path | None) -> str:
    """The innermost line of the file that an exception went through, and what it says."""
    place = _line(error, path) if path else ""
    while error.__cause__ is not None:  # Triton wraps what a kernel raises
        error = error.__cause__
        place = (_line(error, path) if path else "") or place
    said = str(error).strip()
    return f"{place}{type(error).__name__}" + (f": {said}" if said else "")


def _line(error: BaseException, path: Path) -> str:
    """The line of the file in an exception's own trace, "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
    text = text_of(path)
    # the compiler counts lines from the kernel's first one
    source, node = getattr(error, "src", None), getattr(error, "node", None)
    if node is not None and source in text:
        lines.append(text.partition(source)[0].count("\n") + node.lineno)
    return f"{path}:{lines[-1]}: {text.splitlines()[lines[-1] - 1].strip()}\n" if lines else ""


# ---- the check


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """x in another precision; numbers of slots stay what they are."""
    return x.to(dtype) if x.is_floating_point() else x


def guarded(x: Tensor) -> Tensor:
    """A copy of x with NaN before and behind it, which a kernel reads if it reads past an end."""
    if not x.is_floating_point():
        return x.clone()
    around = x.new_full((x.numel() + 2 * GUARD,), math.nan)
    inside = around[GUARD:-GUARD].view(x.shape)
    return inside.copy_(x)


def given(puzzle: Puzzle) -> Callable:
    """The PyTorch function of a solution, which of a warm-up is the reference."""
    return getattr(load(source(puzzle)), f"{puzzle.stage}_torch")


def run(
    puzzle: Puzzle, function: Callable, path: Path | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Check a stage on every case; raise Wrong at the first mistake."""
    reference = puzzle.truth or given(puzzle)

    def truth(inputs: dict[str, object]) -> tuple[Tensor, ...]:
        tensors = (_as(torch.float64, inputs[x]) for x in puzzle.arguments)
        outputs = reference(*tensors, **{x: inputs[x] for x in puzzle.options})
        return outputs if isinstance(outputs, tuple) else (outputs,)

    for case in puzzle.family.cases:
        every = puzzle.family.inputs(case)
        inputs = {name: every[name] for name in (*puzzle.arguments, *puzzle.options)}
        tensors = [guarded(_as(dtype, inputs[name]).to(device)) for name in puzzle.arguments]
        options = {name: inputs[name] for name in puzzle.options}
        more = "".join(f", {x} = {options[x]}" for x in puzzle.options if x not in UNSAID)
        try:
            with testing.poison(), reported(path):
                got = function(*tensors, **options)
                if device.type == "cuda":
                    torch.cuda.synchronize()  # what a kernel raises, here
            compare(puzzle, truth, inputs, got, dtype)
        except Wrong as wrong:
            raise Wrong(f"{wrong}\nwith {case.said(puzzle.family.letters)}{more}") from None


def verdicts(
    puzzle: Puzzle,
    path: Path | None = None,
    *,
    torch_fn: Callable | None = None,
    kernel_fn: Callable | None = None,
) -> dict[str, str | None]:
    """What is checked -> what is wrong with it, None if nothing is."""
    device, blanks = torch.device("cpu"), {}
    if torch_fn is None or kernel_fn is not None:
        device = choose_device()
        if problem := triton_problem():
            raise Wrong(f"The puzzles need Triton: {problem}.")
    if torch_fn is None and kernel_fn is None:
        path = path or readers_file(puzzle)
        if not path.is_file():
            raise Wrong(f"{path}: there is no such file")
        blanks = open_blanks(path)
        module = load(path)
        torch_fn = getattr(module, f"{puzzle.stage}_torch", None)
        kernel_fn = getattr(module, f"{puzzle.stage}_triton", None)
        if torch_fn is None or kernel_fn is None:
            raise Wrong(f"{path} must have {puzzle.stage}_torch and {puzzle.stage}_triton")
        if puzzle.truth is None:
            torch_fn = None  # the reference itself, which is given
    in_torch = blanks.pop(f"{puzzle.stage}_torch", [])
    in_kernel = [blank for function in blanks.values() for blank in function]
    how = "in the interpreter" if interpreted() else "compiled"
    found = {}
    for part, function, mine, dtype, place in (
        ("PyTorch, float64", torch_fn, in_torch, torch.float64, torch.device("cpu")),
        (f"Triton, float32, {how}", kernel_fn, in_kernel, torch.float32, device),
    ):
        if function is None:
            continue
        try:
            if mine:
                raise Wrong("\n".join(mine))
            run(puzzle, function, path, dtype, place)
            found[part] = None
        except Wrong as wrong:
            found[part] = str(wrong)
    return found


def check(
    name: str,
    path: str | Path | None = None,
    *,
    torch_fn: Callable | None = None,
    kernel_fn: Callable | None = None,
) -> bool:
    """Check a puzzle against the reference stage and print what was found.

    Without a usable GPU the kernel runs in Triton's interpreter, which is turned on as in
    `teaching.setup`: call that, or this, before anything imports triton.

    Args:
        name: "05", or "state".
        path: A file with both functions; if None ``my_puzzles/05_state.py``, which is written with
            blanks where there is none.
        torch_fn, kernel_fn: One or both of the functions themselves, in place of a file.
    Returns:
        Whether everything that was checked is right.
    """
    try:
        puzzle = find(name)
        if path is None and torch_fn is None and kernel_fn is None and (new := begin(puzzle)):
            print(new)
        found = verdicts(
            puzzle, None if path is None else Path(path), torch_fn=torch_fn, kernel_fn=kernel_fn
        )
    except Wrong as wrong:
        print(wrong)
        return False
    for part, wrong in found.items():
        said = "right" if wrong is None else "not yet\n" + textwrap.indent(wrong, "  ")
        print(f"{puzzle.number} {puzzle.stage}, {part}: {said}")
    right = not any(found.values())
    if right and puzzle.number in JUDGES:
        print("A public judge has it too, {}: {}".format(*JUDGES[puzzle.number]))
    if not right:
        print(f"Hints: python -m linattn_edu puzzle {puzzle.number} --hint 1 (to {HINTS})")
    return right


def overview() -> int:
    """Print every puzzle and whether it is solved; 0 if all are."""
    solved = 0
    for puzzle in PUZZLES.values():
        said = progress(puzzle)
        print(f"{puzzle.number:<3}  {puzzle.stage:<31} {said}")
        solved += said == SOLVED
    print(f"{solved} of {len(PUZZLES)} solved; python -m linattn_edu puzzle NUMBER checks one")
    return int(solved < len(PUZZLES))


def progress(puzzle: Puzzle) -> str:
    """How far the reader's file is, in a few words."""
    if not readers_file(puzzle).is_file():
        blanks = solution(puzzle).count("# blank: ")
        both = f"{minutes(puzzle)} minutes, {minutes(puzzle, whole=True)} with --whole"
        return f"{blanks} blanks, not begun: about {both}"
    try:
        found = verdicts(puzzle)
    except Wrong as wrong:
        found = {"file": str(wrong)}
    blanks = sum((wrong or "").count(STILL) for wrong in found.values())
    wrong = [part.partition(",")[0] for part, wrong in found.items() if wrong]
    return f"{blanks} blanks" if blanks else f"not right: {', '.join(wrong)}" if wrong else SOLVED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("number", nargs="?", help="such as w1 or 05; all of them if left out")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--path", type=Path, metavar="FILE", help=f"check it, not {MINE}/NN_stage.py")
    what.add_argument("--hint", type=int, metavar="N", help=f"show hint N, 1 to {HINTS}")
    what.add_argument("--solution", action="store_true", help="show the solution")
    what.add_argument("--again", action="store_true", help="set your file aside, write a new one")
    what.add_argument("--whole", action="store_true", help="the same, whole kernel bodies blank")


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 only if what was checked is right, or what was asked for was done."""
    try:
        if args.number is None:
            if any((args.again, args.whole, args.solution, args.path)) or args.hint is not None:
                raise Wrong("Which puzzle? Give its number, such as 05, too.")
            folder()
            return overview()
        puzzle = find(args.number)
        if args.hint is not None:
            print(hint(puzzle, args.hint))
        elif args.solution:
            print(solution(puzzle), end="")
        elif args.again or args.whole:
            print(begin(puzzle, again=True, whole=args.whole))
        else:
            return int(not check(args.number, args.path))
        return 0
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
