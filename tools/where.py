"""Where everything is, and what is tested where: tables of the book, read off the sources.

    python tools/where.py [NAME]   print a table, or the names of all

tools/book.py writes them beside the pages that include them, book/where.md and book/tested.md.
"""

import ast
import functools
import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path

from notebooks import CHAPTERS, ROOT, toc_chapters

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

REFERENCE, KERNELS = "reference", "kernels"
TAG = re.compile(r"#\s*(eq:[\w-]+)")
LABEL = re.compile(r"\$\$ *\((eq:[\w-]+)\)")
# operator of a file of results -> where the page on performance shows it
SHOWN = {"gdn": "performance", "kda": "performance-kda", "ssd": "performance-ssd"}
OURS = ("linattn_edu", "linattn_edu_safe")
# name of a GPU in a file of results -> compute capability
GPUS = {"NVIDIA H200": 90, "NVIDIA H100 80GB HBM3": 90}
NONE = "–"


# ---- what the sources say


@functools.cache
def address() -> str:
    """The repository's address."""
    return re.search(r'^Repository = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]


@functools.cache
def equations() -> dict[str, str]:
    """Label of each equation -> its chapter, in the order of the book."""
    found = {}
    for name in toc_chapters():
        found |= dict.fromkeys(LABEL.findall((CHAPTERS / f"{name}.md").read_text()), name)
    return found


def functions(path: Path) -> dict[str, list[str]]:
    """The functions at a file's top level -> the tags of equations that stand in each."""
    text = path.read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found[node.name] = list(dict.fromkeys(TAG.findall(body)))
    return found


@functools.cache
def modules() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Each file of stages, as "delta/state" -> "reference" and "kernels" -> `functions`."""
    package = ROOT / "linattn_edu"
    names = sorted(
        str(p.relative_to(package / REFERENCE).with_suffix(""))
        for p in package.glob(f"{REFERENCE}/*/*.py")
        if p.stem != "__init__"
    )
    return {
        name: {side: functions(package / side / f"{name}.py") for side in (REFERENCE, KERNELS)}
        for name in names
    }


@functools.cache
def kernels() -> dict[str, str]:
    """Each @triton.jit kernel -> its file of stages."""
    return {
        f: module
        for module, sides in modules().items()
        for f in sides[KERNELS]
        if f.endswith("_kernel")
    }


@functools.cache
def results() -> dict[str, dict]:
    """The files of chapters/data that name a GPU."""
    found = {p.stem: json.loads(p.read_text()) for p in sorted((CHAPTERS / "data").glob("*.json"))}
    return {name: data for name, data in found.items() if "gpu" in data}


def chapter_of(module: str) -> str | None:
    """The chapter with a file's name, or that its reference names as the source of most functions,
    or with most of its equations.
    """
    tags = [t for side in modules()[module].values() for ts in side.values() for t in ts]
    named = [c for c in toc_chapters() if c.split("_", 1)[1] == module.split("/")[1]]
    text = (ROOT / "linattn_edu" / REFERENCE / f"{module}.py").read_text()
    sources = Counter(re.findall(r"Source: [^\n]*?chapters? (\d+[a-z]?)", text)).most_common(1)
    named += [c for c in toc_chapters() if sources and c.startswith(f"{sources[0][0]}_")]
    counted = Counter(equations()[t] for t in tags if t in equations())
    return named[0] if named else counted.most_common(1)[0][0] if counted else None


@functools.cache
def compiled() -> Counter:
    """(compute capability, kernel) -> how many of its rows are compiled and kept."""
    lines = (ROOT / "tests/kernels/kept_results.txt").read_text().splitlines()[1:]
    return Counter((int(line.split()[0]), line.split()[1]) for line in lines)


def constant(path: str, name: str):
    """A constant of a file, without importing it."""
    import torch

    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return eval(compile(ast.Expression(node.value), path, "eval"), {"torch": torch})
    raise KeyError(f"{path} has no {name}")


# ---- how it is written


@functools.cache
def documented() -> set[str]:
    """The names that the page on the interface has."""
    return set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", (ROOT / "book/api.md").read_text(), re.M))


def function(full: str) -> str:
    """A function by its full name: a link where the book documents it."""
    short = full.rsplit(".", 1)[1]
    return f"{{py:obj}}`{short} <{full}>`" if full in documented() else f"`{short}`"


def file(path: str, name: str | None = None) -> str:
    """A file of the repository, as a link."""
    if not (ROOT / path).exists():
        raise FileNotFoundError(path)
    name = name or path.removeprefix("linattn_edu/")
    return f"[`{name}`]({address()}/blob/main/{path})"


def test_file(path: str) -> str:
    """A file of tests, as a link: its name below tests/."""
    return file(path, path.removeprefix("tests/"))


def within(what: str, path: str) -> str:
    """Something and the file that says how it is done."""
    name = path.rsplit("/", 1)[1]
    return f"{what} ({file(path, name)})"


def chapter(name: str | None) -> str:
    """A chapter, as a link with its number."""
    if name is None:
        return NONE
    return f"{{doc}}`{name.split('_')[0].lstrip('0') or 0} </chapters/{name}>`"


def some(items, between: str = ", ") -> str:
    """Items of a cell, each once."""
    return between.join(dict.fromkeys(items)) or NONE


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table in MyST."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tests(module: str) -> str:
    """The tests of a file of stages."""
    family, name = module.split("/")
    return test_file(f"tests/{family}/test_{name}.py")


def cases(whats, operators=None) -> str:
    """The measured cases of some calls, by file of results, each a link to the tables."""
    cells = []
    for name, data in results().items():
        found = [
            r["case"] for r in data["rows"]
            if r.get("what") in whats and r.get("library") in OURS and "ms" in r
            and (operators is None or operator(r["case"]) in operators)
        ]  # fmt: skip
        if found and (at := shown(name)):
            cells.append(f"{{ref}}`{name} <{at}>`: {some(found)}")
    return some(cells, "; ")


def shown(name: str) -> str | None:
    """Where the page on performance shows a file of results, None if nowhere."""
    return SHOWN.get(name.split("_")[0])


@functools.cache
def operator(case: str) -> str:
    """The operator of a case of the benchmarks."""
    from benchmarks.cases import CASES

    return CASES[case].op if case in CASES else ""


def measured(*names: str) -> str:
    """Where the stages of files are measured."""
    return cases({f"stage:{f}" for name in names for f in modules()[name][REFERENCE]})


def coded(label: str, side: str) -> list[tuple[str, str]]:
    """(file, function) of one side in which an equation's tag stands."""
    return [
        (m, f) for m, sides in modules().items() for f, tags in sides[side].items() if label in tags
    ]


# ---- where everything is


def equation_tables() -> str:
    """A table of equations a chapter."""
    parts = []
    for name in toc_chapters():
        rows = []
        for label in (x for x, c in equations().items() if c == name):
            sides = {s: coded(label, s) for s in (REFERENCE, KERNELS)}
            at = list(dict.fromkeys(m for side in sides.values() for m, _ in side))
            links = [
                some(function(f"linattn_edu.{s}.{m.replace('/', '.')}.{f}") for m, f in found)
                for s, found in sides.items()
            ]
            row = [f"{{eq}}`{label}` `{label}`", *links, some(map(tests, at)), measured(*at)]
            rows.append(row)
        title = next(
            x for x in (CHAPTERS / f"{name}.md").read_text().splitlines() if x.startswith("# ")
        )
        heads = ["Equation", "Reference", "Kernel", "Tests", "Measured"]
        parts.append(f"### {chapter_title(name, title)}\n\n{table(heads, rows)}")
    return "\n\n".join(p for p in parts if "{eq}" in p)


def chapter_title(name: str, title: str) -> str:
    """A heading that says which chapter it is."""
    return f"{name.split('_')[0].lstrip('0') or 0}. {title.removeprefix('# ')}"


def stage_table() -> str:
    """A row for each file of stages."""
    rows = []
    for module, sides in modules().items():
        name, at = module.split("/")[1], chapter_of(module)
        tags = dict.fromkeys(t for tags in sides[REFERENCE].values() for t in tags)
        code = [
            some(
                function(f"linattn_edu.{s}.{module.replace('/', '.')}.{f}")
                for f in sides[s]
                if not f.startswith("_") and f"linattn_edu.{s}.{module.replace('/', '.')}.{f}"
                in documented()
            )
            for s in (REFERENCE, KERNELS)
        ]  # fmt: skip
        learnt = [f"chapter {chapter(at)}"] if at else []
        if at and at.split("_", 1)[1] == name and (ROOT / f"puzzles/{at}_solved.py").exists():
            learnt += [file("puzzles/README.md", f"puzzle {at.split('_')[0]}")]
        rows.append([
            f"`{module}`: {some(learnt)}", some(f"{{eq}}`{t}`" for t in tags),
            f"{code[0]}: {file(f'linattn_edu/{REFERENCE}/{module}.py', f'{name}.py')}",
            f"{code[1]}: {file(f'linattn_edu/{KERNELS}/{module}.py', f'{name}.py')}",
            tests(module), measured(module),
        ])  # fmt: skip
    heads = ["Stage", "Equations", "Reference", "Kernels", "Tests", "Measured"]
    return table(heads, rows)


def kernel_table() -> str:
    """A row for each kernel."""
    rows = []
    for name, module in sorted(kernels().items()):
        counts = ", ".join(f"{cc}:\u00a0{compiled()[cc, name]}" for cc in capabilities())
        path = f"linattn_edu/{KERNELS}/{module}.py"
        full = f"linattn_edu.{KERNELS}.{module.replace('/', '.')}.{name}"
        tags = modules()[module][KERNELS][name]
        rows.append([
            function(full), file(path), chapter(chapter_of(module)),
            some(f"{{eq}}`{t}`" for t in tags), tests(module), counts,
        ])  # fmt: skip
    heads = ["Kernel", "File", "Chapter", "Equations", "Tests", "Rows compiled, by capability"]
    return table(heads, rows)


@functools.cache
def calls() -> dict[str, set[tuple[str, str]]]:
    """Public function -> (operator, call) of the benchmarks that time it."""
    from benchmarks.adapters import LIBRARIES

    found = {}
    for op, whats in LIBRARIES.items():
        for what, libraries in whats.items():
            maker = libraries["linattn_edu"]
            source = inspect.getsource(getattr(maker, "func", maker))
            for name in re.findall(r"from linattn_edu import (\w+)", source):
                found.setdefault(name, set()).add((op, what))
    return found


@functools.cache
def texts() -> dict[str, str]:
    """The files of tests that may name a function."""
    return {
        str(p.relative_to(ROOT)): p.read_text()
        for p in sorted((ROOT / "tests").rglob("test_*.py"))
        if p.parent.name != "book"
    }


def naming(name: str) -> list[str]:
    """The test files that name it, those that do so most often first."""
    counted = Counter({f: len(re.findall(rf"\b{name}\b", text)) for f, text in texts().items()})
    return [f for f, n in counted.most_common() if n]


def function_table() -> str:
    """A row for each public function and layer."""
    import linattn_edu
    from linattn_edu import layers

    rows = []
    for module, names in ((linattn_edu, linattn_edu.__all__), (layers, layers.__all__)):
        for name in names:
            code = inspect.getmodule(getattr(module, name)).__name__
            used = [
                chapter(c)
                for c in toc_chapters()
                if re.search(rf"\b{name}\b", (CHAPTERS / f"{c}.md").read_text())
            ]
            timed = [cases({w}, {op}) for op, w in sorted(calls().get(name, ()))]
            rows.append([
                function(f"{module.__name__}.{name}"), file(code.replace(".", "/") + ".py"),
                some(used), some(map(test_file, naming(name)[:3])),
                some((t for t in timed if t != NONE), "; "),
            ])  # fmt: skip
    return table(["Function", "Code", "In chapters", "Tests that name it most", "Measured"], rows)


# ---- what is tested where


def capabilities() -> tuple[int, ...]:
    """The compute capabilities that kernels are compiled for."""
    return constant("tests/kernels/compile_rows.py", "CAPABILITIES")


def dotted(cc: int) -> str:
    """90 -> 9.0."""
    return f"{cc // 10}.{cc % 10}"


def pinned(name: str) -> str:
    """The version of a package that `make venv` installs."""
    text = "".join(x.read_text() for x in sorted(ROOT.glob("constraints*.txt")))
    return some(f"{x}" for x in re.findall(rf"^{name}==([\w.+]+)", text, re.M))


def runs() -> dict[tuple, list[str]]:
    """(GPU, PyTorch, Triton, CUDA) -> dates on which results were written, or tests were run."""
    found = {}
    for data in (*results().values(), *suites()):
        known = data["gpu"], data["torch"], data.get("triton"), data.get("cuda")
        if all(known):
            found.setdefault(known, []).append(data["date"])
    return found


def version_table() -> str:
    """Versions of Python, PyTorch and Triton."""
    project = (ROOT / "pyproject.toml").read_text()
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    pythons = re.findall(r'"([\d.]+)"', re.search(r"python: \[(.*)\]", workflow)[1])
    needs = re.search(r'^requires-python = "(.+)"', project, re.M)[1]
    oldest = re.search(r"transformers==([\d.]+)", (ROOT / "Makefile").read_text())[1]
    kept = (ROOT / "tests/kernels/kept_results.txt").read_text().splitlines()[0].split()[1]

    def least(name: str) -> str:
        return re.search(rf'"{name}(>=[\d.]+)', project)[1]

    def on_gpu(i: int) -> str:
        return some(run[i] for run in runs())

    return table(
        ["", "asked for", "every push: CPU, interpreter", "compiled without a GPU", "run on a GPU"],
        [
            ["Python", f"{needs}", some(pythons), "as every push", NONE],
            ["PyTorch", least("torch"), pinned("torch"), pinned("torch"), on_gpu(1)],
            ["Triton", least("triton"), pinned("triton"), kept, on_gpu(2)],
            ["CUDA", NONE, NONE, NONE, on_gpu(3)],
            [
                "transformers",
                least("transformers"),
                f"{oldest}, {pinned('transformers')}",
                NONE,
                NONE,
            ],
            ["onnx", least("onnx"), pinned("onnx"), NONE, NONE],
        ],
    )


@functools.cache
def suites() -> list[dict]:
    """The runs of the tests on GPUs."""
    return json.loads((ROOT / "tests/gpu/ran.json").read_text())


def suite_table() -> str:
    """The runs of the tests on GPUs, with versions: of `make gpu-test`, or of the tests named."""
    rows = []
    for r in suites():
        where = f"{r['gpu']}, PyTorch {r['torch']}, CUDA {r['cuda']}, {r['date']}"
        counts = f"{r['passed']} passed, {r['failed'] + r['error']} failed, {r['skipped']} skipped"
        counts += ", cut short" * r["cut"]
        triton = f"{r['triton']}, ptxas {r['ptxas']}"
        rows.append([triton, where, counts, r["tests"].replace("tests/", "")])
    return table(["Triton", "On", "Result", "Tests of"], rows)


def gpu_table() -> str:
    """Compute capabilities: what is compiled for each, and whether it ever ran on one."""
    from linattn_edu.doctor import generation

    rows, ran = [], {}
    for gpu, *versions in runs():
        dates = ran.setdefault(GPUS[gpu], {}).setdefault(gpu, [])
        dates += runs()[(gpu, *versions)]
    for cc in capabilities():
        number = sum(n for (c, _), n in compiled().items() if c == cc)
        names = sum(1 for (c, _), n in compiled().items() if c == cc)
        cards = [f"{gpu}, {max(dates)}" for gpu, dates in ran.get(cc, {}).items()]
        said = f"yes: {'; '.join(cards)}" if cards else "**never**"
        part = f"{number} rows of {names} kernels"
        rows.append([dotted(cc), generation((cc // 10, cc % 10)), part, said])
    return table(["Capability", "Generation", "Compiled, kept and held to bounds", "Run"], rows)


def never_run() -> str:
    """A sentence on what never ran on hardware."""
    ran = {GPUS[run[0]] for run in runs()}
    absent = some(dotted(cc) for cc in capabilities() if cc not in ran)
    kinds = dict.fromkeys(run[0] for run in runs())
    many = "one kind of GPU" if len(kinds) == 1 else f"{len(kinds)} kinds of GPUs"
    return (
        f"All results come from {many}, {some(kinds)}. No kernel has "
        f"run on a GPU of capability {absent}: for these the kernels are compiled and nothing "
        "more, and nobody has timed their tables of tiles. What is not in the table is not even "
        "compiled."
    )


def dtypes(values) -> str:
    """torch.float32, "bfloat16", ... -> float32, bfloat16."""
    return some(str(x).removeprefix("torch.") for x in values)


def numbers(values) -> str:
    """Numbers in order."""
    return some(map(str, sorted(set(values))))


def size_table() -> str:
    """Dtypes and sizes of what is tested, from the grids."""
    stages, ssd = "tests/delta/stage_checks.py", "tests/ssd/ssd_checks.py"
    rows_file, sanitizer = "tests/kernels/compile_rows.py", "tests/gpu/sanitize.py"
    T, dims, chunks = (constant(stages, n) for n in ("INTERPRETED", "DIMS", "CHUNKS"))
    T = f"{numbers(T)}; {constant(stages, 'COMPILED')[-1]} on a GPU"
    wide, wide_ssd = constant(stages, "WIDE"), constant(ssd, "WIDE")
    sizes, elsewhere = constant(rows_file, "SIZES"), constant(rows_file, "SIZES_ELSEWHERE")
    shapes = constant(sanitizer, "SHAPES")
    every = "interpreter, every push; compiled, `make gpu-test`"
    kinds = constant(stages, "DTYPES")
    part = [T, numbers(chunks), dtypes(kinds), every]
    rows = [
        [within(title, grid), f"{numbers(dims)}; {letter} {numbers(s[2] for s in more)}", *part]
        for title, grid, letter, more in (
            ("stages of the delta rule", stages, "V", wide),
            ("stages of Mamba-2", ssd, "P", wide_ssd),
        )
    ]
    # the launcher picks other rows for odd heads and fp16 on one generation alone
    special = int(re.search(r"SIZES if cc == (\d+)", (ROOT / rows_file).read_text())[1])
    others = some(dotted(cc) for cc in capabilities() if cc != special)
    where = "compiled without a GPU, every push"
    for title, kept in ((dotted(special), sizes), (others, elsewhere)):
        for kind, of in kept:
            size = numbers(of) + f"; V {constant(rows_file, 'WIDE')} beside K 256" * (256 in of)
            what = within(f"kernels for {title}", rows_file)
            rows.append([what, size, NONE, NONE, dtypes([kind]), where])
    rows.append([
        within("memory and races", sanitizer), numbers(x for s in shapes for x in s[1:3]),
        numbers(s[0] for s in shapes), numbers(s[3] for s in shapes),
        dtypes(constant(sanitizer, "DTYPES")), "compute-sanitizer, `make gpu-test`",
    ])  # fmt: skip
    heads = ["What, and its grid", "Head sizes", "Tokens", "Chunks", "Dtypes", "Where it runs"]
    return table(heads, rows)


def case_table() -> str:
    """What was measured on a GPU with its errors: dtype and head sizes of each operator."""
    from benchmarks.cases import CASES

    kinds = {2: "bfloat16", 4: "float32"}
    rows = []
    for name, data in results().items():
        there = {r["case"] for r in data["rows"] if r.get("library") in OURS and "ms" in r}
        for case in (c for c in CASES.values() if c.name in there and shown(name)):
            rows.append([
                f"{{ref}}`{name} <{shown(name)}>`", f"`{case.name}`", kinds[case.size],
                str(case.K) if case.op != "ema" else NONE, str(case.V),
                f"{data['gpu']}, {data['date']}",
            ])  # fmt: skip
    return table(["Results", "Case", "Dtype", "K", "V", "On"], rows)


DTYPES = ("float32", "bfloat16", "float16")


def errors() -> list[dict]:
    """The rows of the errors of every operator."""
    return json.loads((ROOT / "tests/accuracy.json").read_text())


def accuracy_table() -> str:
    """The worst output and gradient of every kind of inputs, in roundings, an operator a table."""
    parts = []
    for name in dict.fromkeys(r["operator"] for r in errors()):
        rows = [
            [r["inputs"], NONE if r["beta"] is None else f"{r['beta']:g}", f"{r['gate']:g}"]
            + [worst(r[k]) for k in DTYPES]
            for r in errors()
            if r["operator"] == name
        ]
        heads = ["Inputs", "beta", "gate", *DTYPES]
        parts.append(f"{function(f'linattn_edu.{name}')}\n\n{table(heads, rows)}")
    return "\n\n".join(parts)


def accuracy_of_keys_alike() -> str:
    """A sentence on chunks of the delta rule in 16 bit with keys alike and beta up to 1."""
    found = [
        r[kind]
        for r in errors()
        if r["operator"].startswith("chunk_") and "random" not in r["inputs"] and r["beta"] <= 1
        for kind in DTYPES[1:]
    ]
    most = [f"{n} {two_digits(max(e[n] for e in found))}" for n in ("o", "ht", "dv", "dbeta", "dg")]
    return f"The most in chunks of 16 bit with keys alike and a beta of at most 1: {some(most)}."


def worst(errors: dict[str, float]) -> str:
    """ "o 2.1, dk 14": the largest error of an output, and of a gradient where there are any."""
    outputs = {n: e for n, e in errors.items() if n in ("o", "ht")}
    gradients = {n: e for n, e in errors.items() if n not in outputs}
    found = [max(x.items(), key=lambda item: item[1]) for x in (outputs, gradients) if x]
    return some(f"{short(n)}\u00a0{two_digits(e)}" for n, e in found)


def short(name: str) -> str:
    """A gradient's name in a narrow column."""
    return re.sub("initial_states?", "h0", name)


def two_digits(x: float) -> str:
    """2.1, 14, 310."""
    return f"{x:.1f}" if x < 9.95 else f"{float(f'{x:.1e}'):.0f}"


PARTS = {
    "where_equations": equation_tables,
    "where_stages": stage_table,
    "where_kernels": kernel_table,
    "where_functions": function_table,
    "tested_versions": version_table,
    "tested_suites": suite_table,
    "tested_gpus": gpu_table,
    "tested_never": never_run,
    "tested_sizes": size_table,
    "tested_cases": case_table,
    "tested_accuracy": accuracy_table,
    "tested_alike": accuracy_of_keys_alike,
}


def write(folder: Path) -> None:
    """Write every part as a file that a page includes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        (folder / f"{name}.md").write_text(part() + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(PARTS[name]())
    if len(sys.argv) == 1:
        print("\n".join(PARTS))
