"""What is said of an operator when it is declared, and the shapes that follow from it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops import sequences
from linattn_edu.ops.ranks import crossings
from linattn_edu.ops.tensors import traced, wide

# how sequences are packed -> the arguments that say it
BOUNDS = {
    None: (),
    "tokens": ("cu_seqlens",),
    "chunks": ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices"),
    "ranks": ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_plan", "cp_rows"),
}


@dataclass(frozen=True)
class Output:
    """An output: its axes, whose dtype it has, and the name of its gradient."""

    axes: tuple[str, ...]
    of: tuple[str, ...]
    wide: bool
    gradient: str | None
    dtype: torch.dtype | None = None  # in the place of theirs


def like(axes: str, of: str, gradient: str | None = None) -> Output:
    """An output of the dtype of a tensor."""
    return Output(tuple(axes.split()), (of,), False, gradient)


def widened(axes: str, of: str, gradient: str | None = None) -> Output:
    """An output in float32, or float64 where one of the tensors is."""
    return Output(tuple(axes.split()), tuple(of.split()), True, gradient)


def counted(axes: str) -> Output:
    """An output of int32."""
    return Output(tuple(axes.split()), (), False, None, dtype=torch.int32)


class Declaration:
    """The names, axes and options of an operator.

    Args:
        name: Of the operator, in torch.library and in autograd's graph.
        tensors: Name -> axes, "B T H K", with "?" at the end where None may come.  B, N and T are
            the batch, the sequences and their tokens, H and HV heads, C the tokens of a chunk, NT
            the chunks, X the states that come from other ranks; "..." any axes in front.
        outputs: Name -> what `like` or `widened` give.  "final_state" is made with the option
            output_final_state alone, and is the initial_state where there are no tokens.
        stages: "reference" or "triton" -> the stages that the composition takes first.
        forward_stages: The same of the forward pass, if it has others.
        fused: The residual with which the backward pass too takes forward_stages; or the option,
            an int: how many of the two passes do, the forward pass first.
        options: Name -> type in the schema of torch.library.  "impl" is the last of all operators.
        residuals: The NamedTuple of outputs that only the backward pass and who asks for them see.
            With one, a call names in `keep` those it wants and in `save` those that the backward
            pass starts from; the others are None.
        packed: How a batch of one holds several sequences: "tokens", known to the kernels by
            cu_seqlens; "chunks", by a Packing; "ranks", as chunks, and they may go on on other
            ranks, known by a Ranks; None, not at all.
        transition: With "ranks", the axes of what takes the initial_state through a piece.
        limited: The tensor whose head size limits the tokens of a chunk.
        mutates: The tensors that are written in place, their names in a string.
        constants: The tensors that have no gradient, and none in what a composition returns.
        apart: The tensors whose rows the stages take at any distance -> the last axes of a row.
        lacks: Arguments of a composition that it shares with others, for which it has no tensors.
        flops: sizes -> operations of the matrix products, forward and backward.
    """

    def __init__(
        self,
        name: str,
        tensors: dict[str, str],
        outputs: dict[str, Output],
        *,
        stages: Callable,
        forward_stages: Callable | None = None,
        fused: str | None = None,
        options: dict[str, str] | None = None,
        residuals: type | None = None,
        packed: str | None = None,
        transition: str = "",
        limited: str | None = None,
        mutates: str = "",
        constants: Collection[str] = (),
        apart: dict[str, int] | None = None,
        lacks: Collection[str] = (),
        flops: Callable | None = None,
    ):
        self.name, self.stages, self.forward_stages = name, stages, forward_stages or stages
        self.inputs = tuple(tensors)
        self.optional = {n for n, axes in tensors.items() if axes.endswith("?")}
        self.axes = {n: tuple(axes.rstrip("?").split()) for n, axes in tensors.items()}
        self.axes |= {n: out.axes for n, out in outputs.items()}
        self.outputs, self.residuals, self.flops = outputs, residuals, flops
        self.fused = fused
        self.packed, self.bounds = packed, BOUNDS[packed]
        self.matrices = len(transition.split()) > 1
        self.limited, self.mutates, self.apart = limited, tuple(mutates.split()), apart or {}
        self.constants, self.lacks = constants, lacks
        self._in_chunks = [n for n, axes in self.axes.items() if "C" in axes]
        self.with_tokens = self.axes[self.inputs[0]][:2] == ("B", "T")
        group = {"group": "str"} if packed == "ranks" else {}
        self.options = {**(options or {}), **group, "impl": "str"}
        if residuals:
            self.options |= {"keep": "str", "save": "str"}
        self.names = (*self.inputs, *self.bounds, *self.options)
        from_end = {n: i - len(self.options) for i, n in enumerate(self.options)}
        self._impl, self._group = from_end["impl"], from_end.get("group")
        self._asked = from_end.get(fused)

    def _made(self, given: dict) -> Collection[str]:
        """The outputs that this call makes."""
        if not self.residuals and "output_final_state" not in given:
            return self.outputs
        made = set(self.outputs)
        if self.residuals:
            made -= {*self.residuals._fields} - {*f"{given['keep']} {given['save']}".split()}
        if not given.get("output_final_state", True):
            made.discard("final_state")
        return made

    def _length(self, given: dict) -> int | None:
        """Tokens of a chunk: chunk_size, or less where the kernels do not fit the GPU."""
        for n in self._in_chunks:
            if given.get(n) is not None:
                return given[n].shape[self.axes[n].index("C")]
        if self.limited is None or given["impl"] == "reference":
            return given.get("chunk_size")
        from linattn_edu.kernels.routes import by_kind, kind_of

        kind = kind_of(given[self.limited], 0, 0, given["chunk_size"], None)
        return min(given["chunk_size"], by_kind.chunk_limit(kind).takes)

    def _sizes(self, given: dict, length: int | None) -> dict:
        """Axis -> size, as the tensors have it."""
        sizes = {"C": length}
        for n, x in given.items():
            axes = self.axes.get(n)
            if axes is None or x is None:
                continue
            if axes[0] == "...":
                sizes["..."], axes = x.shape[: x.ndim - len(axes) + 1], axes[1:]
            sizes |= zip(axes, x.shape[x.ndim - len(axes) :], strict=True)
        cu_seqlens = given.get("cu_seqlens")
        if "B" in sizes:
            sizes["N"] = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return sizes

    def _new(self, name: str, given: dict, sizes: dict) -> Tensor:
        """A new tensor in the place of an output, or of the gradient of a tensor."""
        axes = self.axes[name]
        if "NT" in axes:
            sizes = sizes | {"NT": self._chunks(given, sizes)}
        if "X" in axes:
            sizes = sizes | {"X": self._crossings(given["cp_plan"])}
        shape = [s for a in axes for s in (sizes[a] if a == "..." else (sizes[a],))]
        like = next(x for n, x in given.items() if n in self.axes and x is not None)
        out = self.outputs.get(name)
        if out is None:
            dtype = given[name].dtype if name in given else wide(like)
        elif out.dtype is not None:
            dtype = out.dtype
        elif out.wide:
            dtype = wide(*(given[n] for n in out.of))
        else:
            dtype = given[out.of[0]].dtype
        return like.new_empty(shape, dtype=dtype)

    def _chunks(self, given: dict, sizes: dict) -> int:
        """How many chunks there are."""
        cu_seqlens, T, C = given.get("cu_seqlens"), sizes["T"], sizes["C"]
        if cu_seqlens is None and isinstance(T, int):
            return -(-T // C)
        if cu_seqlens is None:  # a graph for any T must not ask whether there is one chunk
            return torch.library.get_ctx().new_dynamic_size()
        if traced(cu_seqlens):  # as many as its numbers say
            return torch.library.get_ctx().new_dynamic_size()
        bounds = sequences.bounds(cu_seqlens, given["cu_seqlens_cpu"], T)
        return sum(chunks.stop - chunks.start for *_, chunks in sequences.each(bounds, C))

    def _crossings(self, plan: Tensor) -> int:
        """How many states come from other ranks."""
        return torch.library.get_ctx().new_dynamic_size() if traced(plan) else crossings(plan)

    def _without(self, name: str, given: dict) -> bool:
        """Whether a tensor has no gradient: it was not given, or is a constant."""
        return name in self.constants or (name in given and given[name] is None)
