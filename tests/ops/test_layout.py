"""How the package lies: imports point one way, and a tensor goes down the floors, file by file."""

import ast
import functools
import itertools
from pathlib import Path

import pytest

import linattn_edu

pytestmark = pytest.mark.whole
PACKAGE = Path(linattn_edu.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
OPS = "linattn_edu.ops"


def name_of(path):
    """The name of a module: linattn_edu.ops.check."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in FILES}


@functools.cache
def tree(module):
    return ast.parse(PATHS[module].read_text())


def modules_of(node):
    """The modules that an import statement names: of `from a import b`, a.b if it is one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    full = (f"{node.module}.{alias.name}" for alias in node.names)
    return [name if name in PATHS else node.module for name in full]


def imports(module):
    """(imported module, whether in a function), for every import statement."""
    inside = {
        id(node)
        for f in ast.walk(tree(module)) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(f)
    }  # fmt: skip
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert getattr(node, "level", 0) == 0, f"{module}: a relative import"
            for name in modules_of(node):
                yield name, id(node) in inside


def staged(module):
    """Stage -> its file, "delta.solve": what the records of a module say of their fields."""
    return {
        field.target.id: field.value.args[0].value
        for record in tree(module).body if isinstance(record, ast.ClassDef)
        for field in record.body if isinstance(field, ast.AnnAssign)
        and isinstance(field.value, ast.Call) and ast.unparse(field.value.func) == "stage"
    }  # fmt: skip


def below(name, *packages):
    return any(name == p or name.startswith(p + ".") for p in packages)


def test_no_two_modules_import_each_other():
    """Nor three in a circle; what functions import counts too."""
    left = {m: {name for name, _ in imports(m) if name in PATHS} - {m} for m in PATHS}
    for module, needs in left.items():
        for room in ("reference", "kernels"):
            needs |= {f"linattn_edu.{room}.{file}" for file in staged(module).values()}
    while free := [m for m, needs in left.items() if not needs]:
        left = {m: needs - {*free} for m, needs in left.items() if m not in free}
    assert not left


def test_functions_of_ops_import_kernels_and_triton_alone():
    late = {
        (module, name) for module in PATHS if below(module, OPS)
        for name, in_function in imports(module) if in_function
    }  # fmt: skip
    assert late
    assert not [(m, n) for m, n in late if not below(n, "linattn_edu.kernels", "triton")]


# who imports from here -> does not import from there
ONE_WAY = {
    "linattn_edu.reference": ("linattn_edu.kernels", OPS, "triton"),
    "linattn_edu.kernels": ("linattn_edu.reference", OPS),
    OPS: ("linattn_edu.teaching", "linattn_edu.doctor", "linattn_edu.testing"),
    f"{OPS}.delta": (f"{OPS}.gdn", f"{OPS}.kda"),
    f"{OPS}.gdn": (f"{OPS}.kda", f"{OPS}.gdn2"),
    f"{OPS}.kda": (f"{OPS}.gdn", f"{OPS}.gdn2"),
    f"{OPS}.gdn2": (f"{OPS}.gdn",),
    f"{OPS}.dplr": (f"{OPS}.gdn", f"{OPS}.kda", f"{OPS}.gdn2"),
    f"{OPS}.ssd": (f"{OPS}.gdn", f"{OPS}.kda"),
}


@pytest.mark.parametrize("here", ONE_WAY)
def test_imports_point_one_way(here):
    wrong = [
        (m, name) for m in PATHS if below(m, here)
        for name, _ in imports(m) if below(name, *ONE_WAY[here])
    ]  # fmt: skip
    assert not wrong


# -- a follower: from an argument of a public function to the load in a kernel


class Text:
    """A file as a reader has it: its functions, what it imports, what its names stand for."""

    def __init__(self, module):
        self.module, nodes = module, list(ast.walk(tree(module)))
        self.every = [f for f in nodes if isinstance(f, ast.FunctionDef)]
        self.functions = {f.name: f for f in tree(module).body if isinstance(f, ast.FunctionDef)}
        self.imported = {}
        for f in [tree(module), *self.functions.values()]:
            tried = [x for node in f.body if isinstance(node, ast.Try) for x in node.body]
            for node in (*f.body, *tried):
                if isinstance(node, ast.ImportFrom) and below(node.module, "linattn_edu"):
                    self.imported |= {a.asname or a.name: (node.module, a.name) for a in node.names}
        self.values = {
            node.targets[0].id: node.value for node in tree(module).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }  # fmt: skip

    def forward(self, operator):
        """The function under @operator.forward, or handed to it, and whose stages it takes."""
        own = [(self, f) for f in self.every if f"{operator}.forward" in decorators(f)]
        calls = [node.value for node in tree(self.module).body
                 if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]  # fmt: skip
        handed = [c.args[0] for c in calls if ast.unparse(c.func) == f"{operator}.forward"]
        return own + [hit for f in handed for hit in self.meaning(f)]

    def called(self, name):
        """What a name of this file stands for, as far as it can be called: (file, function)."""
        if name in self.functions:
            inner = [f for f in ast.walk(self.functions[name]) if isinstance(f, ast.FunctionDef)]
            made = [f for f in inner if any(d.endswith(".forward") for d in decorators(f))]
            return [(self, f) for f in made or inner[:1]]
        if name in self.imported:
            module, symbol = self.imported[name]
            return text(module).called(symbol) if f"{module}.{symbol}" not in PATHS else []
        return self.meaning(self.values[name], name) if name in self.values else []

    def meaning(self, value, name=None):
        """The same of an expression."""
        if isinstance(value, ast.Call) and name and (found := self.forward(name)):
            return found
        if isinstance(value, (ast.Tuple, ast.Dict)):
            parts = value.elts if isinstance(value, ast.Tuple) else value.values
            return [hit for part in parts for hit in self.meaning(part)]
        if isinstance(value, ast.IfExp):
            return self.meaning(value.body) + self.meaning(value.orelse)
        if isinstance(value, (ast.Call, ast.Subscript)):  # a factory; one of several; a launch
            return self.meaning(value.func if isinstance(value, ast.Call) else value.value)
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            owner = value.value.id
            if owner == "stages":
                file = self.stages()[value.attr]
                return text(f"linattn_edu.kernels.{file}").called(value.attr)
            module = self.module_of(owner)
            return text(module).called(value.attr) if module in PATHS else []
        return self.called(value.id) if isinstance(value, ast.Name) else []

    def module_of(self, name):
        """What module a name is, also where it was imported from a file that imports it."""
        module, symbol = self.imported.get(name, ("", ""))
        if f"{module}.{symbol}" in PATHS or module not in PATHS:
            return f"{module}.{symbol}"
        return text(module).module_of(symbol)

    def stages(self):
        """Stage -> its file, by the records here or where the stages come from."""
        if found := staged(self.module):
            return found
        given = (k.value for node in ast.walk(tree(self.module)) if isinstance(node, ast.Call)
                 for k in node.keywords if k.arg == "stages")  # fmt: skip
        owner = next(v.value.id for v in given if isinstance(v, ast.Attribute))
        return staged(".".join(self.imported[owner]))


text = functools.cache(Text)


def decorators(f):
    return {ast.unparse(d) for d in f.decorator_list}


def carries(node, names):
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def parameter(f, call, names, letter):
    """The parameter of f by which a call hands on one of the names, or None."""
    positional = [a.arg for a in f.args.posonlyargs + f.args.args]
    positional = positional[1:] if positional[:1] == ["stages"] else positional
    rest = f.args.vararg and f.args.vararg.arg
    for i, argument in enumerate(call.args):
        if carries(argument, names) and isinstance(argument, ast.Starred):
            known = letter, f"{letter}_ptr", f"{letter}_desc"
            return next((n for n in known if n in positional), rest)
        if carries(argument, names):
            return positional[i] if i < len(positional) else rest
    return next((k.arg for k in call.keywords if carries(k.value, names)), None)


# by which numbers come from memory: in Triton, in Gluon, and by its copying engine
# -> among how many of the first arguments there is where from
LOADS = {
    "tl.load": 1, "gl.load": 1, "async_load": 1, "async_read": 2,
}  # fmt: skip


def gathers(value):
    """Whether an expression holds several tensors, or descriptors of them: a record, for one."""
    of = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
    return isinstance(value, ast.Tuple) or of in ("map", "chunks_of") or of[:1].isupper()


def targets(node):
    """(name, value) of an assignment of several values to as many names."""
    left, right = node.targets[0], node.value
    if not (isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple)):
        return []
    pairs = zip(left.elts, right.elts, strict=True)
    return [(t, x) for t, x in pairs if isinstance(t, ast.Name)]


def paths(file, f, name, letter, before=()):
    """Every way of the argument `name` of f to a load: the (module, function) it goes through."""
    here = (*before, (file.module, f.name))
    names, local = {name}, {}
    for node in sorted(ast.walk(f), key=lambda n: getattr(getattr(n, "iter", n), "lineno", 0)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            local[node.targets[0].id] = node.value
            if gathers(node.value) and carries(node.value, names):
                names.add(node.targets[0].id)
        elif isinstance(node, ast.Assign) and carries(node.value, names):
            names |= {t.id for t, x in targets(node) if gathers(x) and carries(x, names)}
            names |= {t.id for t in ast.walk(node.targets[0])
                      if isinstance(t, ast.Name) and t.id == letter}  # fmt: skip
        elif isinstance(node, ast.comprehension) and carries(node.iter, names):
            names.add(node.target.id)
    for node in ast.walk(f):
        if not isinstance(node, ast.Call) or not carries(node, names):
            continue
        if any(carries(x, names) for x in node.args[: LOADS.get(ast.unparse(node.func), 0)]):
            yield here
            continue
        if ast.unparse(node.func) == "gl.warp_specialize":  # warps with functions of their own
            pairs = (x.elts for x in ast.walk(node.args[0])
                     if isinstance(x, ast.Tuple) and isinstance(x.elts[-1], ast.Tuple))  # fmt: skip
            calls = [ast.Call(g, given.elts, []) for g, given in pairs]
        else:
            calls = [node]
        for call in calls:
            yield from followed(file, call, names, letter, local, here)


def followed(file, node, names, letter, local, here):
    """The ways on from a call that hands on one of the names."""
    func = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    value = local.get(func.id) if isinstance(func, ast.Name) else None
    for next_file, g in file.meaning(value or node.func):
        argument = parameter(g, node, names, letter)
        if argument is not None and (next_file.module, g.name) not in here:
            yield from paths(next_file, g, argument, letter, here)


FAMILY, SHARED, STAGE, TILES = range(4)


def floor(module):
    if below(module, "linattn_edu.kernels"):
        return TILES if module == "linattn_edu.kernels.tiles" else STAGE
    families = (f"{OPS}.{family}" for family in ("gdn", "gdn2", "dplr", "kda", "ssd"))
    return FAMILY if below(module, *families) else SHARED


@pytest.mark.parametrize(
    ("start", "letter", "floors", "kernels"),
    [
        (
            f"{OPS}.gdn.chunk.chunk_gated_delta_rule",
            "q",
            {
                "ops.l2norm",
                "kernels.fused.gdn_fwd",
                "kernels.gluon.gdn_intra",
                "kernels.gluon.gdn_scan",
                "kernels.delta.output",
            },
            {
                "l2norm_kernel",
                "scores_kernel",
                "intra_chunk_gluon_kernel",
                "intra_chunk_ring_gluon_kernel",
                "chunk_fwd_gluon_kernel",
                "scan_kernel",
                "scan_transposed_kernel",
                "scan_gluon_kernel",
                "output_kernel",
            },
        ),
        (
            f"{OPS}.kda.chunk.chunk_kda",
            "q",
            {"ops.l2norm", "kernels.delta.kda_intra", "kernels.delta.wy"},
            {
                "l2norm_kernel",
                "kda_scores_kernel",
                "kda_prepare_gluon_kernel",
                "wy_kernel",
                "kda_gates_kernel",
            },
        ),
        (
            f"{OPS}.gdn2.chunk.chunk_gdn2",
            "q",
            {"ops.kda.chunk", "ops.l2norm", "kernels.delta.kda_intra", "kernels.delta.wy"},
            {
                "l2norm_kernel",
                "kda_scores_kernel",
                "kda_prepare_gluon_kernel",
                "wy_kernel",
                "kda_gates_kernel",
            },
        ),
        (
            f"{OPS}.gdn2.recurrent.fused_recurrent_gdn2",
            "q",
            {"ops.delta.recurrence", "ops.delta.decode", "kernels.delta.recurrent"},
            {"l2norm_kernel", "recurrent_kernel"},
        ),
        (
            f"{OPS}.dplr.recurrent.fused_recurrent_dplr_delta_rule",
            "q",
            {"kernels.dplr.recurrent"},
            {"dplr_recurrent_kernel"},
        ),
        (
            f"{OPS}.dplr.chunk.chunk_dplr_delta_rule",
            "q",
            {"ops.dplr.recurrent", "kernels.dplr.intra", "kernels.dplr.recurrent"},
            {"dplr_scores_kernel", "dplr_recurrent_kernel"},
        ),
        (
            f"{OPS}.gdn.recurrent.fused_recurrent_gated_delta_rule",
            "q",
            {"ops.delta.recurrence", "ops.delta.decode", "kernels.delta.recurrent"},
            {"l2norm_kernel", "recurrent_kernel"},
        ),
        (
            f"{OPS}.kda.recurrent.fused_recurrent_kda",
            "q",
            {"ops.delta.recurrence", "ops.delta.decode", "kernels.delta.recurrent"},
            {"l2norm_kernel", "recurrent_kernel"},
        ),
        (
            f"{OPS}.causal_conv1d.causal_conv1d",
            "x",
            {"kernels.delta.causal_conv1d", "kernels.tiles"},
            {"causal_conv1d_kernel"},
        ),
        (
            f"{OPS}.causal_conv1d_update.causal_conv1d_update",
            "x",
            {"kernels.delta.causal_conv1d_update"},
            {"causal_conv1d_update_kernel"},
        ),
        (
            f"{OPS}.rms_norm_gated.rms_norm_gated",
            "x",
            {"kernels.delta.rms_norm_gated", "kernels.tiles"},
            {"rms_norm_gated_kernel"},
        ),
        (
            f"{OPS}.ssd.chunk.mamba_chunk_scan_combined",
            "x",
            {"kernels.fused.ssd_fwd"},
            {
                "ssd_ends_kernel",
                "ssd_fwd_kernel",
                "ssd_fwd_gluon_kernel",
                "chunk_state_kernel",
                "chunk_scan_kernel",
            },
        ),
    ],
)
def test_a_tensor_goes_down_the_floors(start, letter, floors, kernels):
    """Each file once, none above the one before, to every kernel that reads q, or x."""
    module, _, name = start.rpartition(".")
    file = text(module)
    reached, entered = set(), set()
    for path in paths(file, file.functions[name], letter, letter):
        modules = [m for m, _ in path]
        visits = [m for i, m in enumerate(modules) if modules[i - 1 : i] != [m]]
        assert len(visits) == len({*visits}), visits
        assert [floor(m) for m in visits] == sorted(floor(m) for m in visits), visits
        reached |= {f for _, f in path if f.endswith("_kernel")}
        entered |= {m.removeprefix("linattn_edu.") for m in visits}
    assert reached == kernels
    assert floors <= entered


def test_the_followed_kernels_are_those_of_the_routes(monkeypatch):
    """Of every route that kernels choose, those that take q are among the kernels followed."""
    pytest.importorskip("triton")
    import torch

    from linattn_edu.kernels.routes import choosing

    module = f"{OPS}.gdn.chunk"
    file, f = text(module), linattn_edu.chunk_gated_delta_rule
    reached = {name for path in paths(file, file.functions[f.__name__], "q", "q")
               for _, name in path}  # fmt: skip
    readers = {
        f.name for m in PATHS if below(m, "linattn_edu.kernels")
        for f in text(m).functions.values()
        if {"q_ptr", "q_desc"} & {a.arg for a in f.args.args}
    }  # fmt: skip
    ran = set()
    for gpu, gluon, B in itertools.product(("a100", "h100"), ("", "off"), (1, 64)):
        monkeypatch.setattr(choosing, "GLUON", gluon)
        for H in (2, 16):
            x, v = (torch.empty(B, 2048, n, 128, dtype=torch.bfloat16, device="meta")
                    for n in (H, 16))  # fmt: skip
            ran |= {
                s.kernel for s in linattn_edu.route(f, x, x, v, *[v[..., 0]] * 2, gpu=gpu).forward
            }
    assert "scan_gluon_kernel" in ran and "scores_kernel" in ran
    assert ran & readers <= reached
