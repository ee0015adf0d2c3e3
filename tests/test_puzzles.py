"""puzzles/: solutions are right, blanks and planted mistakes are named, a reader's work is kept."""

import os
import re
import subprocess
import sys

import pytest
import torch
from book.layout import CHAPTERS, ROOT
from forks import python
from grids import FULL, few
from puzzle_mistakes import PLANTED

from linattn_edu import puzzle_compare, puzzles
from linattn_edu.__main__ import main

FOLDER = ROOT / "puzzles"
LACKS = "; right but for a factor:"


def parts(number):
    """How many functions the check of a puzzle has a verdict on: a warm-up's PyTorch is given."""
    return 1 if number in puzzles.WARM_UPS else 2


def say(capsys, *arguments):
    """Exit code and output of the command."""
    code = main(["puzzle", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out + out.err


def changed(tmp_path, number, old, new):
    """A file with the solution of a puzzle in which one place is changed."""
    text = puzzles.solution(puzzles.PUZZLES[number])
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in solution {number}"
    path = tmp_path / "mine.py"
    path.write_text(text.replace(old, new))
    return path


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A working directory with the puzzles, in which no reader has worked yet."""
    (tmp_path / "puzzles").symlink_to(FOLDER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files():
    names = [f"{p.chapter}_solved.py" for p in puzzles.PUZZLES.values()]
    assert sorted(p.name for p in FOLDER.rglob("*.[pm][yd]")) == sorted([*names, "README.md"])
    assert sorted(PLANTED) == sorted(puzzles.PUZZLES)
    assert f"/{puzzles.MINE}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_every_chapter_of_a_stage_has_a_puzzle_and_names_it():
    # one with a letter (07b) is the sequel of a chapter that has one, but for two operators
    operators = {"12d_gdn2", "12e_dplr"}
    chapters = sorted({p.stem for p in CHAPTERS.glob("[0-9][0-9]_*.md")} | operators)
    assert [p.chapter for p in puzzles.STAGES.values()] == chapters[1:]
    for number, puzzle in puzzles.STAGES.items():
        text = (CHAPTERS / f"{puzzle.chapter}.md").read_text()
        assert re.findall(r"linattn_edu puzzle (\S+?)[`\n]", text) == [number], puzzle.chapter


@pytest.mark.parametrize("number", puzzles.PUZZLES)
def test_names_of_a_puzzle(number):
    puzzle = puzzles.PUZZLES[number]
    for name in (number, number.removeprefix("0"), puzzle.stage, puzzle.chapter):
        assert puzzles.find(name) is puzzle, name


@pytest.mark.parametrize("number", puzzles.PUZZLES)
def test_puzzle_is_the_solution_with_blanks(number, tmp_path):
    puzzle = puzzles.PUZZLES[number]
    solution = puzzles.solution(puzzle)
    assert not puzzles.open_blanks(puzzles.source(puzzle))
    path = tmp_path / "blanks.py"
    path.write_text(puzzles.blanked(solution))
    pairs = zip(path.read_text().splitlines(), solution.splitlines(), strict=True)
    assert all(a == b or "= ...  # blank: " in a or "return ...  # blank: " in a for a, b in pairs)
    blanks = puzzles.open_blanks(path)
    assert sum(map(len, blanks.values())) == solution.count("# blank: ")
    in_torch = len(blanks.pop(f"{puzzle.stage}_torch", []))
    warm_up = number in puzzles.WARM_UPS
    assert in_torch == 0 if warm_up else 1 <= in_torch <= 5
    assert 1 <= sum(map(len, blanks.values())) <= 5
    tags = re.findall(r"# (eq:[\w-]+)", solution)
    chapters = "".join(p.read_text() for p in CHAPTERS.glob("*.md"))
    assert (tags or warm_up) and [t for t in tags if f"({t})" not in chapters] == []


@pytest.mark.parametrize("number", puzzles.PUZZLES)
def test_the_last_hint_has_a_line_for_each_blank(number):
    puzzle = puzzles.PUZZLES[number]
    text = puzzles.source(puzzle).read_text()
    assert re.findall(r"^# hint.*", text, re.M) == [f"# hint {i}" for i in (1, 2, 3)]
    assert re.fullmatch(r"(#( .+)?\n)+", text[text.index("# hint 1") :]), "code behind a hint"
    assert "hint" not in puzzles.solution(puzzle)
    lines = [x[4:] for x in puzzles.hint(puzzle, 3).splitlines() if x.startswith("    ")]
    marked = [x for x in puzzles.solution(puzzle).splitlines() if "# blank: " in x]
    for line, blank in zip(lines, marked, strict=True):
        pattern = ".+".join(map(re.escape, line.split("...")))
        assert re.fullmatch(pattern, blank.partition("  # blank: ")[0].strip()), line


@pytest.mark.parametrize("number", puzzles.PUZZLES)
def test_solution_is_right(number, capsys):
    path = puzzles.source(puzzles.PUZZLES[number])
    code, said = say(capsys, number, "--path", path)
    assert code == 0 and said.count(": right\n") == parts(number), said
    links = [said.split()[-1]] if "http" in said else []
    assert links == [url for x, (_, url) in puzzles.JUDGES.items() if x == number]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the solutions run compiled")
def test_solutions_compile():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/kernels/compile_puzzles.py", "" if FULL else "--third"], cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    assert compiled == set(puzzles.PUZZLES) if FULL else compiled and compiled < {*puzzles.PUZZLES}


@pytest.mark.parametrize("number", puzzles.PUZZLES)
def test_blanks_are_named(number, clone, capsys):
    path = f"{puzzles.MINE}/{puzzles.PUZZLES[number].chapter}.py"
    code, said = say(capsys, number)
    assert code == 1 and said.startswith(
        f"{path} is new, and yours: fill in every `...` in it, about "
    )
    lines = (clone / path).read_text().splitlines()
    marked = [(i, x) for i, x in enumerate(lines, 1) if "# blank: " in x]
    assert marked
    for i, line in marked:
        assert f"{path}:{i}: still a blank: {line.partition('# blank: ')[2]}\n" in said


@pytest.mark.parametrize(
    ("number", "old", "new", "part", "name"),
    [(number, *planted) for number, x in PLANTED.items() for planted in x],
)
def test_a_mistake_is_named(number, old, new, part, name, tmp_path, capsys):
    code, said = say(capsys, number, "--path", changed(tmp_path, number, old, new))
    assert code == 1 and said.count(": right\n") == parts(number) - 1
    entry = rf"{name}\[\w+ \d.*\]: expected \S+, got \S+( NaN: [\w ,]+)? \(the "
    assert re.search(rf", {part}.*: not yet\n(  .*\n)*  {entry}", said), said


@pytest.mark.parametrize(
    ("number", "old", "new", "said"),
    [
        ("02", "tl.cumsum(b_g * LOG2E", "tl.cumsum(b_g", "gc.*; all are 0.6931 times what they"),
        ("15", "x = (a_c * h", "x = -(a_c * h", "dlast.*; all have the other sign"),
        ("15", "stack(ds[::-1]", "stack(ds", "ds.*; the order of chunk is reversed"),
        ("09", "NT - 1 - step", "step", r"dh.*; what belongs to chunk i \+ 1 stands at chunk i"),
        ("23", "1 + j : 1 + j", "j : j", r"y.*; what belongs to token i stands at token i \+ 1"),
        ("21", "V]\n    return S_ext, M", "\n    return S_ext, M.mT", "M.*; row and column are "),
        ("14", "i_h // (H // G)", "i_h % G", "dh_out.*, all in head 1 to 2"),
        ("25", "(begin + L // BT, tl", "(begin + L, tl", "v_new.*, all in token 32 to 63"),
        # a factor: inside of the stage, in its last step, a number, a decay, two
        ("01", "(tl.load(beta_ptr + i) * b_e)", "b_e", f"final_state.*{LACKS} beta is missing$"),
        ("03", "b[..., None] * (K", "(K", f"A.*{LACKS} beta is missing$"),
        ("06", "scale * (inter + P @ V)", "(inter + P @ V)", f"o.*{LACKS} scale is missing$"),
        ("13", " * b_step[None, :]", "", f"y.*{LACKS} step is missing$"),
        ("14", "(e * C).mT @ dY", "C.mT @ dY", f"dh_out.*{LACKS} the decay of gc is missing$"),
        ("27", "weight * z * torch", "weight * torch", f"y.*{LACKS} z is missing$"),
        ("27", "n * weight * z * torch", "n * torch", f"y.*{LACKS} z times weight is missing$"),
        ("04", "w = e * (A @ (b * K))", "w = A @ K", f"w.*{LACKS} beta times the decay of gc is"),
        ("w4", "* b_z[None, :]", "+ 0 * b_z[None, :]", f"P.*{LACKS} z is missing$"),
        ("w9", "a * b_S + b_x", "b_S + b_x", f"y.*{LACKS} a is missing$"),
        # a term
        ("05", "= initial_state, [], []", "= 0 * initial_state, [], []", "h.*; as if initial"),
        ("w2", "b_x + b_z, mask", "b_x, mask", "y.*; as if z were 0$"),
    ],
)  # fmt: skip
def test_a_slip_that_explains_all_is_named(number, old, new, said, tmp_path, capsys):
    code, text = say(capsys, number, "--path", changed(tmp_path, number, old, new))
    assert code == 1 and re.search(rf"^  {said}", text, re.M), text


def test_nothing_is_said_of_an_output_that_no_slip_explains():
    ref = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    axes = "batch chunk row column"
    for x in (ref + 1, torch.zeros_like(ref), ref * torch.nan):
        assert puzzle_compare.likeness(x, ref, axes, 1e-9) == "", x
    said = puzzle_compare.first_wrong("h", axes, ref + 1, ref, 1e-9)
    assert said.endswith("(the first of 96 wrong of 96)")


@pytest.mark.parametrize("number", puzzles.PUZZLES)
def test_hints_and_solution(number, capsys):
    hints = [say(capsys, number, "--hint", i) for i in (1, 2, 3)]
    assert all(code == 0 and len(text) > 50 for code, text in hints)
    assert len({text for _, text in hints}) == 3
    assert say(capsys, number, "--hint", 4) == (1, "Hints are numbered from 1 to 3, got 4.\n")
    solution = puzzles.solution(puzzles.PUZZLES[number])
    assert say(capsys, number, "--solution") == (0, solution)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return torch.stack(h, 1),", "return torch.stack(h, 1)(", r":\d+: SyntaxError: "),
        ("r[..., None] * v", "r * v", r":36: S = .*\n  RuntimeError: The size of tensor"),
        ("dot(tl.trans(b_k), b_v)", "dot(b_k, b_v)", r":64: b_S = .*\n  \w+"),
        ("torch.stack(h, 1), ", "", "must return 3 tensors .h, v_new, final_state., returned 2"),
        ("torch.stack(h, 1), ", "torch.stack(h, 2), ", r"h must have shape \[1, 2, 1, 20, 40\]"),
        ("torch.stack(h, 1), ", "torch.stack(h, 1).float(), ", "h must be torch.float64, got"),
        ("torch.stack(h, 1), ", "None, ", "h must be a tensor, got NoneType"),
        ("    store_tile(ht_ptr", "    # store_tile(ht_ptr", r"final_state\[.*got nan, NaN: not"),
        ("def state_triton", "def other", "must have state_torch and state_triton"),
        ("import torch\n", "import torch\nexit()\n", r":\d+: exit\(\)\n\s*SystemExit"),
    ],
)
def test_what_a_file_does_wrong_is_said_in_a_few_lines(old, new, said, tmp_path, capsys):
    path = changed(tmp_path, "05", old, new)
    code, text = say(capsys, "05", "--path", path)
    assert code == 1 and re.search(said, text) and len(text.splitlines()) <= 8, text
    assert "Traceback" not in text and str(ROOT / "linattn_edu") not in text


def test_functions_of_a_notebook(capsys):
    puzzle = puzzles.PUZZLES["05"]
    stage = puzzles.load(puzzles.source(puzzle))
    both = {"torch_fn": stage.state_torch, "kernel_fn": stage.state_triton}
    assert puzzles.check("05", **both) and puzzles.check("state", torch_fn=stage.state_torch)
    assert capsys.readouterr().out.count(": right\n") == 3
    assert not puzzles.check("5", kernel_fn=lambda k, *x, **more: k.no_such_thing)
    assert "AttributeError: 'Tensor' object has no attribute" in capsys.readouterr().out


def test_a_mark_on_a_line_without_a_value():
    assert puzzles.blanked("    return x + 1  # blank: x\n") == "    return ...  # blank: x\n"
    assert puzzles.blanked("a[i] += f(x=1)  # blank: x\n") == "a[i] += ...  # blank: x\n"
    with pytest.raises(ValueError, match="line 1 is marked as a blank"):
        puzzles.blanked("f(x=1)  # blank: x\n")


@pytest.mark.parametrize("number", puzzles.PUZZLES)
def test_whole_bodies_are_blank(number, clone, capsys):
    puzzle = puzzles.PUZZLES[number]
    solution = puzzles.solution(puzzle)
    code, said = say(capsys, number, "--whole")
    assert code == 0 and said.endswith(f"about {puzzles.minutes(puzzle, whole=True)} minutes.\n")
    path = puzzles.readers_file(puzzle)
    text, kernels = path.read_text(), puzzles.kernels(solution)
    # the rest is the solution's: signatures, launchers, equations, PyTorch with its blanks
    rest = {x.strip() for x in puzzles.blanked(solution).splitlines()}
    new = [x for x in text.splitlines() if x.strip() not in rest]
    assert new == ["    ...  # blank: the whole body"] * len(kernels)
    blanks = puzzles.open_blanks(path)
    in_kernels = [blank for kernel in kernels for blank in blanks[kernel.name]]
    assert all(x.endswith(": still a blank: the whole body") for x in in_kernels)
    assert len(in_kernels) == len(kernels) == solution.count("@triton.jit")


def test_a_whole_body_may_be_filled_in(clone, capsys):
    say(capsys, "w9", "--whole")
    path = puzzles.readers_file(puzzles.PUZZLES["w9"])
    blank = "    ...  # blank: the whole body\n"
    line = path.read_text().partition(blank)[0].count("\n") + 1
    code, said = say(capsys, "w9")
    assert code == 1 and f"{path}:{line}: still a blank: the whole body\n" in said
    solution = puzzles.solution(puzzles.PUZZLES["w9"])
    body = re.search(r'Grid \(1\)."""\n(.*?)\n\n', solution, re.S)[1]
    path.write_text(path.read_text().replace(blank, f"{body}\n"))
    assert say(capsys, "w9")[0] == 0


def test_a_small_output_is_shown_whole(tmp_path, capsys):
    path = changed(tmp_path, "w7", "o[:, None] >= o[None, :]", "o[:, None] > o[None, :]")
    assert (
        say(capsys, "w7", "--path", path)[1]
        == """\
w7 decay_matrix, Triton, float32, in the interpreter: not yet
  G[row 0, column 0]: expected 1, got 0 (the first of 4 wrong of 16)
    expected     1     0     0     0
               0.5     1     0     0
               0.5     1     1     0
             0.125  0.25  0.25     1
    got          0     0     0     0
               0.5     0     0     0
               0.5     1     0     0
             0.125  0.25  0.25     0
  with gc = [0, -1, -1, -3]
Hints: python -m linattn_edu puzzle w7 --hint 1 (to 3)
"""
    )


def test_the_readme_says_minutes_and_judges():
    text = (FOLDER / "README.md").read_text()
    links = re.findall(r"^\| (\w\d) \w+ \| \[([\w ]+)\]\((.*?)\) \|", text, re.M)
    assert {number: (name, url) for number, name, url in links} == puzzles.JUDGES
    for group in (puzzles.WARM_UPS, puzzles.STAGES):
        for whole in (False, True):
            times = [puzzles.minutes(x, whole=whole) for x in group.values()]
            assert f"{min(times)} to {max(times)} minutes" in text, (min(times), max(times))


def test_a_readers_work_is_kept(clone, capsys):
    path = clone / puzzles.MINE / "05_state.py"
    say(capsys, "05")
    fresh = path.read_text()
    path.write_text("the first try\n")
    assert "is new" not in say(capsys, "05")[1] and path.read_text() == "the first try\n"
    set_aside = "my_puzzles/05_state_1.py is what you had.\nmy_puzzles/05_state.py is new"
    code, said = say(capsys, "05", "--again")
    assert code == 0 and said.startswith(set_aside) and path.read_text() == fresh
    path.write_text("the second\n")
    assert say(capsys, "05", "--again")[1].startswith(set_aside.replace("_1", "_2"))
    kept = {p.name: p.read_text() for p in path.parent.glob("*.py")}
    assert kept == {
        "05_state.py": fresh,
        "05_state_1.py": "the first try\n",
        "05_state_2.py": "the second\n",
    }
    code, said = say(capsys, "06", "--again")
    assert code == 0 and said.startswith("my_puzzles/06_output.py is new")


def test_what_is_asked_for_beside_the_check_writes_nothing(clone, capsys):
    for arguments in ((), ("05", "--hint", 1), ("05", "--solution")):
        say(capsys, *arguments)
    assert [p.name for p in clone.iterdir()] == ["puzzles"]


def test_a_folder_that_cannot_be_written(clone, capsys):
    (clone / puzzles.MINE).write_text("a file\n")
    for arguments in (("05",), ("05", "--again")):
        code, said = say(capsys, *arguments)
        assert code == 1 and said == "my_puzzles/05_state.py cannot be written: File exists\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            "a = 1\n# \u00f6\n".encode("latin-1"),
            ":2: byte 0xf6 is not UTF-8; save the file as UTF-8",
        ),
        ("a = 1\n".encode("utf-16"), ":1: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("a = 1\n".encode("utf-16-le"), ": .*null byte"),
    ],
)
def test_a_file_that_is_not_utf8(data, said, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_bytes(data)
    code, text = say(capsys, "05", "--path", path)
    assert code == 1 and re.fullmatch(f"{re.escape(str(path))}{said}.*\n", text), text


def test_a_file_of_another_editor(tmp_path, capsys):
    text = puzzles.solution(puzzles.PUZZLES["02"]).replace("\n", "\r\n")
    path = tmp_path / "mine.py"
    path.write_bytes(text.encode("utf-8-sig"))
    code, said = say(capsys, "02", "--path", path)
    assert code == 0 and said.count(": right\n") == 2, said
    path.write_bytes(text.replace("tl.cumsum(", "tl.cumsum(1, ").encode("utf-8-sig"))
    assert re.search(r"mine.py:\d+: b_gc = tl.cumsum\(1, ", say(capsys, "02", "--path", path)[1])


def test_bad_calls(tmp_path, capsys):
    code, said = say(capsys, "99")
    assert code == 1 and said.startswith("There is no puzzle 99; there are ")
    code, said = say(capsys, "05", "--path", tmp_path / "none.py")
    assert code == 1 and said == f"{tmp_path / 'none.py'}: there is no such file\n"
    asked = (("--hint", 1), ("--solution",), ("--again",), ("--whole",), ("--path", "x.py"))
    for arguments in asked:
        code, said = say(capsys, *arguments)
        assert code == 1 and said == "Which puzzle? Give its number, such as 05, too.\n"


@pytest.mark.parametrize("command", few("puzzle 05 --solution", more=("puzzle 05", "doctor")))
def test_a_closed_pipe_ends_a_command(command, clone):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "linattn_edu", *command.split()],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_without_the_folder_it_says_where_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(puzzles, "__file__", str(tmp_path / "linattn_edu" / "puzzles.py"))
    for arguments in ((), ("05",), ("05", "--hint", "1")):
        code, said = say(capsys, *arguments)
        assert code == 1 and f"git clone {puzzles.WHERE}" in said


def test_the_command_turns_the_interpreter_on():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = "-m linattn_edu puzzle 05 --path puzzles/05_state_solved.py"
    done = python(*command.split(), env=env)
    assert done.returncode == 0 and done.stdout.count(": right\n") == 2, done.stdout + done.stderr


def test_list(clone, capsys):
    for number, change in (("02", str), ("03", puzzles.blanked), ("04", lambda x: x + "(")):
        puzzle = puzzles.PUZZLES[number]
        puzzles.begin(puzzle)
        puzzles.readers_file(puzzle).write_text(change(puzzles.solution(puzzle)))
    code, said = say(capsys)
    assert code == 1
    begun = {"02": "solved", "04": "not right: file"}
    for number, puzzle in puzzles.PUZZLES.items():
        blanks = puzzles.solution(puzzle).count("# blank: ")
        about = rf", not begun: about {puzzles.minutes(puzzle)} minutes, \d+ with --whole"
        state = f"{blanks} blanks" + (about if number != "03" else "")
        line = rf"^{number:<3}  {puzzle.stage} +{begun.get(number, state)}$"
        assert re.search(line, said, re.M), said
    assert f"1 of {len(puzzles.PUZZLES)} solved" in said
