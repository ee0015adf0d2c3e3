"""The kernel ladders of the chapters: each rung as a call, made of the chapter's own code.

A ladder is a function under `ladder`, which names its rungs, as the chapter calls them, with the
step that each belongs to. The function gets a `Size` and the chapter's definitions and returns a
`Rung` for each name. Nothing of a kernel is repeated here: `definitions` reads it from the chapter,
or a puzzle's from its solution.
"""

import ast
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch
import triton
from torch import Tensor

from benchmarks import dplr
from benchmarks.cases import SAFE_BOUND, Case
from benchmarks.forms import KDAStageArguments, SSDStageArguments, StageArguments, stage_function
from benchmarks.ladder_peers import Peer, here
from benchmarks.mamba import Scan
from benchmarks.measure import gradient
from linattn_edu.kernels.tiles import block
from linattn_edu.sources import cells
from linattn_edu.testing import gdn_inputs, kda_inputs, ssd_inputs

ROOT = Path(__file__).resolve().parents[1]
BOTH, SINGLE = ("bfloat16", "float32"), ("float32",)


# ---- what a chapter defines


def statements(chapter: str) -> list[ast.stmt]:
    """The imports, one name each, and the functions of a chapter, in their order."""
    found = []
    for code in cells(ROOT / "chapters" / f"{chapter}.md"):
        for node in ast.parse(code).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    one = ast.parse(ast.unparse(node)).body[0]
                    one.names = [alias]
                    found.append(one)
            elif isinstance(node, ast.FunctionDef):
                node.text = "\n".join(code.splitlines()[_first(node) - 1 : node.end_lineno])
                found.append(node)
    return found


def _first(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def _bound(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return node.name
    return node.names[0].asname or node.names[0].name.split(".")[0]


def kernels(chapter: str) -> list[str]:
    """The names of the @triton.jit functions of a chapter."""
    jit = [n for n in statements(chapter) if isinstance(n, ast.FunctionDef)]
    return [n.name for n in jit if any("jit" in ast.unparse(d) for d in n.decorator_list)]


def source(chapter: str, names: Iterable[str]) -> str:
    """The chapter's functions of these names and all that they use, as the text of a module."""
    every, wanted, taken = statements(chapter), list(names), {}
    while wanted:
        name = wanted.pop()
        places = [i for i, node in enumerate(every) if _bound(node) == name]
        if not places:
            continue  # a builtin, an argument, a local name
        functions = [i for i in places if isinstance(every[i], ast.FunctionDef)]
        place = functions[0] if functions else places[-1]
        if place in taken:
            continue
        node = every[place]
        if isinstance(node, ast.FunctionDef):
            taken[place] = node.text
            wanted += {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {name}
        else:
            taken[place] = ast.unparse(node)
    imports = [taken[i] for i in sorted(taken) if not isinstance(every[i], ast.FunctionDef)]
    functions = [taken[i] for i in sorted(taken) if isinstance(every[i], ast.FunctionDef)]
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(functions) + "\n"


def definitions(chapter: str, names: Iterable[str], folder: Path) -> ModuleType:
    """The module that `source` is, in a file, where Triton can read its kernels."""
    path = folder / f"rungs_{chapter}.py"
    path.write_text(source(chapter, names), encoding="utf-8")
    return _module(path)


def solution(puzzle: str) -> ModuleType:
    """The solved puzzle of a chapter."""
    return _module(ROOT / "puzzles" / f"{puzzle}_solved.py")


def _module(path: Path) -> ModuleType:
    name = f"_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---- sizes and inputs


@dataclass
class Size:
    """How large the inputs are: "full" is timed, "few" has two chunks and compiles the same,
    "tiny" runs in the interpreter."""

    kind: str
    dtype: torch.dtype
    device: str
    shape: dict[str, int] = field(default_factory=dict)  # of the inputs that were made

    @property
    def C(self) -> int:
        return 16 if self.kind == "tiny" else 64

    @property
    def levels(self) -> int:
        return self.C.bit_length() - 1

    def _scaled(self, B: int, T: int, H: int) -> tuple[int, int, int]:
        if self.kind == "full":
            return B, T, H
        T = min(T, 3 * self.C if self.kind == "tiny" else 2 * self.C)
        return min(B, 2), T, min(H, 2) if self.kind == "tiny" else H

    def width(self, n: int) -> int:
        return min(n, 32) if self.kind == "tiny" else n

    def _options(self) -> dict:
        return {"dtype": self.dtype, "device": self.device}

    def _heads(self, B: int, T: int, H: int) -> tuple[int, int, int, int]:
        """B, T, H and K: heads of 128, or in float32 twice as many of 64, whose tiles fit."""
        K, more = (64, 2) if self.dtype == torch.float32 else (128, 1)
        return *self._scaled(*((B, T, more * H) if H > 1 else (more * B, T, H))), self.width(K)

    def gdn(self, B: int, T: int, H: int) -> StageArguments:
        """Arguments of the stages of Gated DeltaNet, each head with keys of its own."""
        B, T, H, K = self._heads(B, T, H)
        self.shape = {"B": B, "T": T, "H": H, "K": K, "V": K, "C": self.C}
        return StageArguments(gdn_inputs(B, T, H, H, K, K, **self._options()), self.C)

    def kda(self, B: int, T: int, H: int) -> KDAStageArguments:
        """The same of Kimi Delta Attention, its decays above SAFE_BOUND."""
        B, T, H, K = self._heads(B, T, H)
        self.shape = {"B": B, "T": T, "H": H, "K": K, "V": K, "C": self.C}
        i = kda_inputs(B, T, H, H, K, K, **self._options())
        i.g.clamp_(min=SAFE_BOUND)
        return KDAStageArguments(i, self.C)

    def ssd(self, own: bool = False) -> SSDStageArguments:
        """The same of Mamba-2: one sequence, the heads of its 2.7b in a group; own: or each in its
        own."""
        B, T, H = self._scaled(1, 32768, 80)
        N, P = self.width(128), self.width(64)
        G = H if own else 1
        self.shape = {"B": B, "T": T, "H": H, "G": G, "N": N, "P": P, "C": self.C}
        i = ssd_inputs(B, T, H, G, P, N, **self._options())
        step = torch.nn.functional.softplus(i.dt.float() + i.dt_bias)
        return SSDStageArguments(Scan(i.x, step, i.A, i.B, i.C, i.D), self.C)

    def dplr(self, B: int, T: int, H: int) -> tuple[Tensor, ...]:
        """q, k, a, b and gk of the general delta rule, as a layer of RWKV-7 has them."""
        B, T, H, K = self._heads(B, T, H)
        self.shape = {"B": B, "T": T, "H": H, "K": K, "C": self.C}
        x = dplr.inputs(Case("", "dplr", B, T, H, H, K, K), **self._options())
        return x.q, x.k, x.a, x.b, x.gk

    def randn(self, *shape: int) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(3)
        return torch.randn(*shape, generator=generator, device=self.device)


def as_one(*tensors: Tensor) -> list[Tensor]:
    """Tensors of sequences [B, T, ...] as those of one sequence, chunk after chunk."""
    return [x.reshape(1, -1, *x.shape[2:]) for x in tensors]


# ---- the ladders


@dataclass(frozen=True)
class Rung:
    """A rung as a call that returns its results.

    like: what the shipped kernels make of the same inputs, None for those themselves.  part: of the
    results, those that `like` returns, in its order and form.  first: the first call, where later
    ones add to what the earlier have left.  shape: where it is not that of the other rungs.  given:
    of what ships, its arguments for the peers of its ladder.
    """

    call: Callable[[], object]
    like: Callable[[], object] | None = None
    part: Callable[[object], object] = lambda results: results
    first: Callable[[], object] | None = None
    shape: dict[str, int] | None = None
    given: tuple = ()


@dataclass(frozen=True)
class Ladder:
    chapter: str
    steps: dict[str, int]  # of each rung
    dtypes: tuple[str, ...]
    make: Callable[[Size, ModuleType], dict[str, Rung]]
    defined: tuple[str, ...]  # what is taken from the chapter
    single: tuple[str, ...] = ()  # rungs whose tensors are float32 whatever the inputs are

    def ships(self, rung: str) -> bool:
        """Whether a rung is the package's: it is neither the chapter's code nor a puzzle."""
        return not rung.startswith("puzzle") and not set(rung.split()) & set(self.kernels)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The chapter's kernels and functions that are rungs."""
        return tuple(n for n in (*kernels(self.chapter), *self.defined))

    @property
    def peers(self) -> dict[str, Peer]:
        """What libraries that are installed have for its stage."""
        return here(self.chapter)

    def names(self, dtype: str) -> list[str]:
        """The rungs that are timed in a dtype."""
        return [n for n in self.steps if dtype == "float32" or n not in self.single]

    def rungs(self, size: Size, folder: Path, peers: Iterable[str] = ()) -> dict[str, Rung]:
        """Every rung, on inputs of a size, then these peers; folder: for the chapter's code."""
        made = self.make(size, definitions(self.chapter, self.defined, folder))
        assert list(made) == list(self.steps), (list(made), list(self.steps))
        beside = {name: beside_rung(self.peers[name], made) for name in peers}
        return {n: made[n] for n in self.names(str(size.dtype).removeprefix("torch."))} | beside


def beside_rung(peer: Peer, made: dict[str, Rung]) -> Rung:
    """A peer as a rung, that must return what the rung returns beside which it stands."""
    rung = made[peer.of]
    like = lambda: peer.like((rung.first or rung.call)(), rung.given)
    return Rung(peer.call(rung.given), like, peer.same, shape=rung.shape)


LADDERS: dict[str, Ladder] = {}


def ladder(
    chapter: str, steps: str, defined: str, dtypes: tuple[str, ...] = BOTH, single: str = ""
):  # fmt: skip
    """Declare a ladder: "1 name, 1 name, 2 name", and the names in the chapter's code."""
    pairs = (item.strip().split(" ", 1) for item in steps.split(","))
    numbers = {name: int(number) for number, name in pairs}

    def declared(make):
        names = tuple(defined.split()), tuple(single.split())
        LADDERS[chapter] = Ladder(chapter, numbers, dtypes, make, *names)
        return make

    return declared


def sizes_of(**sizes: int) -> dict[str, int]:
    return sizes


@ladder(
    "01_recurrent",
    "1 naive_kernel, 2 tiled_kernel, 3 one_pass_kernel, 4 recurrent",
    "naive tiled one_pass_kernel",
)
def _recurrent(z: Size, d: ModuleType) -> dict[str, Rung]:
    i = z.gdn(8, 4096, 16).i
    del z.shape["C"]  # no chunks
    given = i.q, i.k, i.v, i.g, i.beta
    (B, T, H, K), o = i.q.shape, torch.empty_like(i.v)
    recurrent = stage_function("recurrent", "triton")

    def one_pass():
        d.one_pass_kernel[(B * H,)](*given, o, K**-0.5, T, H, K, K)
        return o

    def shipped():
        return recurrent(*given, output_final_state=False)[0]

    return {
        "naive_kernel": Rung(lambda: d.naive(*given), shipped),
        "tiled_kernel": Rung(lambda: d.tiled(*given), shipped),
        "one_pass_kernel": Rung(one_pass, shipped),
        "recurrent": Rung(shipped, given=given),
    }


@ladder(
    "02_gate_cumsum",
    "1 naive_kernel, 2 scan_kernel, 3 gate_cumsum",
    "naive_kernel scan_kernel launch",
    SINGLE,
)
def _gate_cumsum(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(8, 4096, 16)
    shipped = shipped_stage(a, "gate_cumsum")
    return {
        "naive_kernel": Rung(lambda: d.launch(d.naive_kernel, a.i.g, z.C), shipped),
        "scan_kernel": Rung(lambda: d.launch(d.scan_kernel, a.i.g, z.C), shipped),
        "gate_cumsum": Rung(shipped, given=(a.i.g, z.C)),
    }


def shipped_stage(a: StageArguments, name: str) -> Callable[[], object]:
    """A stage of the package on its own arguments, which are made here."""
    args, kwargs = a[name]
    f = stage_function(name, "triton")
    return lambda: f(*args, **kwargs)


@ladder(
    "03_solve",
    "1 solve_naive, 2 solve_tiled (C = 32), 3 solve (C = 32), 3 solve",
    "naive tiled",
)
def _solve(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(8, 4096, 16)
    k, beta, solve = a.i.k, a.i.beta, stage_function("solve", "triton")
    if z.kind == "tiny":  # the tiled one has chunks of 32 and no others
        k, beta = k[:, :32].contiguous(), beta[:, :32].contiguous()
    whole = lambda: solve(k, beta, chunk_size=z.C)
    short = lambda: solve(k, beta, chunk_size=32)
    return {
        "solve_naive": Rung(lambda: d.naive(k, beta, chunk_size=z.C), whole),
        "solve_tiled (C = 32)": Rung(lambda: d.tiled(k, beta), short),
        "solve (C = 32)": Rung(short),
        "solve": Rung(whole, given=(k, beta, z.C)),
    }


@ladder("04_wy", "1 wy_naive, 2 wy_tiled, 3 wy", "wy_naive wy_tiled")
def _wy(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(128, 4096, 1)
    given = as_one(*a["wy"][0])
    k, v = given[:2]
    (_, T, _, K), outs, wy = k.shape, outputs(k, v), stage_function("wy", "triton")
    sizes = sizes_of(K=K, V=K, BT=z.C, BK=block(K), BV=block(K))
    shipped = lambda: wy(*given)
    return {
        "wy_naive": launched(d.wy_naive, (T,), (*given, *outs), sizes, outs, shipped),
        "wy_tiled": launched(d.wy_tiled, (T // z.C,), (*given, *outs, T), sizes, outs, shipped),
        "wy": Rung(shipped, given=tuple(given)),
    }


def outputs(*like: Tensor) -> list[Tensor]:
    """Memory for results like these, NaN before."""
    return [torch.full_like(x, torch.nan) for x in like]


def launched(kernel, grid, args, sizes, outs, like, part=lambda results: results) -> Rung:
    """The rung that is one launch of a kernel into `outs`."""

    def call():
        kernel[grid](*args, **sizes)
        return outs

    return Rung(call, like, part)


@ladder("05_state", "1 state_naive, 2 state_tiled, 3 state", "state_naive state_tiled")
def _state(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(1, 4096, 128)
    k, w, u, gc, _ = a["state"][0]
    (_, T, HV, K), stage = k.shape, stage_function("state", "triton")
    shipped = lambda: stage(k, w, u, gc, chunk_size=z.C)[:2]
    outs = [k.new_full((1, T // z.C, HV, K, K), torch.nan), *outputs(u)]
    args, sizes = (k, w, u, gc, *outs, T), sizes_of(HV=HV, K=K, V=K, BT=z.C, BK=block(K))
    BV = min(32, K)
    return {
        "state_naive": launched(d.state_naive, (HV,), args, sizes | {"BV": K}, outs, shipped),
        "state_tiled": launched(
            d.state_tiled, (K // BV, HV), args, sizes | {"BV": BV}, outs, shipped
        ),
        "state": Rung(shipped, given=(k, w, u, gc, z.C)),
    }


@ladder(
    "06_output",
    "1 output_by_token, 2 output_by_chunk, 3 output",
    "output_by_token output_by_chunk",
)
def _output(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(8, 4096, 16)
    given, kwargs = a["output"]
    given = as_one(*given)
    q, _, v = given[:3]
    (_, T, H, K), outs, stage = q.shape, outputs(v), stage_function("output", "triton")
    shipped = lambda: [stage(*given, **kwargs)]
    sizes, args = sizes_of(H=H, K=K, V=K, BT=z.C, BK=K, BV=K), (*given, *outs, kwargs["scale"])
    grid = T // z.C, H
    return {
        "output_by_token": launched(d.output_by_token, (T, H), args, sizes, outs, shipped),
        "output_by_chunk": launched(d.output_by_chunk, grid, (*args, T), sizes, outs, shipped),
        "output": Rung(shipped, given=(*given, kwargs["scale"], z.C)),
    }


@ladder(
    "07_kda_intra",
    "1 scores_by_token, 2 puzzle 07, 2 intra_by_halves, 3 kda_intra",
    "scores_by_token intra_by_halves",
)
def _kda_intra(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.kda(128, 4096, 1)
    given = as_one(*a["kda_intra"][0])
    q = given[0]
    (_, T, _, K), stage = q.shape, stage_function("kda_intra", "triton")
    shipped = lambda: stage(*given, chunk_size=z.C)
    scores = [q.new_zeros(1, T, 1, z.C) for _ in range(2)]  # what is not written is 0
    outs = [q.new_full((1, T, 1, z.C), torch.nan) for _ in range(2)]
    sizes, puzzle = sizes_of(K=K, BT=z.C, BK=K), solution("07_kda_intra")
    C, few = z.C, slice(0, 32 * z.C)

    def inverse(results):  # of the first chunks
        L = results[1][0, few, 0].view(-1, C, C).double().tril(-1)
        A = torch.linalg.inv(torch.eye(C, device=L.device, dtype=L.dtype) + L)
        return results[0], A.reshape(1, -1, 1, C).float()

    def first():
        P, A = shipped()
        return P, A[:, few].float()

    return {
        "scores_by_token": launched(
            d.scores_by_token, (T,), (*given, *scores), sizes, scores, first, inverse
        ),
        "puzzle 07": Rung(lambda: puzzle.kda_intra_triton(*given, chunk_size=z.C), shipped),
        "intra_by_halves": launched(
            d.intra_by_halves, (T // z.C,), (*given, *outs, T),
            sizes | {"LEVELS": z.levels}, outs, shipped,
        ),
        "kda_intra": Rung(shipped),
    }  # fmt: skip


@ladder(
    "08_output_bwd",
    "1 output_bwd_by_token, 2 output_bwd_by_chunk, 3 puzzle 08, 4 output_bwd",
    "output_bwd_by_token output_bwd_by_chunk",
)
def _output_bwd(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(8, 4096, 16)
    given, kwargs = a["output_bwd"]
    given = as_one(*given)
    q, k, v, _, gc, _ = given
    (_, T, H, K), stage = q.shape, stage_function("output_bwd", "triton")
    shipped = lambda: stage(*given, **kwargs)
    outs, puzzle = outputs(q, k, v, gc), solution("08_output_bwd")
    sizes, args = sizes_of(H=H, K=K, V=K, BT=z.C, BK=K, BV=K), (*given, *outs, kwargs["scale"], T)
    by_chunk, grid = d.output_bwd_by_chunk, (T // z.C, H)
    return {
        "output_bwd_by_token": launched(d.output_bwd_by_token, (T, H), args, sizes, outs, shipped),
        "output_bwd_by_chunk": launched(by_chunk, grid, args, sizes, outs, shipped),
        "puzzle 08": Rung(lambda: puzzle.output_bwd_triton(*given, **kwargs), shipped),
        "output_bwd": Rung(shipped),
    }


@ladder(
    "09_state_bwd",
    "1 state_bwd_naive, 2 state_bwd_tiled, 3 puzzle 09, 4 state_bwd",
    "state_bwd_naive state_bwd_tiled",
)
def _state_bwd(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(1, 4096, 128)
    (*given, _), kwargs = a["state_bwd"]
    q, do = given[0], given[4]
    (_, T, HV, K), stage = q.shape, stage_function("state_bwd", "triton")
    shipped = lambda: stage(*given, **kwargs)[:2]
    outs = [q.new_full((1, T // z.C, HV, K, K), torch.nan), *outputs(do)]
    args, sizes = (*given, *outs, kwargs["scale"], T), sizes_of(HV=HV, K=K, V=K, BT=z.C, BK=K)
    BV, puzzle = min(32, K), solution("09_state_bwd")
    dht = q.new_zeros(1, HV, K, K, dtype=torch.float32)
    naive, tiled = sizes | {"BV": K}, sizes | {"BV": BV}
    return {
        "state_bwd_naive": launched(d.state_bwd_naive, (HV,), args, naive, outs, shipped),
        "state_bwd_tiled": launched(d.state_bwd_tiled, (K // BV, HV), args, tiled, outs, shipped),
        "puzzle 09": Rung(lambda: puzzle.state_bwd_triton(*given, dht, **kwargs)[:2], shipped),
        "state_bwd": Rung(shipped, given=(*given, kwargs["scale"], z.C)),
    }


@ladder(
    "10_wy_bwd",
    "1 naive_Z and naive_rest, 2 wy_bwd_tiled, 3 puzzle 10, 4 wy_bwd",
    "naive_Z naive_rest wy_bwd_tiled",
)
def _wy_bwd(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(128, 4096, 1)
    k, v, beta, gc, A, h, v_new, dh, dv_new, dk, dgc = as_one(*a["wy_bwd"][0])
    dh, dk, dgc = (torch.zeros_like(x) for x in (dh, dk, dgc))  # steps 1 and 2 are without
    (_, T, _, K), stage = k.shape, stage_function("wy_bwd", "triton")
    Z, outs, puzzle = torch.empty_like(v), outputs(k, v, beta, gc), solution("10_wy_bwd")
    sizes = sizes_of(K=K, V=K, BT=z.C)
    before = k, v, beta, gc, A, h, v_new
    first = lambda: stage(*before, dh, dv_new, dk.clone(), dgc.clone())
    added = dk.clone(), dgc.clone()  # the stage adds to them

    def naive():
        d.naive_Z[(T,)](gc, A, dv_new, Z, T, V=K, BT=z.C)
        d.naive_rest[(T,)](k, v, beta, gc, h, v_new, Z, *outs, T, **sizes)
        return outs

    return {
        "naive_Z and naive_rest": Rung(naive, first),
        "wy_bwd_tiled": launched(
            d.wy_bwd_tiled, (T // z.C,), (*before, dv_new, *outs, T), sizes, outs, first
        ),
        "puzzle 10": Rung(
            lambda: puzzle.wy_bwd_triton(*before, dh, dv_new, dk), lambda: first()[:3]
        ),
        "wy_bwd": Rung(lambda: stage(*before, dh, dv_new, *added), first=first),
    }


@ladder(
    "11_kda_intra_bwd",
    "1 naive_pairs, 2 tiled_pairs, 4 kda_intra_bwd",
    "naive_pairs tiled_pairs",
)
def _kda_intra_bwd(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.kda(128, 4096, 1)
    given = as_one(*a["kda_intra_bwd"][0])
    pairs, rest = given[:6], [torch.zeros_like(x) for x in given[6:]]  # the ladder is without
    q, k, beta, gc = pairs[:4]
    (_, T, _, K), stage = q.shape, stage_function("kda_intra_bwd", "triton")
    outs, sizes = outputs(q, k, beta, gc), sizes_of(K=K, BT=z.C)
    args = (*pairs, *outs, T)
    shipped = lambda: stage(*pairs, *rest)
    first = lambda: stage(*pairs, *(x.clone() for x in rest))
    levels = sizes | {"LEVELS": z.levels}
    return {
        "naive_pairs": launched(d.naive_pairs, (T,), args, sizes, outs, first),
        "tiled_pairs": launched(d.tiled_pairs, (T // z.C,), args, levels, outs, first),
        "kda_intra_bwd": Rung(shipped, first=first, given=(*pairs, *rest)),
    }


@ladder(
    "12_gate_bwd",
    "1 from_the_end, 2 gate_bwd_scan, 3 puzzle 12, 4 gate_bwd without a raw gate, 4 gate_bwd",
    "from_the_end gate_bwd_scan",
    SINGLE,
)
def _gate_bwd(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(8, 4096, 16)
    (g,) = as_one(a.i.g)
    _, T, HV = g.shape
    dgc, raw = gradient(g), z.randn(1, T, HV)
    A_log, bias = (z.randn(2, HV) - 1).unbind()
    stage, puzzle = stage_function("gate_bwd", "triton"), solution("12_gate_bwd")
    grid, (dg, da) = (T // z.C, HV), outputs(g, g)
    sums = g.new_full((T // z.C, 2, HV), torch.nan)
    plain = lambda: stage(dgc, g, chunk_size=z.C)[0]
    layer = lambda: stage(dgc, raw, A_log, bias, chunk_size=z.C)

    def from_the_end():
        d.from_the_end[grid](dgc, g, dg, T, HV, BT=z.C)
        return dg

    def scan():
        d.gate_bwd_scan[grid](dgc, raw, A_log, bias, da, sums, T, HV, BT=z.C)
        return da, *sums.sum(0)

    return {
        "from_the_end": Rung(from_the_end, plain),
        "gate_bwd_scan": Rung(scan, layer),
        "puzzle 12": Rung(
            lambda: puzzle.gate_bwd_triton(dgc, raw, A_log, bias, chunk_size=z.C), layer
        ),
        "gate_bwd without a raw gate": Rung(plain, given=(dgc, z.C)),
        "gate_bwd": Rung(layer, given=(dgc, raw, A_log, bias, z.C)),
    }


@ladder(
    "12e_dplr",
    "1 scores_by_token, 2 scores_one_later, 3 scores_of_rows, 4 dplr_intra",
    "scores_by_token scores_one_later scores_of_rows",
)
def _dplr_intra(z: Size, d: ModuleType) -> dict[str, Rung]:
    q, k, a, b, gk = as_one(*z.dplr(128, 4096, 1))
    (_, T, _, K), C = q.shape, z.C
    given = q, k, a, b, stage_function("gate_cumsum", "triton")(gk, chunk_size=C)
    stage = stage_function_of("dplr", "dplr_intra", "intra")
    scores = [q.new_zeros(1, T, 1, C) for _ in range(4)]  # what is not written is 0
    sizes = sizes_of(K=K, BT=C, BK=block(K))

    def shipped():
        _, ak, qb, qk, *_ = stage(*given, chunk_size=C)
        return qk, qb, ak

    rungs = {
        "scores_by_token": (d.scores_by_token, (T,), ()),
        "scores_one_later": (d.scores_one_later, (T,), (T,)),
        "scores_of_rows": (d.scores_of_rows, (T // 16,), (T,)),
    }
    return {
        name: launched(kernel, grid, (*given, *scores, *more), sizes, scores[:3], shipped)
        for name, (kernel, grid, more) in rungs.items()
    } | {"dplr_intra": Rung(shipped)}


@ladder(
    "13_ssd",
    "1 whole_chunk_scan, 2 tiled_chunk_scan, 3 chunk_scan",
    "whole_chunk_scan tiled_chunk_scan",
)
def _ssd(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.ssd(own=True)
    C, B, x, step, gc, h, _ = a["chunk_scan"][0]
    (_, T, H, P), N = x.shape, B.shape[3]
    scan = stage_function("chunk_scan", "triton")
    shipped = lambda: [scan(C, B, x, step, gc, h, chunk_size=z.C)]
    outs, grid, BP = outputs(x), (T // z.C, H), min(32, P)
    sizes, args = sizes_of(H=H, N=N, P=P, BT=z.C), (C, B, x, step, gc, h, *outs, T)
    tiles = sizes | {"BN": min(64, N), "BP": BP}
    tiled, programs = d.tiled_chunk_scan, (*grid, P // BP)
    return {
        "whole_chunk_scan": launched(d.whole_chunk_scan, grid, args, sizes, outs, shipped),
        "tiled_chunk_scan": launched(tiled, programs, args, tiles, outs, shipped),
        "chunk_scan": Rung(shipped, given=(C, B, x, step, gc, h, z.C)),
    }


@ladder(
    "14_chunk_scan_bwd_dstates",
    "1 dstates_naive, 2 dstates_tiled, 3 chunk_scan_bwd_dstates",
    "dstates_naive dstates_tiled",
)
def _dstates(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.ssd()
    C, gc, dy = a["chunk_scan_bwd_dstates"][0]
    (_, T, H, P), (G, N) = dy.shape, C.shape[2:]
    stage = shipped_stage(a, "chunk_scan_bwd_dstates")
    shipped = lambda: [stage()]
    outs = outputs(shipped()[0])
    sizes, args = sizes_of(G=G, H=H, N=N, P=P, BT=z.C), (C, gc, dy, *outs, T)
    whole, BN = sizes | {"BN": N, "BP": P}, min(64, N)
    grid, tiles = (T // z.C, H), sizes | {"BN": BN, "BP": P}
    return {
        "dstates_naive": launched(d.dstates_naive, grid, args, whole, outs, shipped),
        "dstates_tiled": launched(d.dstates_tiled, (*grid, N // BN), args, tiles, outs, shipped),
        "chunk_scan_bwd_dstates": Rung(shipped, given=(C, gc, dy, z.C)),
    }


@ladder(
    "15_state_passing_bwd",
    "1 passing_naive, 2 passing_atomic, 2 passing_parts, 3 state_passing_bwd",
    "passing_naive passing_atomic passing_parts",
    SINGLE,
)
def _passing(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.ssd()
    dh, gc, h = a["state_passing_bwd"][0]
    (_, NT, H, N, P), T, D = dh.shape, gc.shape[1], dh.shape[3] * dh.shape[4]
    dht = z.randn(1, H, N, P)
    stage = stage_function("state_passing_bwd", "triton")
    shipped = lambda: stage(dh, gc, h, dht, chunk_size=z.C)
    ds, dh0, dlast = *outputs(dh, dht), dh.new_full((1, NT, H), torch.nan)
    BD = min(512, D)
    parts = dh.new_full((1, NT, H, D // BD), torch.nan)
    sizes = sizes_of(H=H, D=D, BT=z.C)

    def atomic():
        dlast.zero_()
        d.passing_atomic[(H, D // BD)](dh, gc, h, dht, ds, dlast, dh0, T, BD=BD, **sizes)
        return ds, dlast, dh0

    def in_parts():
        d.passing_parts[(H, D // BD)](dh, gc, h, dht, ds, parts, dh0, T, BD=BD, **sizes)
        return ds, parts.sum(-1), dh0

    naive = dh, gc, h, dht, ds, dlast, dh0, T
    return {
        "passing_naive": launched(
            d.passing_naive, (H,), naive, sizes | {"BD": D}, (ds, dlast, dh0), shipped
        ),
        "passing_atomic": Rung(atomic, shipped),
        "passing_parts": Rung(in_parts, shipped),
        "state_passing_bwd": Rung(shipped, given=(dh, gc, h, dht, z.C)),
    }


@ladder(
    "16_chunk_state_bwd_db",
    "1 db_naive, 2 db_grouped, 3 chunk_state_bwd_db",
    "db_naive db_grouped sum_heads",
)
def _db(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.ssd()
    stage, given = shipped_stage(a, "chunk_state_bwd_db"), a["chunk_state_bwd_db"][0]
    B, x, _, gc, _ = given
    (_, T, H, P), (G, N) = x.shape, B.shape[2:]
    sizes = sizes_of(G=G, H=H, N=N, P=P, BT=z.C, BN=N, BP=P)
    each, m = gc.new_full((1, T, H, N), torch.nan), torch.full_like(gc, torch.nan)
    (whole,) = outputs(B)
    NT = T // z.C

    def naive():
        d.db_naive[(NT, H)](*given, each, m, T, **sizes)
        return d.sum_heads(each, G), m

    def shipped():
        dB, dgc, _ = stage()
        return dB, dgc

    negated = lambda results: (results[0], -results[1])
    grouped = (*given, whole, m, T)
    return {
        "db_naive": Rung(naive, shipped, negated),
        "db_grouped": launched(d.db_grouped, (NT, G), grouped, sizes, (whole, m), shipped, negated),
        "chunk_state_bwd_db": Rung(shipped, given=(*given, z.C)),
    }


@ladder(
    "17_chunk_scan_bwd_dc",
    "1 dc_naive, 2 dc_grouped, 3 chunk_scan_bwd_dc",
    "dc_naive dc_grouped sum_heads",
)
def _dc(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.ssd()
    shipped = shipped_stage(a, "chunk_scan_bwd_dc")
    *given, dB_state = a["chunk_scan_bwd_dc"][0]
    C, B, x, _, gc, _, _ = given
    (_, T, H, P), (G, N) = x.shape, B.shape[2:]
    sizes = sizes_of(G=G, H=H, N=N, P=P, BT=z.C, BN=N, BP=P)
    eachC, eachB = gc.new_full((2, 1, T, H, N), torch.nan)
    dgc, outs, NT = torch.full_like(gc, torch.nan), outputs(C, B, gc), T // z.C

    def naive():
        d.dc_naive[(NT, H)](*given, eachC, eachB, dgc, T, **sizes)
        return d.sum_heads(eachC, G), d.sum_heads(eachB, G) + dB_state, dgc

    return {
        "dc_naive": Rung(naive, shipped),
        "dc_grouped": launched(
            d.dc_grouped, (NT, G), (*given, dB_state, *outs, T), sizes, outs, shipped
        ),
        "chunk_scan_bwd_dc": Rung(shipped),
    }


@ladder(
    "18_chunk_scan_chunk_state_bwd_dx",
    "1 dx_naive, 2 dx_tiled, 3 chunk_scan_chunk_state_bwd_dx",
    "dx_naive dx_tiled",
)
def _dx(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.ssd()
    *given, _ = a["chunk_scan_chunk_state_bwd_dx"][0]
    _, B, x, step, _, _, _ = given
    (_, T, H, P), (G, N) = x.shape, B.shape[2:]
    stage = stage_function("chunk_scan_chunk_state_bwd_dx", "triton")
    shipped = lambda: stage(*given, chunk_size=z.C)[:2]
    dx, dstep = outputs(x, step)
    BP = min(32, P)
    parts = step.new_full((P // BP, *step.shape), torch.nan)
    sizes = sizes_of(G=G, H=H, N=N, P=P, BT=z.C, BN=N)

    def tiled():
        d.dx_tiled[(T // z.C * H, P // BP)](*given, dx, parts, T, BP=BP, **sizes)
        return dx, parts.sum(0)

    return {
        "dx_naive": launched(
            d.dx_naive, (T, H), (*given, dx, dstep, T), sizes | {"BP": P}, (dx, dstep), shipped
        ),
        "dx_tiled": Rung(tiled, shipped),
        "chunk_scan_chunk_state_bwd_dx": Rung(shipped, given=(*given, z.C)),
    }


@ladder(
    "19_chunk_scan_bwd_da_cs",
    "1 da_cs_naive, 2 da_rectangle, 3 chunk_scan_bwd_da_cs",
    "da_cs_naive da_rectangle",
)
def _da(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.ssd()
    given = a["chunk_scan_bwd_da_cs"][0]
    _, B, x, _, gc, _ = given
    (_, T, H, P), (G, N) = x.shape, B.shape[2:]
    stage = shipped_stage(a, "chunk_scan_bwd_da_cs")
    shipped = lambda: [stage()]
    outs, grid = outputs(gc), (T // z.C, H)
    sizes, args = sizes_of(G=G, H=H, N=N, P=P, BT=z.C, BN=N, BP=P), (*given, *outs, T)

    def from_end():  # the rectangle's sums are those of dgc from a chunk's end
        dgc = stage().view(-1, z.C, H)
        return [dgc.flip(1).cumsum(1).flip(1).view(1, T, H)]

    return {
        "da_cs_naive": launched(d.da_cs_naive, grid, args, sizes, outs, shipped),
        "da_rectangle": launched(d.da_rectangle, grid, args, sizes, outs, from_end),
        "chunk_scan_bwd_da_cs": Rung(shipped, given=(*given, z.C)),
    }


@ladder("20_ema", "1 by_tokens, 2 by_chunks, 3 ema", "by_tokens by_chunks")
def _ema(z: Size, d: ModuleType) -> dict[str, Rung]:
    B, T, H = z._scaled(1, 32768, 1)
    D = z.width(4096)
    z.shape = {"B": B, "T": T, "H": H, "D": D, "C": z.C}
    x, g = z.randn(B, T, H, D).to(z.dtype), -(z.randn(B, T, H) - 2.5).exp()
    gc = stage_function("gate_cumsum", "triton")(g, chunk_size=z.C).to(g)
    stage = stage_function_of("ssd", "ema")
    shipped = lambda: [stage(x, g, gc, chunk_size=z.C, return_states=False)[0]]
    outs, BD = outputs(x), min(64, D)
    args, chunks = (x, g, gc, *outs, T), sizes_of(D=D, BD=BD, BT=z.C)
    return {
        "by_tokens": launched(d.by_tokens, (D // BD,), args, sizes_of(D=D, BD=BD), outs, shipped),
        "by_chunks": launched(d.by_chunks, (D // BD,), args, chunks, outs, shipped),
        "ema": Rung(shipped),
    }


def stage_function_of(family: str, name: str, module: str | None = None) -> Callable:
    """A kernel's launcher that is a stage of no set; module: where it is, if not in its own."""
    module = importlib.import_module(f"linattn_edu.kernels.{family}.{module or name}")
    return getattr(module, name)


@ladder(
    "21_cp_merge",
    "1 two_runs, 2 piece_map, 3 merge_naive, 3 merge_parts, 4 cp_merge",
    "two_runs merge_naive merge_parts",
    single="merge_naive merge_parts cp_merge",
)
def _cp_merge(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(1, 32768, 16)
    k, w, u, gc, _ = a["state"][0]
    H, K = w.shape[2:]
    piece_map = stage_function_of("delta", "piece_map", "cp_merge")
    cp_merge = stage_function_of("delta", "cp_merge")
    mapped = lambda: piece_map(k, w, u, gc, chunk_size=z.C)
    NP = 3 if z.kind == "tiny" else 16
    S_ext, M = z.randn(1, NP, H, K, K), z.randn(1, NP, H, K, K) / K**0.5 / 2
    merged = lambda: [cp_merge(S_ext, M)[0]]
    outs, BV = outputs(S_ext), min(16, K)
    args, sizes = (S_ext, M, *outs, NP), sizes_of(H=H, K=K, V=K, BK=K, BV=BV)
    grid, parts = (K // BV, H), sizes | {"BJ": min(32, K)}
    pieces = {"shape": {"pieces": NP, "H": H, "K": K, "V": K}}
    return {
        "two_runs": Rung(lambda: d.two_runs(k, w, u, gc, z.C), mapped),
        "piece_map": Rung(mapped),
        "merge_naive": replace(launched(d.merge_naive, grid, args, sizes, outs, merged), **pieces),
        "merge_parts": replace(launched(d.merge_parts, grid, args, parts, outs, merged), **pieces),
        "cp_merge": Rung(merged, **pieces),
    }


@ladder("22_cp_merge_bwd", "3 joint_bwd, 4 piece_map_bwd", "joint_bwd")
def _cp_merge_bwd(z: Size, d: ModuleType) -> dict[str, Rung]:
    a = z.gdn(1, 32768, 16)
    (*given, _), kwargs = a["state_bwd"]
    q = given[0]
    (_, T, HV, K), BV = q.shape, min(32, q.shape[3])
    piece_map_bwd = stage_function_of("delta", "piece_map_bwd", "cp_merge_bwd")
    out = torch.full((HV, K, 2 * K), torch.nan, device=q.device)
    sizes = sizes_of(HV=HV, K=K, V=K, BT=z.C, BK=K, BV=BV)
    shipped = lambda: piece_map_bwd(*given, **kwargs)
    halves = lambda results: (out[None, ..., :K], out[None, ..., K:])
    args = (*given, out, kwargs["scale"], T)
    return {
        "joint_bwd": launched(d.joint_bwd, (2 * K // BV, HV), args, sizes, out, shipped, halves),
        "piece_map_bwd": Rung(shipped),
    }


@ladder(
    "23_cp_conv",
    "1 conv_naive, 2 conv_tiles, 2 conv_ahead, 3 causal_conv1d, 4 causal_conv1d_bwd",
    "conv_naive conv_tiles conv_ahead",
)
def _conv(z: Size, d: ModuleType) -> dict[str, Rung]:
    B, T, _ = z._scaled(1, 32768, 1)
    D, W = z.width(4096), 4
    z.shape = {"B": B, "T": T, "D": D, "W": W}
    x, dp = z.randn(2, B, T, D).to(z.dtype)
    w, b = z.randn(D, W).to(z.dtype), z.randn(D).to(z.dtype)
    conv = stage_function_of("delta", "causal_conv1d")
    conv_bwd = stage_function_of("delta", "causal_conv1d_bwd", "causal_conv1d")
    forward = lambda: [conv(x, w, b, activation="silu")[0]]
    only_dx = lambda: [conv_bwd(x, w, None, None, dp)[0]]
    backward = lambda: list(conv_bwd(x, w, b, None, dp, activation="silu")[:3])
    outs, BT, BD = outputs(x), z.C, min(32, D)
    sizes, grid = sizes_of(D=D, W=W, BT=BT, BD=BD), (triton.cdiv(T, BT), D // BD)
    single = sizes_of(D=D, W=W, BD=BD)
    naive, tiles, ahead = (x, w, b, *outs, T), (x, w, b, *outs, T), (dp, w, *outs, T)
    return {
        "conv_naive": launched(d.conv_naive, (T, D // BD), naive, single, outs, forward),
        "conv_tiles": launched(d.conv_tiles, grid, tiles, sizes, outs, forward),
        "conv_ahead": launched(d.conv_ahead, grid, ahead, sizes, outs, only_dx),
        "causal_conv1d": Rung(forward, given=(x, w, b)),
        "causal_conv1d_bwd": Rung(backward, given=(x, w, b, dp)),
    }


@ladder(
    "26_decoding",
    "1 whole_kernel, 2 columns_kernel, 3 slots_kernel, 4 recurrent",
    "whole columns by_slot",
)
def _decoding(z: Size, d: ModuleType) -> dict[str, Rung]:
    i = z.gdn(128, 1, 32).i
    del z.shape["C"]
    given = i.q, i.k, i.v, i.g, i.beta
    (B, _, HV, K), stage = i.q.shape, stage_function("recurrent", "triton")
    S0 = 0.1 * z.randn(B, HV, K, K)
    S, slots = S0.clone(), torch.arange(B, device=i.q.device)

    def shipped(S):
        return stage(*given, initial_state=S, inplace=True)[0]

    def in_place(f, like=None) -> Rung:
        def first():
            own = S0.clone()
            return f(own), own

        return Rung(lambda: f(S), like, first=first)

    ships = replace(in_place(shipped), given=(*given, S0))
    return {
        "whole_kernel": in_place(lambda S: d.whole(*given, S), ships.first),
        "columns_kernel": in_place(lambda S: d.columns(*given, S), ships.first),
        "slots_kernel": in_place(lambda S: d.by_slot(*given, S, slots), ships.first),
        "recurrent": ships,
    }


@ladder("27_model_end_to_end", "1 gated_rows, 2 rms_norm_gated", "gated_rows")
def _norm(z: Size, d: ModuleType) -> dict[str, Rung]:
    n, D, BR, eps = (524288 if z.kind == "full" else 64), z.width(128), 8, 1e-5
    z.shape = {"rows": n, "D": D}
    x, gate = z.randn(2, n, 1, D).to(z.dtype)
    w = z.randn(1, D).to(z.dtype)
    stage = stage_function_of("delta", "rms_norm_gated")
    shipped = lambda: [stage(x, w, None, gate, eps=eps)[0]]
    outs, sizes = outputs(x), sizes_of(D=D, BR=BR, BD=block(D))
    args = (x, gate, w, *outs, n, eps)
    return {
        "gated_rows": launched(d.gated_rows, (n // BR,), args, sizes, outs, shipped),
        "rms_norm_gated": Rung(shipped, given=(x, gate, w, eps)),
    }


def units() -> list[tuple[str, str]]:
    """(chapter, dtype) of all that is measured in a process of its own."""
    return [(name, dtype) for name, it in LADDERS.items() for dtype in it.dtypes]


# ---- is it right, does it compile


def differences(results: object, wanted: object) -> float:
    """The largest relative RMS error of the results, on their device; inf if one is not finite."""
    as_list = lambda x: [x] if isinstance(x, Tensor) else list(x)
    worst = 0.0
    for x, ref in itertools.zip_longest(as_list(results), as_list(wanted)):
        if x.shape != ref.shape:
            raise ValueError(f"shape {tuple(x.shape)}, not {tuple(ref.shape)}")
        x, ref = x.float(), ref.float()
        error = ((x - ref).norm() / ref.norm().clamp(min=1e-30)).item()
        worst = max(worst, error) if error == error else torch.inf
    return worst
