"""Arguments that the forms of the delta rule share: checked, and brought to one form."""

import sys
import warnings
from pathlib import Path

from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.cp.place import Place
from linattn_edu.ops import check
from linattn_edu.ops.delta.gate import DOMAINS, as_logarithm, write_strength
from linattn_edu.ops.preallocated import check_results
from linattn_edu.ops.prefill import overwriting
from linattn_edu.ops.tensors import in_heads, known, transposed
from linattn_edu.packing import room

CHUNK_SIZES = (16, 32, 64)
ROOM = str(Path(__file__).parents[1])  # whose functions a caller does not see
SAFE_BOUND = -5.0  # of the log decay, where safe_gate is given without another


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
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ROOM):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        "transpose_state_layout is deprecated: use state_v_first", DeprecationWarning, level
    )
    return old


def check_tensors(
    given: check.Tensors,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_context: CPContext | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    v_first: bool,
    raw_gate: bool,
    write: tuple[Tensor, ...] = (),
    lower_bound: float | None = None,
    channels: bool = False,
    optional: bool = False,
    alike: bool = False,
    pool: bool = False,
    domain: str = DOMAINS[0],
    largest: tuple[int, int] = (256, 512),
) -> tuple[Tensor | None, Tensor | None]:
    """Refuse tensors that do not fit; given.sizes then has B, T, H, HV, K, V and N; HV is H where v
    has fewer heads, all but v then having H.

    write: (w,), if beta is b: gates for each channel. channels: g is a decay for each row of the
    state. optional: g and beta may be None. alike: q, k
    and v have one dtype. pool: initial_state holds any number of states, sizes["slots"]. domain: of
    g, gk and gv. largest: K and V. Returns A_log [HV] and dt_bias [HV], or with a gate for each
    channel [HV, K].
    """
    given.take("q", q, ("B", "T", "H", "K"))
    given.take("k", k, ("B", "T", "H", "K"), alike=alike)
    given.take("v", v, ("B", "T", "HV", "V"), alike=alike)
    H, HV = given.sizes["H"], given.sizes["HV"]
    if 0 < HV < H and H % HV == 0:  # v comes to q's heads by `in_heads`
        given.sizes["HV"] = H
        given.taken[0] = ("q", ("B", "T", "HV", "K"))
    instead = ", or a divisor of them" if HV < H else ""
    check.head_counts(given.sizes, largest=largest, instead=instead)
    check.choice("gate_domain", domain, DOMAINS)
    linear = domain != DOMAINS[0]
    if linear and raw_gate:
        raise ValueError("gate_domain must be 'log' with use_gate_in_kernel=True, got 'linear'")
    decay = {"decay": not linear, "factor": linear}
    if g is not None or not optional:
        shape = ("B", "T", "HV", "K") if channels else ("B", "T", "HV")
        given.take("g", g, shape, **({} if raw_gate else decay))
    if gk is not None:
        given.take("gk", gk, ("B", "T", "HV", "K"), **decay)
    if gv is not None:
        given.take("gv", gv, ("B", "T", "HV", "V"), **decay)
    if write:
        given.take("b", beta, ("B", "T", "HV", "K"))
        given.take("w", *write, ("B", "T", "HV", "V"))
    elif beta is not None or not optional:
        given.take("beta", beta, ("B", "T", "HV"))
    count_sequences(given, cu_seqlens, cp_context, ("initial_state", initial_state))
    if initial_state is not None:
        shape = ("HV", "V", "K") if v_first else ("HV", "K", "V")
        given.take("initial_state", initial_state, ("slots" if pool else "N", *shape))
    if raw_gate:
        _check_raw_gate(g is not None, A_log is not None, lower_bound, channels=channels)
        return layer_parameters(given, A_log, dt_bias, channels=channels)
    parameters = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    for name, x in parameters.items():
        if x is not None:
            raise ValueError(f"{name} is used with use_gate_in_kernel=True only")
    return None, None


def _check_raw_gate(g: bool, A_log: bool, lower_bound: float | None, *, channels: bool) -> None:
    """Refuse a gate of a layer that is not given whole; g, A_log: whether they are."""
    if not g:
        raise ValueError("g must be given with use_gate_in_kernel=True, got None")
    if not A_log and lower_bound is None:
        wanted, got = ("A_log or lower_bound", "None for both") if channels else ("A_log", "None")
        raise ValueError(f"{wanted} must be given with use_gate_in_kernel=True, got {got}")
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"lower_bound must be < 0, the least log decay, got {lower_bound}")


def chunked(
    tensors: tuple[Tensor | None, ...],
    bounds: tuple[Tensor | None, ...],
    cp_context: CPContext | None,
    scale: float | None,
    chunk_size: int,
    impl: str,
    *,
    sigmoid: int,
    v_first: bool,
    final: tuple[bool, Tensor | None],
    rooms: tuple[Tensor | None, Tensor | None, bool],
    most: int | None,
    domain: str,
    **gate: object,
) -> tuple[tuple[Tensor | None, ...], Place, float, str]:
    """Refuse what does not fit a chunked form; the others as its operator takes them.

    tensors: q, k, v, g, beta or b and w, A_log, dt_bias, initial_state.  bounds: cu_seqlens, the
    same on the CPU, chunk_indices.  final: whether final states overwrite the initial ones, and in
    which slots of a pool, or None.  rooms: as of `check_results`.  most: max_num_seqs.
    domain: gate_domain.  gate: raw_gate, lower_bound, channels of `check_tensors`.
    Returns the tensors, where the sequences are, scale, and "triton" or "reference".
    """
    q, k, v, g, beta, *write, A_log, dt_bias, state = tensors
    given = check.Tensors()
    A_log, dt_bias = check_tensors(
        given, q, k, v, g, beta, state, A_log, dt_bias, bounds[0], cp_context,
        v_first=v_first, alike=True, write=tuple(write), pool=final[1] is not None,
        domain=domain, **gate,
    )  # fmt: skip
    check.choice("chunk_size", chunk_size, CHUNK_SIZES)
    scale = check.number("scale", scale)
    scale = given.sizes["K"] ** -0.5 if scale is None else scale
    impl = check.resolve_impl(impl, given.device, tuple(given.dtypes))
    where = place(given, *bounds, chunk_size, cp_context, even=True, most=most)
    others = *tensors[:-1], *bounds, final[1]
    where = overwriting(where, given, others, state, *final, cp_context, v_first=v_first)
    check_results(given, (*others, state), v, rooms, v_first, final[0], cp_context)
    beta, state = write_strength(beta, sigmoid), transposed(state, v_first)
    g, v = as_logarithm(g, domain), in_heads(v, given.sizes["HV"])
    return (q, k, v, g, beta, *write, A_log, dt_bias, state), where, scale, impl


def gate_bounds(
    use_gate_in_kernel: bool, safe_gate: bool, lower_bound: float | None
) -> tuple[float | None, float | None]:
    """The bound that the gate is made with, and the one that is promised; refuse others."""
    if not safe_gate:
        if lower_bound is not None and not use_gate_in_kernel:
            raise ValueError("lower_bound is used with use_gate_in_kernel or safe_gate only")
        return lower_bound, None
    if use_gate_in_kernel and lower_bound is None:
        raise ValueError(
            "safe_gate=True with use_gate_in_kernel=True needs lower_bound: the softplus gate has "
            "none, got None"
        )
    bound = SAFE_BOUND if lower_bound is None else lower_bound
    if not SAFE_BOUND <= bound < 0:
        raise ValueError(f"lower_bound must be in [-5, 0) with safe_gate=True, got {lower_bound}")
    return (bound if use_gate_in_kernel else None), bound


def count_sequences(
    given: check.Tensors,
    cu_seqlens: Tensor | None,
    cp_context: CPContext | None = None,
    state: tuple[str, Tensor | None] = ("initial_state", None),
) -> None:
    """Set sizes["N"], of the initial states of [B, T, ...]; with cu_seqlens, B must be 1."""
    sizes = given.sizes
    sizes["N"] = sizes["B"]
    if cp_context is not None:
        check_context(given.first, cp_context, sizes)
        sizes["N"] *= len(cp_context.first)
        shape = getattr(state[1], "shape", ())
        if len(shape) and shape[0] != sizes["N"]:
            raise ValueError(
                f"{state[0]} must have a row for each of the {sizes['N']} sequences that begin on "
                f"rank {cp_context.rank} of {cp_context.world}, got {tuple(shape)}"
            )
    if cu_seqlens is None:
        return
    sizes["N"] = given.boundaries("cu_seqlens", cu_seqlens)
    if sizes["B"] != 1:
        raise ValueError(
            f"{given.first} must have B = 1 with cu_seqlens, which packs all sequences into one, "
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
    given: check.Tensors,
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
        if check.boundaries("cu_seqlens_cpu", cu_seqlens_cpu) != given.sizes["N"]:
            raise ValueError(
                f"cu_seqlens_cpu must have the shape of cu_seqlens, {tuple(cu_seqlens.shape)}, "
                f"got {tuple(cu_seqlens_cpu.shape)}"
            )
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu must be on cpu, got {cu_seqlens_cpu.device}")
    if chunk_indices is not None:
        given.integers("chunk_indices", chunk_indices)
        if chunk_indices.ndim != 2 or chunk_indices.shape[1] != 2:
            raise ValueError(
                f"chunk_indices must have shape [NT, 2], got {tuple(chunk_indices.shape)}"
            )
    on_cpu = cu_seqlens.device.type == "cpu"
    if cu_seqlens_cpu is None and (chunk_indices is None or on_cpu):
        cu_seqlens_cpu = cu_seqlens.cpu()
    if known(cu_seqlens_cpu):
        bounds = check.lengths("cu_seqlens", cu_seqlens_cpu.tolist(), given.sizes["T"])
        if known(cu_seqlens) and cu_seqlens.tolist() != bounds:
            raise ValueError(f"cu_seqlens_cpu must be cu_seqlens, {cu_seqlens}, got {bounds}")
        if chunk_indices is not None:
            check.chunks(chunk_indices, bounds, chunk_size)
    return cu_seqlens_cpu


def place(
    given: check.Tensors,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    chunk_size: int,
    cp_context: CPContext | None,
    *,
    even: bool = False,
    most: int | None = None,
) -> Place:
    """Refuse what does not fit, as check_packing; return where the sequences are.  even: of place
    of CPContext.  most: max_num_seqs, with which the host reads no boundaries.
    """
    if most is not None:
        check.positive(max_num_seqs=most)
        others = {"cu_seqlens_cpu": cu_seqlens_cpu, "chunk_indices": chunk_indices}
        for name, y in (others | {"cp_context": cp_context}).items():
            if y is not None:
                raise ValueError(f"{name} must be None with max_num_seqs")
        if cu_seqlens is None:
            raise ValueError("max_num_seqs belongs to cu_seqlens, which is None")
        if given.sizes["N"] > most:
            raise ValueError(
                f"cu_seqlens must bound at most max_num_seqs={most} sequences, got "
                f"{given.sizes['N']}"
            )
        if known(cu_seqlens):
            check.lengths("cu_seqlens", cu_seqlens.tolist(), given.sizes["T"])
        rows = room(cu_seqlens, given.sizes["T"], chunk_size)
        return Place((cu_seqlens, None, rows, None, None))
    if cp_context is None:
        cu_seqlens_cpu = check_packing(given, cu_seqlens, cu_seqlens_cpu, chunk_indices, chunk_size)
        return Place((cu_seqlens, cu_seqlens_cpu, chunk_indices, None, None))
    bounds = {
        "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "chunk_indices": chunk_indices,
    }  # fmt: skip
    for other, y in bounds.items():
        if y is not None:
            raise ValueError(f"{other} must be None with cp_context, which has the boundaries")
    return cp_context.place(given.sizes["B"], given.device, even)


def layer_parameters(
    given: check.Tensors,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    channels: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """A_log [HV] and dt_bias [HV] or [HV, K], given in any shape, with the sizes of the gate."""
    if A_log is not None:
        A_log = given.elements("A_log", A_log, ("HV",))
    if dt_bias is not None:
        shape = ("HV", "K") if channels else ("HV",)
        dt_bias = given.elements("dt_bias", dt_bias, shape)
    return A_log, dt_bias


def sigmoid_factor(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> tuple[int, bool]:
    """How many times the sigmoid of beta is its value, 1 or 2, or 0: beta is its value; and whether
    it is said that the value may be beyond 1.
    """
    sigmoid, beyond = flags(
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval
    )
    return int(sigmoid) * (1 + beyond), beyond
