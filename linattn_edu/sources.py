"""Which code a measured number is of, and whether it is still the code of today.

    digests("chunk_kda", "kernels.wy") -> {"chunk_kda": "3f2a...", "kernels.wy": "90c1..."}

A row of a file of measurements keeps this under "sources". What is hashed is definitions, not
files: a function, a class or an assignment at the top of a module. From a name they are followed
through the package, imports inside functions too, by `ast` alone: nothing is imported, and neither
Triton nor a GPU is needed. Of those reached, the ones of kernels/ and the compositions of ops/
count; checks of arguments, the machinery of operators and the reference do not. A hash is of the
set of syntax trees without docstrings, imports of the package and the names of its modules. So a
comment, another layout of a line, a definition that moves or a module with another name change
nothing; a function with another name does, since its callers name it. Where it is not clear what a
name is, it is followed: code is rather taken for changed than for unchanged.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE, KERNELS = "linattn_edu", "linattn_edu.kernels"
APART = ("linattn_edu.reference",)  # not followed: it does not run where kernels are timed
DIGITS = 12
CELL = re.compile(r"^```\{code-cell\} ipython3\n(.*?)^```$", re.M | re.S)
OPTIONS = re.compile(r"\A(?:---\n.*?^---\n|(?::[^\n]*\n)+)", re.M | re.S)
MARK = "\N{DAGGER}"
Place = tuple[str, str | None]  # a module, and a name of it; None: the module itself


def cells(chapter: Path) -> list[str]:
    """The code of a chapter, cell by cell, without the cell that is for Colab."""
    every = (OPTIONS.sub("", code) for code in CELL.findall(chapter.read_text(encoding="utf-8")))
    return [code for code in every if "google.colab" not in code]


# ---- modules and what they define


@dataclass(eq=False)
class Definition:
    """A statement at the top of a module, and what it names elsewhere."""

    module: "Module"
    node: ast.stmt

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the statement, outer ones first."""
        return [*ast.walk(self.node)]

    @functools.cached_property
    def imports(self) -> dict[str, Place]:
        """Of the package, inside the statement."""
        taken = (n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom))
        return {k: p for n in taken for k, p in self.module.imported(n).items()}

    def resolved(self, node: ast.AST) -> Place | None:
        """What a name, or a module's attribute, is in the package."""
        if isinstance(node, ast.Name):
            inside = (self.module.name, node.id) if node.id in self.module.defined else None
            return self.imports.get(node.id) or self.module.imports.get(node.id) or inside
        if isinstance(node, ast.Attribute):
            base = self.resolved(node.value)
            if base is not None and base[1] is None:
                return self.module.tree.place(base[0], node.attr)
        return None

    @functools.cached_property
    def named(self) -> set[Place]:
        """All that the statement names of the package, and what it binds."""
        found = {(self.module.name, name) for name in _bound(self.node)}
        found |= set(_stages(self.nodes))
        within = set()  # a module whose attribute is named is not named itself
        for node in self.nodes:
            named = isinstance(node, ast.Name | ast.Attribute) and node not in within
            place = self.resolved(node) if named else None
            if place is not None:
                found.add(place)
                while isinstance(node, ast.Attribute):
                    node = node.value
                    within.add(node)
        return found

    @functools.cached_property
    def composes(self) -> bool:
        """Whether a composition of stages stands in it: @operator.forward or .backward."""
        functions = (n for n in self.nodes if isinstance(n, ast.FunctionDef))
        marks = (d for f in functions for d in f.decorator_list)
        return any(isinstance(d, ast.Attribute) and d.attr in _PASSES for d in marks)

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self._text(self.node).encode()).hexdigest()

    def _text(self, x: object) -> str:
        """A syntax tree as text, the same for every version of Python."""
        if isinstance(x, list):
            return f"[{','.join(filter(None, map(self._text, x)))}]"
        if not isinstance(x, ast.AST):
            return repr(x)
        if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant):
            return ""  # a docstring
        if isinstance(x, ast.Import | ast.ImportFrom) and _ours(x):
            return ""
        place = self.resolved(x)
        if place is not None and place[1] is not None:
            return f"Name({place[1]!r})"
        parts = (
            f"{name}={self._text(value)}"
            for name, value in ast.iter_fields(x)
            if name not in ("ctx", "kind", "type_comment") and value not in (None, [])
        )
        return f"{type(x).__name__}({','.join(parts)})"


_PASSES = ("forward", "backward")


def _stages(nodes: Iterable[ast.AST]) -> Iterator[Place]:
    """The kernels' stages of a record: fields `name: Callable = stage("file")`."""
    for field_ in (n for n in nodes if isinstance(n, ast.AnnAssign)):
        match field_:
            case ast.AnnAssign(
                target=ast.Name(id=name),
                value=ast.Call(func=ast.Name(id="stage"), args=[ast.Constant(value=str(file))]),
            ):
                yield f"{KERNELS}.{file}", name


def _ours(node: ast.Import | ast.ImportFrom) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    inside = isinstance(node, ast.ImportFrom) and node.level > 0
    return inside or any(name.split(".")[0] == PACKAGE for name in names)


@dataclass(eq=False)
class Module:
    """What a module defines: name -> its definitions, and what is decorated by it."""

    name: str
    tree: "Tree"
    statements: list[ast.stmt]
    package: bool = False  # an __init__.py
    imports: dict[str, Place] = field(default_factory=dict)
    defined: dict[str, list[Definition]] = field(default_factory=dict)
    decorated: dict[str, list[Definition]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        simple = list(_flat(self.statements))
        for node in simple:
            self.imports |= self.imported(node)
        for node in simple:
            if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node):
                continue
            one = Definition(self, node)
            for name in _bound(node):
                self.defined.setdefault(name, []).append(one)
            for mark in getattr(node, "decorator_list", ()):
                for name in (n.id for n in ast.walk(mark) if isinstance(n, ast.Name)):
                    self.decorated.setdefault(name, []).append(one)

    @property
    def all(self) -> list[Definition]:
        return [one for every in self.defined.values() for one in every]

    def imported(self, node: ast.AST) -> dict[str, Place]:
        """Alias -> place, of an import of the package."""
        found = {}
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = self.name.split(".")
                parts = parts[: len(parts) - node.level + self.package]
                base = ".".join([*parts, *filter(None, [node.module])])
            if base.split(".")[0] == PACKAGE:
                for alias in node.names:
                    found[alias.asname or alias.name] = self.tree.place(base, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    name = alias.name if alias.asname else PACKAGE
                    found[alias.asname or PACKAGE] = (name, None)
        return found


def _flat(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under an if, a try or a with one by one."""
    for node in statements:
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = (h.body for h in getattr(node, "handlers", ()))
            more = (getattr(node, x, []) for x in ("body", "orelse", "finalbody"))
            for block in (*more, *handlers):
                yield from _flat(block)
        else:
            yield node


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement defines or adds to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = getattr(node, "targets", None) or [getattr(node, "target", node)]
    return {n.id for x in targets for n in ast.walk(x) if isinstance(n, ast.Name)}


class Tree:
    """The sources below a folder: the package, the chapters, the puzzles."""

    def __init__(self, root: Path):
        self.root, self._modules, self._chapters, self._digests = root, {}, {}, {}
        paths = (root / PACKAGE).rglob("*.py")
        named = {".".join(p.relative_to(root).with_suffix("").parts): p for p in paths}
        self._files = {name.removesuffix(".__init__"): p for name, p in named.items()}

    def place(self, module: str, name: str) -> Place:
        """A name of a module: a module again, if there is a file of it."""
        inner = f"{module}.{name}"
        return (inner, None) if inner in self._files else (module, name)

    def module(self, name: str) -> Module | None:
        """A module of the package by its full name."""
        if name not in self._modules:
            file, found = self._files.get(name), None
            if file is not None:
                body = ast.parse(file.read_text(encoding="utf-8")).body
                found = Module(name, self, body, file.stem == "__init__")
            self._modules[name] = found
        return self._modules[name]

    def below(self, package: str) -> list[Module]:
        """The modules of a package."""
        names = sorted(self._files)
        return [self.module(x) for x in names if x == package or x.startswith(f"{package}.")]

    def reached(self, start: Iterable[Definition]) -> set[Definition]:
        """All definitions of the package that some lead to."""
        left, found, seen = list(start), set(), set()
        while left:
            one = left.pop()
            if one in found:
                continue
            found.add(one)
            for place in one.named - seen:
                seen.add(place)
                left += self._definitions(*place, one.module)
        return found

    def _definitions(self, name: str, attribute: str | None, here: Module) -> list[Definition]:
        """Those of a name, through the modules that hand it on; of a module all."""
        module = here if name == here.name else self.module(name)
        if module is None or name.startswith(APART):
            return []
        if attribute is None:
            return module.all
        there = module.defined.get(attribute, [])
        there = [*there, *(module.decorated.get(attribute, ()) if there else ())]
        if attribute in module.imports:
            there += self._definitions(*module.imports[attribute], module)
        return there

    def _start(self, entry: str) -> list[Definition]:
        """What an entry is: see `digests`.

        Raises:
            LookupError: there is no such thing.
        """
        if found := re.fullmatch(r"(\d\d[a-z]?_\w+)\.(\w+)", entry):
            start = self._of_chapter(found[1]).defined.get(found[2], [])
        elif found := re.fullmatch(r"puzzle (\d\d[a-z]?)", entry):
            files = sorted((self.root / "puzzles").rglob(f"{found[1]}_*.py"))
            texts = [f.read_text(encoding="utf-8") for f in files]
            start = [
                d for i, x in enumerate(texts)
                for d in Module(f"{entry} {i}", self, ast.parse(x).body).all
            ]  # fmt: skip
        elif entry.startswith("kernels."):
            name = entry.removeprefix("kernels.")
            start = [d for m in self.below(KERNELS) for d in m.defined.get(name, ())]
        elif self.module(f"{PACKAGE}.{entry}"):
            start = [d for m in self.below(f"{PACKAGE}.{entry}") for d in m.all]
        else:
            *package, name = f"{PACKAGE}.{entry}".split(".")
            module = self.module(".".join(package))
            start = self._definitions(module.name, name, module) if module else []
        if not start:
            raise LookupError(f"there are no sources of {entry!r}")
        return start

    def _of_chapter(self, chapter: str) -> Module:
        """Its functions and imports: of the cells no more goes into a rung, see ladders.source."""
        if chapter not in self._chapters:
            path = self.root / "chapters" / f"{chapter}.md"
            if not path.is_file():
                raise LookupError(f"there is no chapter {chapter!r}")
            body = (n for code in cells(path) for n in ast.parse(code).body)
            taken = ast.Import | ast.ImportFrom | ast.FunctionDef
            found = Module(chapter, self, [n for n in body if isinstance(n, taken)])
            self._chapters[chapter] = found
        return self._chapters[chapter]

    def counted(self, entry: str) -> set[Definition]:
        """The definitions whose hashes make that of an entry."""
        start = self._start(entry)
        own = {d.module.name for d in start} - {m.name for m in self.below(f"{PACKAGE}.ops")}
        if self.module(f"{PACKAGE}.{entry}") is None and not re.match(r"\d|puzzle", entry):
            own = set()  # a public function or a layer leads to kernels, and checks arguments
        return {
            d for d in self.reached(start)
            if d.module.name.startswith(KERNELS) or d.module.name in own or d.composes
        }  # fmt: skip

    def digest(self, entry: str) -> str:
        """The hash of an entry."""
        if entry not in self._digests:
            every = "\n".join(sorted({d.digest for d in self.counted(entry)}))
            self._digests[entry] = hashlib.sha256(every.encode()).hexdigest()[:DIGITS]
        return self._digests[entry]


@functools.cache
def tree() -> Tree:
    """The sources of the package that is running, as they are when it is first asked for."""
    return Tree(Path(__file__).resolve().parents[1])


# ---- rows of measurements


def digests(*entries: str) -> dict[str, str]:
    """The hash of each entry.

    Args:
        entries: A public name ("chunk_kda", "layers.GatedDeltaNet"), a stage of kernels/
            ("kernels.wy"), a package ("cp"), a function of a chapter ("05_state.naive") or a
            chapter's puzzle ("puzzle 08").
    Raises:
        LookupError: there is no such thing.
    """
    return {entry: tree().digest(entry) for entry in entries}


def ours(row: dict) -> bool:
    """Whether a row of measurements is of this package, and not of another library."""
    library, way = row.get("library", PACKAGE), row.get("way", "triton")
    return library.startswith(PACKAGE) and way == "triton" and "refused" not in row


def changed(row: dict) -> str | None:
    """Why a row is not of the code of today: "changed", "unrecorded"; None where it is."""
    if not ours(row):
        return None
    if "sources" not in row:
        return "unrecorded"
    try:
        return None if digests(*row["sources"]) == row["sources"] else "changed"
    except LookupError:
        return "changed"


def marked(text: str, row: dict) -> str:
    """A number of a row as text, with a mark where the code has changed since."""
    return text + MARK if changed(row) else text


def note(rows: Iterable[dict], date: str) -> str:
    """A sentence on the rows that `marked` marks, "" where there are none.

    Args:
        rows: Rows of a file of measurements.  date: Of the file, for rows that have none.
    """
    days = {}
    for row in rows:
        if why := changed(row):
            days.setdefault(why, set()).add(row.get("date", date))
    said = {"changed": "with older kernels", "unrecorded": "with kernels that were not recorded"}
    parts = [f"{said[why]} ({', '.join(sorted(days[why]))})" for why in said if why in days]
    return f"{MARK} Measured {', or '.join(parts)}." if parts else ""
