"""Arguments of the recurrence with every gate and flag, its result in float64, the gradients."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from gdn_checks import log_decay

from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close, gdn_inputs

GRADIENTS = ("q", "k", "v", "g", "gk", "gv", "beta", "A_log", "dt_bias", "initial_state")
OF_GATES = ("g", "gk", "gv", "beta", "A_log", "dt_bias")  # sums over the state: more rounding
# relative RMS against float64: outputs; dq, dk, dv, dh0; what the gates and beta get
TOLERANCE = {
    torch.float32: (1e-5, 1e-5, 3e-5),
    torch.float16: (5e-3, 8e-3, 2e-2),
    torch.bfloat16: (5e-3, 8e-3, 2e-2),
}

# the gate of a call: what it is made of, and the least log decay
GATES = {
    "log": ((), None),
    "softplus": (("A_log", "dt_bias"), None),
    "softplus, no bias": (("A_log",), None),
    "bounded": (("A_log", "dt_bias"), -5.0),
    "bounded, bias alone": (("dt_bias",), -2),
    "bounded, bare": ((), -0.5),
}


def case(
    T, heads=(1, 2), K=16, V=12, *, B=1, N=None, dtype=torch.float32, device="cpu", seed=0,
    gates="g", flags=(), state=True, beta=True,
):  # fmt: skip
    """Arguments by name. gates: names among g, gk, gv. flags: norm, gate, sigmoid, neg, v_first.

    N: number of states, if not B.
    """
    x = gdn_inputs(B, T, *heads, K, V, dtype=dtype, device=device, seed=seed).asdict()
    generator = torch.Generator(device=device).manual_seed(seed + 1)

    def randn(*shape):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    HV = heads[1]
    shape = (B if N is None else N, HV, *((V, K) if "v_first" in flags else (K, V)))
    x["initial_state"] = randn(*shape) if state else None
    x["gk"] = -F.softplus(randn(B, T, HV, K) - 3) if "gk" in gates.split() else None
    x["gv"] = -F.softplus(randn(B, T, HV, V) - 3) if "gv" in gates.split() else None
    if "g" not in gates.split():
        x["g"] = None
    if "norm" in flags:
        x["q"], x["k"] = 3 * x["q"], 0.2 * x["k"]
    if "sigmoid" in flags:
        x["beta"] = randn(B, T, HV).to(dtype)
    if "gate" in flags:
        x |= {"g": randn(B, T, HV).to(dtype) - 2, "A_log": randn(HV) / 2, "dt_bias": randn(HV) / 2}
    if not beta:
        x["beta"] = None
    return x


def options(flags):
    """The flags under the names of the public function."""
    return {
        "use_qk_l2norm_in_kernel": "norm" in flags,
        "use_gate_in_kernel": "gate" in flags,
        "use_beta_sigmoid_in_kernel": "sigmoid" in flags or "neg" in flags,
        "allow_neg_eigval": "neg" in flags,
        "state_v_first": "v_first" in flags,
        "output_final_state": True,
    }


def kda_case(T, heads=(1, 2), K=16, V=12, *, gate="log", flags=(), seed=0, **kwargs):
    """Arguments by name, and those that are no tensors."""
    x = case(T, heads, K, V, gates="gk", flags=flags, seed=seed, **kwargs)
    x["g"] = x.pop("gk")
    del x["gv"]
    x, rest = {n: t for n, t in x.items() if t is not None}, options(flags)
    given, lower_bound = GATES[gate]
    if gate != "log":
        generator = torch.Generator(device=x["g"].device).manual_seed(seed + 2)
        new = lambda like: torch.randn(
            like, generator=generator, device=x["g"].device, dtype=x["g"].dtype
        )
        x["g"] = (2 * new(x["g"].shape) - 1).to(x["q"].dtype)
        x |= {n: t for n, t in (("A_log", new((heads[1],)) / 2),
                                ("dt_bias", new((heads[1] * K,)))) if n in given}  # fmt: skip
        rest |= {"use_gate_in_kernel": True, "lower_bound": lower_bound}
    return x, rest


def oracle(
    q, k, v, g=None, gk=None, gv=None, beta=None, initial_state=None, A_log=None, dt_bias=None, *,
    flags=(), scale=None, cu_seqlens=None,
):  # fmt: skip
    """o and the final state, by the formulas of the flags and the reference recurrence."""
    if "norm" in flags:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if "gate" in flags:
        g = -A_log.exp() * F.softplus(g if dt_bias is None else g + dt_bias)
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    elif "sigmoid" in flags:
        beta = beta.sigmoid() * (2 if "neg" in flags else 1)
    S = initial_state
    if S is not None and "v_first" in flags:
        S = S.mT
    if cu_seqlens is None:
        o, S = recurrent(q, k, v, g, beta, gk=gk, gv=gv, scale=scale, initial_state=S)
    else:
        o, S = _packed((q, k, v, g, beta, gk, gv), S, scale, cu_seqlens.tolist())
    return o, S.mT if "v_first" in flags else S


def _packed(tensors, states, scale, bounds):
    outputs, last = [], []
    for n, (a, b) in enumerate(pairwise(bounds)):
        q, k, v, g, beta, gk, gv = (x if x is None else x[:, a:b] for x in tensors)
        K, V, HV = q.shape[-1], *v.shape[:1:-1]
        S = q.new_zeros(1, HV, K, V) if states is None else states[n : n + 1]
        if b > a:
            o, S = recurrent(q, k, v, g, beta, gk=gk, gv=gv, scale=scale, initial_state=S)
            outputs.append(o)
        last.append(S)
    return torch.cat(outputs, 1), torch.cat(last)


def kda_oracle(rest, *, flags=()):
    """A function of the tensors: the gate by its formula, the recurrence with gk."""

    def f(g, A_log=None, dt_bias=None, **x):
        gk = g
        if rest.get("use_gate_in_kernel"):
            gate = {"g": g, "A_log": A_log, "dt_bias": dt_bias}
            gk = log_decay({n: t for n, t in gate.items() if t is not None}, rest["lower_bound"])
        return oracle(gk=gk, **x, flags=flags)

    return f


def double(x):
    """The same arguments in float64."""
    return {n: t if t is None else t.double() for n, t in x.items()}


def cotangents(outputs, seed=5):
    """Random gradients of the outputs: the same for the same shapes, whatever the dtype."""
    generator = torch.Generator(device=outputs[0].device).manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in outputs]


def run(f, x, d_outputs=None, **options):
    """The outputs of f and the gradients of x by name; d_outputs are random if None."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items() if t is not None}
    outputs = [y for y in f(**leaves, **options) if y is not None]
    d_outputs = cotangents(outputs) if d_outputs is None else d_outputs
    d_outputs = [d.to(y.dtype) for d, y in zip(d_outputs, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), d_outputs)
    return [y.detach() for y in outputs], dict(zip(leaves, gradients, strict=True))


def close(name, got, want, tol, size=0.1):
    """assert_close, where numbers whose rms is below `size` have an error as if it were that."""
    rms = want.square().mean().sqrt().item()
    assert_close(name, got, want, tol * max(1.0, size / rms if rms else size))


def check_all(got, want, dtype, of_sums=None):
    """Outputs and gradients as `run` returns them, within TOLERANCE; of_sums: parameters of gates,
    sums over the tokens.
    """
    of_outputs, of_gradients, of_gates = TOLERANCE[dtype]
    tolerances = dict.fromkeys(OF_GATES, of_gates)
    if of_sums:
        tolerances |= dict.fromkeys(("A_log", "dt_bias"), of_sums)
    for name, a, b in zip(("o", "final_state"), got[0], want[0], strict=True):
        close(name, a, b, of_outputs)
    assert got[1].keys() == want[1].keys()
    for name, a in got[1].items():
        close(f"d{name}", a, want[1][name], tolerances.get(name, of_gradients))
