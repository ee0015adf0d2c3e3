"""Results of compiling rows, kept in kept_results.txt so that only what changed is compiled again;
those of kernels in Gluon in kept_gluon.txt.

A row's key follows from what is compiled: the source of the kernel and of all that it calls,
without comments and docstrings, types, constants, options and target. (Triton's own key has the
number of a kernel's first line too.) Results hold for the Triton named in the file.
"""

import ast
import functools
import hashlib
import inspect
import io
import textwrap
import tokenize
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

FILE = Path(__file__).with_name("kept_results.txt")
GLUON = FILE.with_name("kept_gluon.txt")
TITLE = "triton "
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)


class Row(NamedTuple):
    """A compilation: compute capability, name of the kernel, key."""

    cc: int
    kernel: str
    key: str


class Result(NamedTuple):
    """Registers of a thread, bytes of its stack, bytes of shared memory of a program; whether it
    has matrix instructions."""

    registers: int
    stack: int
    shared: int
    mma: bool


class GluonResult(NamedTuple):
    """Registers of a thread, bytes that it spills; whether ptxas has products wait for one another;
    bytes of shared memory of a program; products in it; bytes spilled as Triton calls ptxas."""

    registers: int
    spilled: int
    serialized: bool
    shared: int
    products: int
    spilled_as_run: int


def read(version: str, file: Path = FILE, kind: type[tuple] = Result) -> dict[Row, tuple]:
    """The kept results of a kind; none if they are those of another Triton."""
    title, *lines = file.read_text().splitlines()
    if title != TITLE + version:
        return {}
    results = {}
    for line in lines:
        cc, kernel, key, *numbers = line.split()
        types = kind.__annotations__.values()
        values = (of(int(x)) for of, x in zip(types, numbers, strict=True))
        results[Row(int(cc), kernel, key)] = kind(*values)
    return results


def write(version: str, results: dict[Row, tuple], file: Path = FILE) -> None:
    """Keep these results, one a line, in order."""
    lines = [" ".join(str(int(x)) if isinstance(x, bool) else str(x) for x in (*row, *result))
             for row, result in sorted(results.items())]  # fmt: skip
    file.write_text("\n".join([TITLE + version, *lines]) + "\n")


def key(kernel, *rest) -> str:
    """The key of a kernel compiled with the rest: types, constants, options."""
    parts = sorted((name, source) for (_, name), source in sources(kernel).items())
    text = repr((kernel.fn.__name__, parts, rest))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def sources(kernel) -> dict[tuple[str, str], str]:
    """Source of a @triton.jit function and of those it calls, value of each constant they read, by
    (module, name)."""
    found, waiting = {}, [kernel]
    while waiting:
        function = waiting.pop().fn
        place = function.__module__, function.__name__
        if place in found:
            continue
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source).body[0]
        found[place] = tokens(source, tree)
        for name, value in globals_of(tree, function):
            if is_kernel(value):
                waiting.append(value)
            elif not isinstance(value, ModuleType):
                found[function.__module__, name] = repr(value)
    return found


def is_kernel(x) -> bool:
    """Whether x is a @triton.jit function, to be compiled or interpreted."""
    return hasattr(x, "fn") and hasattr(x, "arg_names")


def globals_of(tree, function):
    """(name, value) of what a function reads from its module, or as `module.name` from ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in function.__globals__:
            yield node.id, function.__globals__[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = function.__globals__.get(node.value.id)
            if isinstance(module, ModuleType) and module.__name__.startswith("linattn_edu"):
                yield f"{node.value.id}.{node.attr}", getattr(module, node.attr)


def tokens(source: str, tree: ast.FunctionDef) -> str:
    """The source in a form that is the same in every Python, without comments and docstring."""
    docstring = range(0)
    if ast.get_docstring(tree) is not None:
        docstring = range(tree.body[0].lineno, tree.body[0].end_lineno + 1)
    words = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            words.append(tokenize.tok_name[token.type])
        elif token.start[0] not in docstring and token.type not in SILENT:
            words.append("\n" if token.type == tokenize.NEWLINE else token.string)
    return " ".join(words)
