"""puzzles/: solutions are right, blanks and planted mistakes are named, a reader's work is kept."""

import os
import re
import subprocess
import sys

import pytest
import torch
from book.layout import CHAPTERS, ROOT

from linattn_edu import puzzles
from linattn_edu.__main__ import main

FOLDER = ROOT / "puzzles"
# chapter -> what is replaced in the solution, by what, and an output that it makes wrong
PLANTED = {
    "01": [
        ("v[:, t] - k[:, t] @ S", "v[:, t] - q[:, t] @ S", "PyTorch", "o"),
        ("(tl.load(beta_ptr + i) * b_e)", "b_e", "Triton", "final_state"),
    ],
    "02": [
        ("masked_fill(future, -torch.inf)", "masked_fill(future, 0)", "PyTorch", "G"),
        ("tl.cumsum(b_g * LOG2E, axis=0)", "tl.cumsum(b_g, axis=0)", "Triton", "gc"),
        ("o_t[:, None] >= o_t[None, :]", "o_t[:, None] > o_t[None, :]", "Triton", "G"),
    ],
    "03": [
        ("b[..., None] * (K @ K.mT)", "b[..., None, :] * (K @ K.mT)", "PyTorch", "A"),
        ("b_A - b_x[None, :]", "b_A + b_x[None, :]", "Triton", "A"),
    ],
    "04": [
        ("w = e * (A @ (b * K))", "w = (A * decay_matrix(gc)) @ (b * K)", "PyTorch", "w"),
        ("b_A * b_beta[None, :]", "b_A * b_beta[:, None]", "Triton", "u"),
    ],
    "05": [
        ("U_c - W_c @ S", "U_c + W_c @ S", "PyTorch", "v_new"),
        ("i_h // (HV // H)", "i_h % H", "Triton", "h"),
        ("b_u - dot(b_w, b_S)", "b_u", "Triton", "v_new"),
    ],
    "06": [
        ("scale * (inter + P @ V)", "inter + scale * (P @ V)", "PyTorch", "o"),
        (" * decay_tile(b_gc, o_t)", "", "Triton", "o"),
    ],
    "07": [
        ("masked_fill(i < j, -torch.inf)", "masked_fill(i <= j, -torch.inf)", "PyTorch", "P"),
        ("b_beta * tl.sum", "tl.sum", "Triton", "A"),
    ],
    "08": [
        (" - flow.sum(-2)", "", "PyTorch", "dgc"),
        ("tl.trans(b_M * G)", "tl.trans(b_M)", "Triton", "dv_new"),
    ],
    "09": [
        ("- W_c.mT @ dv ", "- W_c.mT @ dV_c ", "PyTorch", "dh0"),
        ("NT - 1 - step", "step", "Triton", "dh"),
    ],
    "10": [
        ("(N + N.mT) @ K", "N @ K", "PyTorch", "dk"),
        (" + tl.sum(b_dL * b_KK, 1)", "", "Triton", "dbeta"),
    ],
    "11": [
        ("decay * (dP_j * Q + b * dL_j * K)", "decay * (dP_j * Q + dL_j * K)", "PyTorch", "dk"),
        ("K * (b * Y - R)", "K * (b * Y + R)", "PyTorch", "dgc"),
        ("b_l * b_E * b_kj", "b_beta * b_l * b_E * b_kj", "Triton", "dbeta"),
    ],
    "12": [
        ("(dg * -rate * F.softplus(x))", "(dg * -rate)", "PyTorch", "dA_log"),
        ("axis=0, reverse=True", "axis=0", "Triton", "da"),
    ],
    "13": [
        ("step[..., None, :]", "step[..., None]", "PyTorch", "y"),
        (" * b_step[None, :]", "", "Triton", "y"),
    ],
    "14": [
        ("(e * C).mT @ dY", "C.mT @ dY", "PyTorch", "dh_out"),
        ("i_h // (H // G)", "i_h % G", "Triton", "dh_out"),
    ],
    "15": [
        ("(a_c * h[:, c] * dS)", "(h[:, c] * dS)", "PyTorch", "dlast"),
        ("tl.minimum((i_t + 1) * BT, T) - 1", "i_t * BT", "Triton", "dh0"),
    ],
    "16": [
        ("gc[..., -1:] - gc", "gc", "PyTorch", "dB_state"),
        ("tl.sum(b_B * b_dB, 1)", "tl.sum(b_B * b_sum, 1)", "Triton", "dgc"),
    ],
    "17": [
        ("dB + dscores.mT @ C ", "dB + dscores @ C ", "PyTorch", "dB"),
        ("b_dC += dot(b_sum, b_B)", "b_dC += dot(b_ds, b_B)", "Triton", "dC"),
    ],
    "18": [
        ("P.mT @ dY + r", "P @ dY + r", "PyTorch", "dx"),
        ("b_step[:, None] * b_dxs", "b_dxs", "Triton", "dx"),
    ],
    "19": [
        ("(M * dM).tril(-1)", "dM.tril(-1)", "PyTorch", "dgc"),
        ("tl.sum(b_W, 1) - tl.sum(b_W, 0)", "tl.sum(b_W, 1)", "Triton", "dgc"),
    ],
    "20": [
        ("-torch.expm1(g)", "torch.exp(g)", "PyTorch", "y"),
        ("== BT - 1, b_y", "== 0, b_y", "Triton", "final_state"),
    ],
    "21": [
        ("torch.eye(DK, dtype=k.dtype)", "torch.zeros(DK, DK, dtype=k.dtype)", "PyTorch", "M"),
        ("dot(b_M, b_in) + b_S", "b_in + b_S", "Triton", "S_out"),
    ],
    "22": [
        ("W_c.mT @ (K_c @ dM)", "K_c.mT @ (W_c @ dM)", "PyTorch", "dM"),
        ("(NT - 1 - step) * BT", "step * BT", "Triton", "dM"),
        ("dot(b_dM, b_out) + b_dS", "dot(tl.trans(b_dM), b_out) + b_dS", "Triton", "dS_in"),
    ],
    "23": [
        ("F.pad(S[..., n:], (0, n)) + last", "last", "PyTorch", "S_in"),
        ("u[:, 1 + j : 1 + j + end - begin]", "u[:, j : j + end - begin]", "PyTorch", "y"),
        ("end - W + o_w", "begin + o_w", "Triton", "S_ext"),
        ("place = W + t", "place = W - 1 + t", "Triton", "y"),
    ],
    "24": [
        ("AG_c.mT @ dv_new", "AG_c @ dv_new", "PyTorch", "Z"),
        ("(e * K_c).mT @ dV_c", "(e * K_c).mT @ Z_c", "PyTorch", "dh0"),
        ("dot(tl.trans(b_P), b_do)", "dot(b_P, b_do)", "Triton", "dv"),
        ("dot(tl.trans(b_k), b_e * b_dv)", "dot(tl.trans(b_k), b_dv)", "Triton", "dh0"),
    ],
    "25": [
        ("scan(S_in, K, W, U, gc)", "scan(S_ext, K, W, U, gc)", "PyTorch", "v_new"),
        ("M[:, :, p] @ S + S_ext", "M[:, :, p].mT @ S + S_ext", "PyTorch", "S_in"),
        ("tl.minimum(begin + L // BT, tl.cdiv(T, BT))", "begin + L // BT", "Triton", "S_ext"),
        ("begin = i_p * (L // BT)  #", "begin = i_p * (L // BT) + 1  #", "Triton", "M"),
    ],
    "26": [
        ("slots[torch.arange(N), accepted - 1]", "slots[:, 0]", "PyTorch", "o"),
        ("q[:, t] @ S + qk * e", "q[:, t] @ S", "PyTorch", "o"),
        (
            "i_n * T + tl.load(accepted_ptr + i_n) - 1",
            "i_n * T + tl.load(accepted_ptr + i_n)",
            "Triton",
            "pool",
        ),
        (
            "place_t = i_n * T + t  #",
            "place_t = i_n * T + T - 1 - t  #",
            "Triton",
            "pool",
        ),
    ],
    "27": [
        ("u[:, j : j + T]", "u[:, W - 1 - j : W - 1 - j + T]", "PyTorch", "k"),
        ("rstd * (dn - n * (n * dn).mean(-1, keepdim=True))", "rstd * dn", "PyTorch", "do"),
        ("tl.sum(b_o * b_o, 1) / D", "tl.sum(b_o * b_o, 1) / BD", "Triton", "y"),
    ],
}


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
    assert sorted(p.name for p in FOLDER.rglob("*.[pm][yd]")) == [*names, "README.md"]
    assert sorted(PLANTED) == sorted(puzzles.PUZZLES)
    assert f"/{puzzles.MINE}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_every_chapter_of_a_stage_has_a_puzzle_and_names_it():
    chapters = sorted(p.stem for p in CHAPTERS.glob("*.md"))
    assert [p.chapter for p in puzzles.PUZZLES.values()] == chapters[1:]
    for number, puzzle in puzzles.PUZZLES.items():
        text = (CHAPTERS / f"{puzzle.chapter}.md").read_text()
        assert re.findall(r"linattn_edu puzzle (\S+?)[`\n]", text) == [number], puzzle.chapter


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
    in_torch = len(blanks.pop(f"{puzzle.stage}_torch"))
    assert 1 <= in_torch <= 5 and 1 <= sum(map(len, blanks.values())) <= 5
    tags = re.findall(r"# (eq:[\w-]+)", solution)
    chapters = "".join(p.read_text() for p in CHAPTERS.glob("*.md"))
    assert tags and [t for t in tags if f"({t})" not in chapters] == []


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
    assert code == 0 and said.count(": right\n") == 2, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the solutions run compiled")
def test_solutions_compile():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/kernels/compile_puzzles.py"], cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(puzzles.PUZZLES)


@pytest.mark.parametrize("number", puzzles.PUZZLES)
def test_blanks_are_named(number, clone, capsys):
    path = f"{puzzles.MINE}/{puzzles.PUZZLES[number].chapter}.py"
    code, said = say(capsys, number)
    assert code == 1 and said.startswith(f"{path} is new, and yours: fill in every `...` in it.\n")
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
    assert code == 1 and said.count(": right\n") == 1
    entry = rf", {part}.*: not yet\n(  .*\n)*  {name}\[\w+ \d.*\]: expected \S+, got \S+ \(the "
    assert re.search(entry, said), said


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
    ],
)  # fmt: skip
def test_a_slip_that_explains_all_is_named(number, old, new, said, tmp_path, capsys):
    code, text = say(capsys, number, "--path", changed(tmp_path, number, old, new))
    assert code == 1 and re.search(rf"^  {said}", text, re.M), text


def test_nothing_is_said_of_an_output_that_no_slip_explains():
    ref = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    axes = "batch chunk row column"
    for x in (ref + 1, torch.zeros_like(ref), ref * torch.nan):
        assert puzzles.likeness(x, ref, axes, 1e-9) == "", x
    said = puzzles.first_wrong("h", axes, ref + 1, ref, 1e-9)
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
    kept = {p.name: p.read_text() for p in path.parent.iterdir()}
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
    for arguments in (("--hint", 1), ("--solution",), ("--again",), ("--path", "x.py")):
        code, said = say(capsys, *arguments)
        assert code == 1 and said == "Which puzzle? Give its number, such as 05, too.\n"


@pytest.mark.parametrize("command", ["puzzle 05 --solution", "puzzle 05", "doctor"])
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
    command = [sys.executable, "-m", "linattn_edu", "puzzle"]
    done = subprocess.run(
        [*command, "05", "--path", "puzzles/05_state_solved.py"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
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
        state = f"{blanks} blanks" + (", not begun" if number != "03" else "")
        assert re.search(rf"{number}  {puzzle.stage} +{begun.get(number, state)}\n", said), said
    assert f"1 of {len(puzzles.PUZZLES)} solved" in said
