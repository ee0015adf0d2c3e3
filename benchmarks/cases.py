"""The registry of cases, and the bytes, operations and floor of each thing that is timed.

Counted from shapes alone, per call:

- bytes: each input read once, each output written once. q, k, v, beta and everything a stage hands
  to the next has the size of the case's dtype; g and gc are float32; the state that the recurrence
  returns is float32.
- flops: the multiply-adds that the matrix products of the chunked form need, two operations each.
  Products with a triangular matrix are counted without its zeros, and K K^T and Q K^T once for each
  q/k head. Elementwise work is left out, except where there is nothing else: gate_cumsum and the
  recurrence.
- floor_ms: the larger of bytes / (bytes per second) and flops / (operations per second).
"""

from collections.abc import Iterator
from dataclasses import dataclass

CHUNK = 64
GATE_BYTES = 4  # of an element of g, gc and the final state

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
    )
}

# cases of operators that the library does not have yet: case -> the function it waits for
AWAITED = {
    **dict.fromkeys(("kda_train", "kda_kimi", "kda_long"), "chunk_kda"),
    **dict.fromkeys(("ssd_2.7b", "ssd_long"), "mamba_chunk_scan_combined"),
    "gdn_decode": "fused_recurrent_gated_delta_rule",
    "kda_decode": "fused_recurrent_kda",
}

# the cost of the three forms of GDN against the length of the sequence
SCALING = "gdn_scaling"
SCALING_T = tuple(256 << i for i in range(8))
SCALING_FORMS = ("chunked", "recurrent", "quadratic")

STAGES = ("gate_cumsum", "solve", "wy", "state", "output")
FUSED_STAGES = ("intra", "scan")
ALL_STAGES = (*STAGES, *FUSED_STAGES, "recurrent")


def scaling_case(T: int) -> Case:
    """The shapes of one length of the scaling plot."""
    return Case(SCALING, "gdn", 1, T, 16, 16, 128, 128)


def select(names: list[str]) -> list[Case]:
    """Cases by name or by the beginning of a name; all of them for no name."""
    chosen = {}
    for name in names:
        found = [c for c in CASES.values() if c.name == name] or [
            c for c in CASES.values() if c.name.startswith(name)
        ]
        if name in AWAITED:
            raise ValueError(
                f"{name} waits for {AWAITED[name]}, which the library does not have yet"
            )
        if not found:
            raise ValueError(f"no case is called {name!r}; there are {', '.join(CASES)}")
        chosen.update((c.name, c) for c in found)
    return [c for c in CASES.values() if c.name in chosen or not names]


# ---- bytes and operations of GDN


def work(case: Case, what: str, chunk: int = CHUNK) -> Work:
    """Bytes and operations of "forward", of "stage:<name>", or of a form of the scaling plot."""
    name = what.removeprefix("stage:")
    return Work(_bytes(case, name, chunk), _flops(case, name, chunk))


def _bytes(c: Case, what: str, chunk: int) -> int:
    tokens = c.B * c.T
    q = k = tokens * c.H * c.K * c.size
    v = o = u = v_new = tokens * c.HV * c.V * c.size
    w = tokens * c.HV * c.K * c.size
    g = gc = tokens * c.HV * GATE_BYTES
    beta = tokens * c.HV * c.size
    A = P = R = tokens * c.HV * chunk * c.size
    h = c.B * -(-c.T // chunk) * c.HV * c.K * c.V * c.size
    final_state = c.B * c.HV * c.K * c.V * GATE_BYTES
    forward = q + k + v + g + beta + o
    return {
        "gate_cumsum": g + gc,
        "solve": k + beta + A,
        "wy": k + v + beta + gc + A + w + u,
        "state": k + w + u + gc + h + v_new,
        "output": q + k + v_new + h + gc + o,
        "intra": q + k + beta + gc + P + R,
        "scan": q + k + v + gc + P + R + o,
        "forward": forward,
        "chunked": forward,
        "quadratic": forward,
        "recurrent": forward + final_state,
    }[what]


def _flops(c: Case, what: str, chunk: int) -> int:
    if what == "recurrent":
        # decay KV, k S 2KV, k^T e 2KV, q S 2KV; beta (v - k S) and the scale of o 3V
        return c.B * c.T * c.HV * (7 * c.K * c.V + 3 * c.V)
    if what == "quadratic":
        return c.B * _quadratic(c)
    return c.B * sum(count * _chunk_flops(c, what, n) for n, count in _chunks(c.T, chunk))


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
    state = 2 * n * c.K * c.V * c.HV  # a product of n rows with the state
    stages = {
        "gate_cumsum": 2 * n * c.HV,
        "solve": kkt + inverse,
        "wy": lower_k + lower_v,
        "state": 2 * state,
        "output": state + qkt + lower_v,
        "intra": kkt + qkt + inverse,
        "scan": 3 * state + 2 * lower_v,
    }
    stages["forward"] = stages["chunked"] = stages["intra"] + stages["scan"]
    return stages[what]


def _quadratic(c: Case) -> int:
    """K K^T, Q K^T, the solution of a triangular system and Q K^T V_new, over all of T."""
    below, lower = c.T * (c.T - 1) // 2, c.T * (c.T + 1) // 2
    return 2 * c.K * (below + lower) * c.H + 2 * c.V * (below + lower) * c.HV
