"""The registry of cases, and the bytes, operations and floor of each thing that is timed.

Counted from shapes alone, per call:

- bytes: each input read once, each output written once. q, k, v, beta and everything a stage hands
  to the next has the size of the case's dtype; g and gc, dgc and the dbeta of a stage are float32;
  the state that the recurrence takes or returns is float32. A forward and a backward pass are two
  calls: the second reads the inputs again. With a gate for each channel (KDA) g has the size of two
  of q, and of gc the stages that carry the state read the last token of each chunk only.
- flops: the multiply-adds that the matrix products of the chunked form need, two operations each.
  Products with a triangular matrix are counted without its zeros. What the value heads of a q/k
  head share is counted once for each q/k head: K K^T and Q K^T, and the products dM K, dM^T Q and
  (N + N^T) K of the adjoints, whose factors can be added up first; a gate for each channel leaves
  nothing to share. Elementwise work is left out, except where there is nothing else: the stages of
  the gate and the recurrence. A forward and a backward pass have the forward stages and their
  adjoints; what a backward pass computes again because it was not kept is not counted.
  Mamba-2 is counted in the same letters: H are the groups of B and C, HV the heads, K and V the
  sides of a state, and dt, A and D are float32 like a gate. The states that its staged form hands
  on are float32. A moving average has no products: its recurrence is counted.
- floor_ms: the larger of bytes / (bytes per second) and flops / (operations per second).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

CHUNK = 64
BEYOND = "_beta2"  # end of an op whose beta is up to 2, by allow_neg_eigval
GATE_BYTES = 4  # of an element of g, gc, their gradients, and a state outside the chunks

# Measured on one H200, not read off the data sheet: a copy, and a dense bfloat16 product.
COPY_RATE, PRODUCT_RATE = 4.3e12, 790e12
RATES = {"NVIDIA H200": (COPY_RATE, PRODUCT_RATE)}


@dataclass(frozen=True)
class Case:
    """Shapes of one benchmark."""

    name: str
    op: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    size: int = 2  # bytes of an element: bfloat16
    note: str = ""
    cosine: float = 0.0  # of any two keys of a head, on average

    @property
    def operator(self) -> str:
        """Which operator it is, whichever way it is computed: "gdn", "kda", "dplr", by either name,
        or "ssd", which is Mamba-2 with its moving average."""
        same = {"ema": "ssd", "rwkv7": "dplr"}
        return same.get(self.op, self.op.removesuffix("_decode").removesuffix(BEYOND))

    @property
    def state_bytes(self) -> int:
        """Of one state of every sequence and head, outside the chunks."""
        return self.B * self.HV * self.K * self.V * GATE_BYTES

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return self.B, self.T, self.H, self.HV, self.K, self.V


@dataclass(frozen=True)
class Work:
    """What one call has to move and to compute."""

    bytes: int
    flops: int

    def floor_ms(self, copy: float = COPY_RATE, product: float = PRODUCT_RATE) -> float:
        """The least time in ms at `copy` bytes and `product` operations a second."""
        return 1e3 * max(self.bytes / copy, self.flops / product)


CASES = {
    case.name: case
    for case in (
        Case("gdn_train", "gdn", 8, 4096, 16, 16, 128, 128, note="a training batch"),
        Case("gdn_gva", "gdn", 1, 32768, 16, 32, 128, 128, note="long, grouped value heads"),
        Case("gdn_long", "gdn", 1, 32768, 4, 4, 128, 128, note="long, few heads"),
        Case("gdn_d64", "gdn", 8, 4096, 32, 32, 64, 64, note="small heads"),
        Case("gdn_beta2", "gdn_beta2", 8, 4096, 16, 16, 128, 128, note="gdn_train, beta up to 2"),
        Case("gdn_beta2_alike", "gdn_beta2", 8, 4096, 16, 16, 128, 128, note="alike", cosine=0.97),
        Case("gdn_decode", "gdn_decode", 128, 1, 16, 32, 128, 128, note="the next token of many"),
        Case("kda_train", "kda", 8, 4096, 16, 16, 128, 128, note="a training batch"),
        Case("kda_kimi", "kda", 1, 32768, 32, 32, 128, 128, note="long, the heads of Kimi Linear"),
        Case("kda_long", "kda", 1, 32768, 4, 4, 128, 128, note="long, few heads"),
        Case("kda_beta2", "kda_beta2", 8, 4096, 16, 16, 128, 128, note="kda_train, beta up to 2"),
        Case("kda_beta2_alike", "kda_beta2", 8, 4096, 16, 16, 128, 128, note="alike", cosine=0.97),
        Case("gdn2_train", "gdn2", 8, 4096, 16, 16, 128, 128, note="the batch of kda_train"),
        Case("gdn2_beta2", "gdn2_beta2", 8, 4096, 16, 16, 128, 128, note="gdn2_train, b up to 2"),
        Case("gdn2_decode", "gdn2_decode", 128, 1, 32, 32, 128, 128, note="kda_decode's token"),
        Case("kda_decode", "kda_decode", 128, 1, 32, 32, 128, 128, note="the next token of many"),
        Case("dplr_train", "dplr", 8, 4096, 16, 16, 128, 128, note="a training batch"),
        Case("rwkv7_train", "rwkv7", 8, 4096, 32, 32, 64, 64, note="the heads of RWKV-7"),
        Case("ssd_2.7b", "ssd", 8, 4096, 1, 80, 128, 64, note="the heads of Mamba-2 2.7b"),
        Case("ssd_long", "ssd", 1, 32768, 1, 80, 128, 64, note="the same, one long sequence"),
        Case("ssd_decode", "ssd_decode", 128, 1, 1, 80, 128, 64, note="the next token of many"),
        Case("ema_train", "ema", 8, 4096, 1, 1, 1, 4096, note="a moving average, a batch"),
        Case("ema_long", "ema", 1, 32768, 1, 1, 1, 4096, note="a moving average, long"),
    )
}

OPERATORS = tuple(dict.fromkeys(case.operator for case in CASES.values()))

# the calls of a whole library that are timed, by op
TRAINING = "forward_backward"
CALLS = {
    "gdn": ("forward", TRAINING),
    "gdn_beta2": ("forward", TRAINING),
    "gdn_decode": ("decode", "decode_inplace"),
    "kda": ("forward", TRAINING),
    "kda_beta2": ("forward", TRAINING),
    "gdn2": ("forward", TRAINING),
    "gdn2_beta2": ("forward", TRAINING),
    "gdn2_decode": ("decode", "decode_inplace"),
    "kda_decode": ("decode", "decode_inplace"),
    "dplr": ("forward", TRAINING),
    "rwkv7": ("forward", TRAINING),
    "ssd": ("forward", TRAINING),
    "ssd_decode": ("decode_inplace", "decode_graph"),  # alone, and as a CUDA graph
    "ema": ("forward", TRAINING),
}
ALL_CALLS = tuple(dict.fromkeys(call for calls in CALLS.values() for call in calls))

# the public function of each op
FUNCTIONS = {
    "gdn": "chunk_gated_delta_rule",
    "gdn_beta2": "chunk_gated_delta_rule",
    "gdn_decode": "fused_recurrent_gated_delta_rule",
    "kda": "chunk_kda",
    "kda_beta2": "chunk_kda",
    "gdn2": "chunk_gdn2",
    "gdn2_beta2": "chunk_gdn2",
    "gdn2_decode": "fused_recurrent_gdn2",
    "kda_decode": "fused_recurrent_kda",
    "dplr": "chunk_dplr_delta_rule",
    "rwkv7": "chunk_rwkv7",
    "ssd": "mamba_chunk_scan_combined",
    "ssd_decode": "selective_state_update",
    "ema": "ema_scan",
}

# the cost of the three forms of GDN against the length of the sequence
SCALING = "gdn_scaling"
SCALING_T = tuple(256 << i for i in range(8))
SCALING_FORMS = ("chunked", "recurrent", "quadratic")

# by op
FORWARD_STAGES = {
    "gdn": ("gate_cumsum", "solve", "wy", "state", "output", "intra_chunk", "scan", "recurrent"),
    "kda": (
        "gate_cumsum", "kda_intra", "wy", "state", "output", "kda_scan", "kda_prepare",
        "kda_fused_scan",
    ),
    "gdn2": (),  # those of KDA
    "ssd": (
        "chunk_cumsum", "chunk_state", "state_passing", "chunk_scan",
        "chunk_cumsum_log", "chunk_scores", "ssd_fwd", "ssd_states",
    ),
}  # fmt: skip
ADJOINT_STAGES = {
    "gdn": ("output_bwd", "state_bwd", "wy_bwd", "gate_bwd", "recurrent_bwd"),
    "kda": (
        "kda_scans", "state_bwd", "kda_output_bwd", "kda_wy_bwd", "kda_intra_bwd", "gate_bwd",
        "kda_gates", "kda_fused_scans", "kda_fused_intra_bwd",
    ),
    "gdn2": (),
    "ssd": (
        "chunk_scan_bwd_dstates", "state_passing_bwd", "chunk_state_bwd_db", "chunk_scan_bwd_dc",
        "chunk_scan_chunk_state_bwd_dx", "chunk_scan_bwd_da_cs", "chunk_cumsum_bwd",
        "ssd_states_bwd", "ssd_bwd_dc", "ssd_bwd_dx",
    ),
}  # fmt: skip
# of GDN, the adjoints fused: benchmarks.fusion times them
FUSED_ADJOINT_STAGES = ("scan_states", "scan_bwd", "scans", "intra_chunk_bwd")
STAGES = {op: (*FORWARD_STAGES[op], *ADJOINT_STAGES[op]) for op in FORWARD_STAGES}

# of Mamba-2, in chunks twice as long as those of its other stages
SSD_FUSED = (
    "chunk_cumsum_log", "chunk_scores", "ssd_fwd", "ssd_states", "ssd_states_bwd", "ssd_bwd_dc",
    "ssd_bwd_dx",
)  # fmt: skip

# of KDA, with the promise that no log decay of a token is below the bound
SAFE_BOUND = -5.0
SAFE_STAGES = {"kda": ("kda_intra",)}
# of the general delta rule, the log decay that a layer of RWKV-7 keeps above
DPLR_BOUND = -math.exp(-0.5)


def scaling_case(T: int) -> Case:
    """The shapes of one length of the scaling plot."""
    return Case(SCALING, "gdn", 1, T, 16, 16, 128, 128)


def select(names: list[str]) -> list[Case]:
    """Cases by name or by the beginning of a name; all of them for no name."""
    chosen = {}
    for name in names:
        begins = f"{name}_" if name in OPERATORS else name
        found = [c for c in CASES.values() if c.name == name] or [
            c for c in CASES.values() if c.name.startswith(begins)
        ]
        if not found:
            raise ValueError(f"no case is called {name!r}; there are {', '.join(CASES)}")
        chosen.update((c.name, c) for c in found)
    return [c for c in CASES.values() if c.name in chosen or not names]


def ran(row: dict) -> tuple[str, ...]:
    """What of the package a row of results is the time of, as linattn_edu.sources names it."""
    what = row["what"]
    if what.startswith("stage:"):
        return (f"kernels.{what.removeprefix('stage:')}",)
    if row["case"] == SCALING:
        forms = {"chunked": (FUNCTIONS["gdn"],), "recurrent": ("kernels.recurrent",)}
        return forms.get(what, ())  # the quadratic form is PyTorch's
    return (FUNCTIONS[CASES[row["case"]].op],)


# ---- bytes and operations


def work(case: Case, what: str, chunk: int = CHUNK) -> Work:
    """Bytes and operations of a call, of "stage:<name>", or of a form of the scaling plot."""
    name = what.removeprefix("stage:")
    return Work(_bytes(case, name, chunk), _flops(case, name, chunk))


def _bytes(c: Case, what: str, chunk: int) -> int:
    if c.operator in ("kda", "gdn2"):
        return _kda_bytes(c, what, chunk)
    if c.operator == "ssd":
        return _ssd_bytes(c, what, chunk)
    if c.operator == "dplr":
        tokens = c.B * c.T * c.H
        inputs = tokens * (4 * c.K * c.size + c.V * c.size + c.K * GATE_BYTES)  # q, k, a, b; v; gk
        o = do = tokens * c.V * c.size
        return inputs + o + (0 if what == "forward" else inputs + do + inputs)
    tokens = c.B * c.T
    q = k = dq = dk = tokens * c.H * c.K * c.size
    dk_out = tokens * c.H * c.K * (c.size if c.H == c.HV else 4)  # added to, head after head
    v = o = u = v_new = do = dv = tokens * c.HV * c.V * c.size
    w = tokens * c.HV * c.K * c.size
    g = gc = dg = dgc = dbeta = tokens * c.HV * GATE_BYTES
    beta = tokens * c.HV * c.size
    A = P = R = tokens * c.HV * chunk * c.size
    h = dh = c.B * -(-c.T // chunk) * c.HV * c.K * c.V * c.size
    state = dh0 = c.state_bytes
    inputs = q + k + v + g + beta
    forward = inputs + o
    return {
        "gate_cumsum": g + gc,
        "solve": k + beta + A,
        "wy": k + v + beta + gc + A + w + u,
        "state": k + w + u + gc + h + v_new,
        "output": q + k + v_new + h + gc + o,
        "intra_chunk": q + k + beta + gc + P + R,
        "scan": q + k + v + gc + P + R + o,
        "output_bwd": q + k + v_new + h + gc + do + dq + dk_out + v_new + dgc,
        "state_bwd": q + k + w + gc + do + v_new + dh + v_new + dh0,
        "wy_bwd": k
        + v
        + beta
        + gc
        + A
        + h
        + v_new
        + dh
        + v_new
        + dk_out
        + dgc
        + dk
        + dv
        + dbeta
        + dgc,
        "scan_states": k + v + beta + gc + R + h + v_new,
        "scan_bwd": q + k + beta + gc + P + R + do + dh + v_new + dv + dh0,
        "scans": q + k + v + beta + gc + P + R + do + h + v_new + dh + v_new + dv + dh0,
        "intra_chunk_bwd": q
        + k
        + v
        + beta
        + gc
        + h
        + v_new
        + do
        + dh
        + v_new
        + dq
        + dk
        + dbeta
        + dgc,
        "gate_bwd": dgc + g + dg,
        "forward": forward,
        "forward_backward": forward + inputs + do + inputs,  # the gradients are like the inputs
        "chunked": forward,
        "quadratic": forward,
        "recurrent": forward + state,
        "recurrent_bwd": inputs + do + dq + dk + dv + dg + dbeta + dh0,
        "decode": forward + 2 * state,
        "decode_inplace": forward + 2 * state,
    }[what]


def _kda_bytes(c: Case, what: str, chunk: int) -> int:
    tokens, chunks = c.B * c.T, c.B * -(-c.T // chunk)
    q = k = dq = dk = tokens * c.H * c.K * c.size
    v = o = u = v_new = do = dv = tokens * c.HV * c.V * c.size
    w = kd = kg = qg = dqg = dkg = tokens * c.HV * c.K * c.size
    dkb = tokens * c.HV * c.K * 4
    g = gc = dg = dgc = tokens * c.HV * c.K * GATE_BYTES
    last = dgl = chunks * c.HV * c.K * GATE_BYTES  # gc of the last tokens
    beta, dbeta = tokens * c.HV * c.size, tokens * c.HV * GATE_BYTES
    beta *= c.K + c.V if c.operator == "gdn2" else 1  # b and w
    P = A = dL = tokens * c.HV * chunk * c.size
    dP = tokens * c.HV * chunk * 4
    h = dh = chunks * c.HV * c.K * c.V * c.size
    state = dh0 = c.state_bytes
    inputs = q + k + v + g + beta
    forward = inputs + o
    gathered = dP + dL + dqg + dkb + dkg + dgl + dbeta  # what kda_intra_bwd brings together
    return {
        "gate_cumsum": g + gc,
        "kda_intra": q + k + beta + gc + P + A,
        "wy": q + k + v + beta + gc + A + w + u + kg + qg,
        "state": kg + w + u + last + h + v_new,
        "output": qg + v_new + h + P + o,
        "kda_scan": qg + kg + w + u + last + P + o,
        "kda_scans": qg + kg + w + u + last + P + do + h + v_new + dh + v_new + dh0,
        "state_bwd": qg + kg + w + last + P + do + dh + v_new + dh0,
        "kda_output_bwd": v_new + h + do + dqg + dP,
        "kda_wy_bwd": v + beta + A + h + v_new + dh + v_new + dkb + dkg + dv + dL + dbeta + dgl,
        "kda_intra_bwd": q + k + beta + gc + gathered + dq + dk + dbeta + dgc,
        "kda_prepare": q + k + beta + gc + P + A + kd + kg + qg,
        "kda_fused_scan": qg + kg + kd + v + beta + last + P + A + o,
        "kda_gates": q + k + g + gc + kd + kg + qg,
        "kda_fused_scans": qg
        + kg
        + kd
        + v
        + beta
        + last
        + P
        + A
        + do
        + h
        + v_new
        + dh
        + v_new
        + dv
        + dh0,
        "kda_fused_intra_bwd": q
        + k
        + v
        + beta
        + gc
        + h
        + v_new
        + do
        + dh
        + v_new
        + dq
        + dk
        + dbeta
        + dgc,
        "gate_bwd": dgc + g + dg,
        "forward": forward,
        "forward_backward": forward + inputs + do + inputs,  # the gradients are like the inputs
        "decode": forward + 2 * state,
        "decode_inplace": forward + 2 * state,
    }[what]


def _ssd_bytes(c: Case, what: str, chunk: int) -> int:
    chunk *= 2 if what in SSD_FUSED else 1
    tokens, chunks = c.B * c.T, c.B * -(-c.T // chunk)
    x = dx = dy = out = tokens * c.HV * c.V * c.size
    B = C = dB = dC = tokens * c.H * c.K * c.size
    dB_state = inter = tokens * c.H * c.K * GATE_BYTES
    dt = ddt = step = gs = gc = dgc = dstep = m = tokens * c.HV * GATE_BYTES
    A = dA = D = dD = c.HV * GATE_BYTES
    S = tokens * c.H * chunk * c.size
    dlast = chunks * c.HV * GATE_BYTES
    s = chunks * c.HV * c.K * c.V * GATE_BYTES  # of the staged form: s, h, dh_out and ds
    h = dh = chunks * c.HV * c.K * c.V * c.size
    state = dh0 = c.state_bytes
    if c.op == "ema":
        inputs = x + dt
    elif c.op == "ssd_decode":  # dt in the case's dtype, dt_bias like D
        inputs = x + tokens * c.HV * c.size + A + B + C + D + D
    else:
        inputs = x + dt + A + B + C + D
    forward = inputs + out
    return {
        "chunk_cumsum": dt + A + step + gc,
        "chunk_cumsum_log": dt + A + gs + gc,
        "chunk_state": B + x + step + gc + s,
        "state_passing": s + gc + s,
        "chunk_scan": C + B + x + step + gc + s + D + out,
        "chunk_scores": C + B + S,
        "ssd_states": B + x + gs + dlast + h,  # gc of each chunk's last token
        "ssd_fwd": C + B + S + x + gs + gc + D + out,
        "chunk_scan_bwd_dstates": C + gc + dy + s,
        "state_passing_bwd": s + gc + s + s + dlast + dh0,
        "chunk_state_bwd_db": B + x + step + gc + s + dB_state + dgc + dlast,
        "chunk_scan_bwd_dc": C + B + x + step + gc + s + dy + dB_state + dC + dB + dgc,
        "chunk_scan_chunk_state_bwd_dx": C + B + x + step + gc + s + dy + D + dx + dstep + dD,
        "chunk_scan_bwd_da_cs": C + B + x + step + gc + dy + dgc,
        "chunk_cumsum_bwd": dgc + dlast + dstep + dt + A + ddt + dA,
        "ssd_states_bwd": C + gc + dy + dh + dh0,
        "ssd_bwd_dc": C + gc + h + dh + dy + inter + dgc + dlast,
        "ssd_bwd_dx": (C + B + x + gs + gc + dh + dy + inter + dgc + D)
        + (dx + dB + dC + dstep + dgc + m + dD),
        "forward": forward,
        "forward_backward": forward + inputs + dy + inputs,  # the gradients are like the inputs
        **dict.fromkeys(CALLS["ssd_decode"], forward + 2 * state),
    }[what]


def _flops(c: Case, what: str, chunk: int) -> int:
    if c.operator == "ssd":
        return _ssd_flops(c, what, chunk)
    if what in ("recurrent", "decode", "decode_inplace"):
        # decay KV, k S 2KV, k^T e 2KV, q S 2KV; beta (v - k S) and the scale of o 3V
        return c.B * c.T * c.HV * (7 * c.K * c.V + 3 * c.V)
    if what == "recurrent_bwd":
        # the states again: 5KV + 2V; S do, q^T do, k dS, the two products of dk and k^T de
        # 2KV each, <dS, S> 2KV, decay KV; the scale of do, <k dS, e> and de 4V
        return c.B * c.T * c.HV * (20 * c.K * c.V + 6 * c.V)
    if what == "quadratic":
        return c.B * _quadratic(c)
    of_chunk = {"gdn2": _kda_chunk_flops, "kda": _kda_chunk_flops, "dplr": _dplr_chunk_flops}.get(
        c.operator, _chunk_flops
    )
    return c.B * sum(count * of_chunk(c, what, n) for n, count in _chunks(c.T, chunk))


def _chunks(T: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(tokens, how many chunks have that many)."""
    yield chunk, T // chunk
    if T % chunk:
        yield T % chunk, 1


def _chunk_flops(c: Case, what: str, n: int) -> int:
    """Operations of one chunk of n tokens, all heads of one batch entry."""
    below, lower = n * (n - 1) // 2, n * (n + 1) // 2  # entries of tril(., -1) and tril(.)
    kkt, qkt = 2 * c.K * below * c.H, 2 * c.K * lower * c.H
    # one multiply-add for each i > j > m: X_im -= L_ij X_jm
    inverse = 2 * (n * (n - 1) * (n - 2) // 6) * c.HV
    lower_v, lower_k = 2 * c.V * lower * c.HV, 2 * c.K * lower * c.HV
    below_v = 2 * c.V * below * c.HV
    state = 2 * n * c.K * c.V * c.HV  # a product of n rows with the state
    shared_k, shared_n = 2 * c.K * lower * c.H, 2 * 2 * c.K * below * c.H  # dM K, (N + N^T) K
    stages = {
        "gate_cumsum": 2 * n * c.HV,
        "solve": kkt + inverse,
        "wy": lower_k + lower_v,
        "state": 2 * state,
        "output": state + qkt + lower_v,
        "intra_chunk": kkt + qkt + inverse,
        "scan": 3 * state + 2 * lower_v,
        # dO h^T; Q K^T; dO v_new^T and P^T dO; dM K and dM^T Q
        "output_bwd": state + qkt + 2 * lower_v + 2 * shared_k,
        # K dS, Q^T dO, w^T dv_new
        "state_bwd": 3 * state,
        # Z S^T and v_new dS^T; Z = (A G)^T dv_new; Z v_new^T; K K^T; (N + N^T) K
        "wy_bwd": 2 * state + lower_v + below_v + kkt + shared_n,
        # K S, K^T v_new; (A G) W
        "scan_states": 2 * state + lower_v,
        # K dS, Q^T dO, K^T dV; P^T dO and Z = (A G)^T dv_new
        "scan_bwd": 3 * state + 2 * lower_v,
        "scans": 5 * state + 3 * lower_v,
        # dO h^T, Z S^T, v_new dS^T; dO v_new^T; Z v_new^T; dM K and dM^T Q; (N + N^T) K
        "intra_chunk_bwd": 3 * state + lower_v + below_v + 2 * shared_k + shared_n,
        "gate_bwd": n * c.HV,
    }
    stages["forward"] = stages["chunked"] = stages["intra_chunk"] + stages["scan"]
    adjoints = ("output_bwd", "state_bwd", "wy_bwd")
    stages[TRAINING] = stages["forward"] + sum(stages[name] for name in adjoints)
    return stages[what]


def _kda_chunk_flops(c: Case, what: str, n: int) -> int:
    """As _chunk_flops, with a gate for each channel: every product is one of a value head."""
    below, lower = n * (n - 1) // 2, n * (n + 1) // 2
    below_k, lower_k = 2 * c.K * below * c.HV, 2 * c.K * lower * c.HV
    below_v, lower_v = 2 * c.V * below * c.HV, 2 * c.V * lower * c.HV
    inverse = 2 * (n * (n - 1) * (n - 2) // 6) * c.HV
    state = 2 * n * c.K * c.V * c.HV
    stages = {
        "gate_cumsum": 2 * n * c.HV * c.K,
        # the scores of the keys and of the queries
        "kda_intra": below_k + lower_k + inverse,
        "wy": lower_k + lower_v,
        "state": 2 * state,
        "output": state + lower_v,
        "kda_scan": 3 * state + lower_v,
        # w S, kg^T v_new; kg dS, qg^T dO, w^T dv_new; P^T dO
        "kda_scans": 5 * state + lower_v,
        # kg dS, qg^T dO, w^T dv_new; P^T dO
        "state_bwd": 3 * state + lower_v,
        # dO h^T; dO v_new^T
        "kda_output_bwd": state + lower_v,
        # Z S^T and v_new dS^T; Z = A^T dv_new; Z v_new^T
        "kda_wy_bwd": 2 * state + lower_v + below_v,
        # dP and dL, each with rows before and after
        "kda_intra_bwd": 2 * lower_k + 2 * below_k,
        "gate_bwd": n * c.HV * c.K,
        "kda_gates": 2 * n * c.HV * c.K,
        # kd S, qg S, kg^T v_new; A W, P v_new
        "kda_fused_scan": 3 * state + 2 * lower_v,
        # kd S, kg^T v_new; kg dS, qg^T dO, kd^T dV; A W, P^T dO, A^T dv_new
        "kda_fused_scans": 5 * state + 3 * lower_v,
        # dO h^T, Z S^T, v_new dS^T; dO v_new^T; Z v_new^T; dP and dL, rows before and after
        "kda_fused_intra_bwd": 3 * state + lower_v + below_v + 2 * lower_k + 2 * below_k,
    }
    stages["kda_prepare"] = stages["kda_intra"]
    # without w: v_new = A diag(beta) (V - (2^gc * K) S)
    stages["forward"] = stages["kda_intra"] + 3 * state + 2 * lower_v
    adjoints = ("state_bwd", "kda_output_bwd", "kda_wy_bwd", "kda_intra_bwd")
    stages[TRAINING] = stages["forward"] + sum(stages[name] for name in adjoints)
    return stages[what]


def _dplr_chunk_flops(c: Case, what: str, n: int) -> int:
    """As _kda_chunk_flops, with two rows that read and two that write."""
    below, lower = n * (n - 1) // 2 * c.H, n * (n + 1) // 2 * c.H
    inverse = 2 * (n * (n - 1) * (n - 2) // 6) * c.H
    state = 2 * n * c.K * c.V * c.H
    # ab and ak, qb and qk; M x, qb e, qk v, ak v; ag S, qg S, bg^T e, kg^T v
    forward = 4 * c.K * (below + lower) + inverse + 2 * c.V * (3 * lower + below) + 4 * state
    # qb^T dO, M^T, qk^T dO, ak^T dx; bg dS, kg dS, qg^T dO, ag^T dx
    scan = 2 * c.V * (3 * lower + below) + 4 * state
    # of the scores and of the rows; each score with rows before and after
    rows = 4 * c.V * (below + lower) + 4 * state + 8 * c.K * (below + lower)
    return forward if what == "forward" else forward + scan + rows


def _ssd_flops(c: Case, what: str, chunk: int) -> int:
    tokens = c.B * c.T * c.HV
    if c.op == "ssd_decode":
        # decay KV, write 2KV, C S 2KV; step x, D x and its sum 3V
        return tokens * (5 * c.K * c.V + 3 * c.V)
    if c.op == "ema":
        # e^g h + w x: 3V; h again 3V, the gradient of h 2V, dx V, dg 3V
        return tokens * c.V * {"forward": 3, TRAINING: 3 + 9}[what]
    chunk *= 2 if what in SSD_FUSED else 1
    return c.B * sum(count * _ssd_chunk_flops(c, what, n) for n, count in _chunks(c.T, chunk))


def _ssd_chunk_flops(c: Case, what: str, n: int) -> int:
    """As _chunk_flops; what the heads of a group share are C B^T and the products with dscores."""
    below, lower = n * (n - 1) // 2, n * (n + 1) // 2
    scores, scores_below = 2 * c.K * lower * c.H, 2 * c.K * below * c.H
    lower_v, below_v = 2 * c.V * lower * c.HV, 2 * c.V * below * c.HV
    state, elements = 2 * n * c.K * c.V * c.HV, c.K * c.V * c.HV
    stages = {
        "chunk_cumsum": 2 * n * c.HV,
        "chunk_cumsum_log": 3 * n * c.HV,
        "chunk_state": state,
        "state_passing": 2 * elements,
        "chunk_scan": state + scores + lower_v,
        "chunk_scores": 2 * c.K * n * n * c.H,  # all of them
        "ssd_states": state,
        "ssd_fwd": 2 * state + lower_v,
        "chunk_scan_bwd_dstates": state,
        # a dS + dh_out, <dS, a h>
        "state_passing_bwd": 4 * elements,
        "chunk_state_bwd_db": state,
        # dY h^T; dY X^T; dscores B and dscores^T C
        "chunk_scan_bwd_dc": state + lower_v + 2 * scores,
        # B ds; C B^T and (C B^T * G)^T dY
        "chunk_scan_chunk_state_bwd_dx": state + scores + lower_v,
        "chunk_scan_bwd_da_cs": scores_below + below_v,
        # the sum from behind, times A and added to dstep, times the step and summed
        "chunk_cumsum_bwd": 5 * n * c.HV,
        "ssd_states_bwd": state,
        "ssd_bwd_dc": state,  # dY h^T
        # C B^T; B ds, X ds^T; (C B^T * G)^T dY, dY X^T; dscores B and dscores^T C
        "ssd_bwd_dx": 2 * state + 2 * lower_v + 3 * scores,
    }
    stages["forward"] = scores + stages["ssd_fwd"]
    # of C B^T once
    gradients = stages["ssd_bwd_dc"] + stages["ssd_bwd_dx"] - scores
    stages[TRAINING] = stages["forward"] + stages["ssd_states_bwd"] + gradients
    return stages[what]


def _quadratic(c: Case) -> int:
    """K K^T, Q K^T, the solution of a triangular system and Q K^T V_new, over all of T."""
    below, lower = c.T * (c.T - 1) // 2, c.T * (c.T + 1) // 2
    return 2 * c.K * (below + lower) * c.H + 2 * c.V * (below + lower) * c.HV
