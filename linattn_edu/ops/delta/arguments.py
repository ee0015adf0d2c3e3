"""Arguments that the forms of the delta rule share: checked, and brought to one form."""

import warnings

import torch
from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.cp.place import Place
from linattn_edu.ops import check, tensors

CHUNK_SIZES = (16, 32, 64)


def flags(**given: object) -> list[bool]:
    """The values of flags, in order; refuse what is no flag."""
    return [check.flag(name, value) for name, value in given.items()]


def v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """state_v_first, or its deprecated name."""
    state_v_first = check.flag("state_v_first", state_v_first)
    if transpose_state_layout is None:
        return state_v_first
    old = check.flag("transpose_state_layout", transpose_state_layout)
    if state_v_first:
        raise ValueError(
            "state_v_first and transpose_state_layout are one argument: give the first"
        )
    warnings.warn(
        "transpose_state_layout is deprecated: use state_v_first", DeprecationWarning, stacklevel=3
    )
    return old


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    channels: bool = False,
    pool: bool = False,
    largest: tuple[int, int] = (256, 512),
    cp_context: CPContext | None = None,
) -> dict[str, int]:
    """Refuse tensors that do not fit; return the sizes B, T, H, HV, K, V and N.

    channels: g is a decay for each row of the state. pool: initial_state holds any number of
    states, sizes["slots"]. largest: K and V.
    """
    sizes: dict[str, int] = {}
    check.tensor("q", q, ("B", "T", "H", "K"), sizes)
    check.tensor("k", k, ("B", "T", "H", "K"), sizes)
    check.tensor("v", v, ("B", "T", "HV", "V"), sizes)
    for name, x, shape in (
        ("g", g, ("B", "T", "HV", "K") if channels else ("B", "T", "HV")),
        ("gk", gk, ("B", "T", "HV", "K")),
        ("gv", gv, ("B", "T", "HV", "V")),
        ("beta", beta, ("B", "T", "HV")),
    ):
        if x is not None:
            check.tensor(name, x, shape, sizes)
    check.head_counts(sizes, largest=largest)
    count_sequences("q", q, cu_seqlens, sizes, cp_context, ("initial_state", initial_state))
    if initial_state is not None:
        shape = ("HV", "V", "K") if state_v_first else ("HV", "K", "V")
        check.tensor("initial_state", initial_state, ("slots" if pool else "N", *shape), sizes)
    others = {
        "k": k, "v": v, "g": g, "gk": gk, "gv": gv, "beta": beta, "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    check.same_device(("q", q), *others.items())
    return sizes


def count_sequences(
    name: str,
    x: Tensor,
    cu_seqlens: Tensor | None,
    sizes: dict[str, int],
    cp_context: CPContext | None = None,
    state: tuple[str, Tensor | None] = ("initial_state", None),
) -> None:
    """Set sizes["N"], of the initial states of x [B, T, ...]; with cu_seqlens, B must be 1."""
    sizes["N"] = sizes["B"]
    if cp_context is not None:
        check_context(name, cp_context, sizes)
        sizes["N"] *= len(cp_context.first)
        given = getattr(state[1], "shape", ())
        if len(given) and given[0] != sizes["N"]:
            raise ValueError(
                f"{state[0]} must have a row for each of the {sizes['N']} sequences that begin on "
                f"rank {cp_context.rank} of {cp_context.world}, got {tuple(given)}"
            )
    if cu_seqlens is None:
        return
    sizes["N"] = check.boundaries("cu_seqlens", cu_seqlens)
    check.same_device((name, x), ("cu_seqlens", cu_seqlens))
    if sizes["B"] != 1:
        raise ValueError(
            f"{name} must have B = 1 with cu_seqlens, which packs all sequences into one, "
            f"got B={sizes['B']}"
        )


def check_context(name: str, cp_context: object, sizes: dict[str, int]) -> None:
    """Refuse what is no context, and one of other tokens or of another world."""
    if not isinstance(cp_context, CPContext):
        raise TypeError(
            f"cp_context must come from build_cp_context, got {type(cp_context).__name__}"
        )
    if sizes["T"] != cp_context.tokens:
        raise ValueError(
            f"{name} must have the T={cp_context.tokens} tokens that cp_context gives to rank "
            f"{cp_context.rank} of {cp_context.world}, got T={sizes['T']}"
        )
    cp_context.check_group()


def check_packing(
    name: str,
    x: Tensor,
    sizes: dict[str, int],
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    chunk_size: int,
) -> Tensor | None:
    """Refuse boundaries and chunks that do not fit; return cu_seqlens on the CPU, if needed.

    They are read from the device only where neither cu_seqlens_cpu nor chunk_indices is given. In
    a graph that is being traced there are no numbers yet: the operator checks them when it runs.
    """
    for other, y in (("cu_seqlens_cpu", cu_seqlens_cpu), ("chunk_indices", chunk_indices)):
        if y is not None and cu_seqlens is None:
            raise ValueError(f"{other} belongs to cu_seqlens, which is None")
    if cu_seqlens is None:
        return None
    if cu_seqlens_cpu is not None:
        if check.boundaries("cu_seqlens_cpu", cu_seqlens_cpu) != sizes["N"]:
            raise ValueError(
                f"cu_seqlens_cpu must have the shape of cu_seqlens, {tuple(cu_seqlens.shape)}, "
                f"got {tuple(cu_seqlens_cpu.shape)}"
            )
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu must be on cpu, got {cu_seqlens_cpu.device}")
    if chunk_indices is not None:
        check.integers("chunk_indices", chunk_indices)
        if chunk_indices.ndim != 2 or chunk_indices.shape[1] != 2:
            raise ValueError(
                f"chunk_indices must have shape [NT, 2], got {tuple(chunk_indices.shape)}"
            )
        check.same_device((name, x), ("chunk_indices", chunk_indices))
    on_cpu = cu_seqlens.device.type == "cpu"
    if cu_seqlens_cpu is None and (chunk_indices is None or on_cpu):
        cu_seqlens_cpu = cu_seqlens.cpu()
    if check.known(cu_seqlens_cpu):
        bounds = check.lengths("cu_seqlens", cu_seqlens_cpu.tolist(), sizes["T"])
        if check.known(cu_seqlens) and cu_seqlens.tolist() != bounds:
            raise ValueError(f"cu_seqlens_cpu must be cu_seqlens, {cu_seqlens}, got {bounds}")
        if chunk_indices is not None:
            check.chunks(chunk_indices, bounds, chunk_size)
    return cu_seqlens_cpu


def place(
    name: str,
    x: Tensor,
    sizes: dict[str, int],
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    chunk_size: int,
    cp_context: CPContext | None,
) -> Place:
    """Refuse what does not fit, as check_packing; return where the sequences are."""
    if cp_context is None:
        cu_seqlens_cpu = check_packing(
            name, x, sizes, cu_seqlens, cu_seqlens_cpu, chunk_indices, chunk_size
        )
        return Place((cu_seqlens, cu_seqlens_cpu, chunk_indices, None, None))
    given = {
        "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "chunk_indices": chunk_indices,
    }  # fmt: skip
    for other, y in given.items():
        if y is not None:
            raise ValueError(f"{other} must be None with cp_context, which has the boundaries")
    return cp_context.place(sizes["B"], x.device)


def check_gate(
    sizes: dict[str, int],
    q: Tensor,
    g: Tensor | None,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    *,
    channels: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Refuse a log decay that is positive, or parameters of a gate that do not fit.

    Returns A_log [HV] and dt_bias [HV], or with a gate for each channel [HV, K].
    """
    parameters = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    if not use_gate_in_kernel:
        for name, x in parameters.items():
            if x is not None:
                raise ValueError(f"{name} is used with use_gate_in_kernel=True only")
        if g is not None:
            check.log_decay("g", g)
        return None, None
    if g is None:
        raise ValueError("g must be given with use_gate_in_kernel=True, got None")
    if A_log is None and lower_bound is None:
        wanted, got = ("A_log or lower_bound", "None for both") if channels else ("A_log", "None")
        raise ValueError(f"{wanted} must be given with use_gate_in_kernel=True, got {got}")
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"lower_bound must be < 0, the least log decay, got {lower_bound}")
    return layer_parameters(("q", q), sizes, A_log, dt_bias, channels=channels)


def layer_parameters(
    like: tuple[str, Tensor],
    sizes: dict[str, int],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    channels: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """A_log [HV] and dt_bias [HV] or [HV, K], given in any shape, on the device of another."""
    if A_log is not None:
        A_log = check.elements("A_log", A_log, ("HV",), sizes)
    if dt_bias is not None:
        shape = ("HV", "K") if channels else ("HV",)
        dt_bias = check.elements("dt_bias", dt_bias, shape, sizes)
    check.same_device(like, ("A_log", A_log), ("dt_bias", dt_bias))
    return A_log, dt_bias


def sigmoid_factor(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> int:
    """How many times the sigmoid of beta is its value, 1 or 2; 0: beta is its value."""
    sigmoid, double = flags(
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval
    )
    if double and not sigmoid:
        raise ValueError(
            "allow_neg_eigval=True takes twice the sigmoid of beta and needs "
            "use_beta_sigmoid_in_kernel=True, got False"
        )
    return int(sigmoid) + int(double)


def transposed(x: Tensor | None, v_first: bool) -> Tensor | None:
    """States [..., K, V] of states [..., V, K], and the reverse; as they are without v_first."""
    return x if x is None or not v_first else x.transpose(-1, -2)


def write_strength(beta: Tensor, factor: int) -> Tensor:
    """beta, or this factor times its sigmoid, in float32 (float64 for float64)."""
    if not factor:
        return beta
    beta = torch.sigmoid(beta.to(tensors.wide(beta)))
    return 2 * beta if factor == 2 else beta
