"""The chunked delta rules against the recurrence in float64: fla's grids, gates, chunks, stages."""

import dataclasses
import itertools
from itertools import pairwise

import gdn_checks
import kda_checks
import pytest
import torch
from gdn_checks import DTYPES, boundaries, cotangents, exact, recurrence_arguments
from grids import FULL, parametrize
from ops.contract import NAMES, RAW, gdn, kda

from linattn_edu.ops import gdn as gdn_operator
from linattn_edu.ops import kda as kda_operator
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
]

GPU = torch.cuda.is_available()
CHECKS = {gdn: gdn_checks, kda: kda_checks}
# the rows of fla's test_chunk: B, T, H, HV, D, scale, norm of the gate, share of open gates,
# l2norm; of KDA also gate of a layer, safe gate, disable_recompute, chunk_size
GDN_ROWS = (
    (4, 1024, 4, 4, 128, 0.1, 1, 1.0, False),
    (2, 75, 4, 4, 64, 1, 0.01, 0, False),
    (2, 500, 3, 3, 60, 1, 1, 0, False),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False),
    (2, 256, 2, 4, 64, 1, 1, 0, False),
    (2, 512, 2, 8, 64, 1, 0.1, 0, True),
    (2, 1024, 4, 8, 128, 0.1, 1, 0, False),
)
KDA_ROWS = (
    (1, 63, 1, 1, 64, 1, 1, 0, False, False, True, False, 64),
    (2, 500, 3, 3, 60, 1, 1, 0, False, False, True, True, 64),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False, False, False, False, 64),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False, False, False, True, 64),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False, False, True, False, 64),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, False, False, True, False, 64),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True, False, False, False, 64),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False, True, False, False, 64),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False, True, True, True, 64),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False, True, True, False, 64),
    (2, 1024, 2, 4, 64, 1, 1, 0, False, False, True, False, 64),
    (2, 1024, 2, 8, 64, 0.1, 1, 0, True, True, False, False, 64),
    (2, 1024, 4, 8, 128, 0.1, 1, 0, False, True, True, False, 64),
    (2, 160, 2, 4, 64, 1, 1, 0, False, False, False, False, 32),
    (2, 160, 2, 4, 64, 1, 1, 0, True, True, True, True, 32),
    (2, 1024, 2, 8, 128, 0.1, 1, 0, False, True, False, False, 64),
)
# the rows of fla's test_chunk_varlen: H, HV, D, share of open gates, boundaries; of KDA also the
# share of shut gates
GDN_PACKED = (
    (4, 4, 60, 0, (0, 15)),
    (4, 4, 64, 0, (0, 256, 500, 1000)),
    (4, 4, 64, 0.5, (0, 256, 500, 1000)),
    (4, 4, 100, 0, (0, 15, 100, 300, 1200, 2000)),
    (2, 4, 64, 0, (0, 256, 500, 1000)),
    (2, 8, 64, 0, (0, 256, 500, 1000)),
)
KDA_PACKED = (
    (4, 4, 60, 0, (0, 15), 0.1),
    (4, 4, 64, 0, (0, 256, 500, 1000), 0.9),
    (4, 4, 128, 0.5, (0, 256, 500, 1000), 0),
    (4, 4, 100, 0, (0, 15, 100, 300, 1200, 2000), 0),
    (4, 4, 256, 0, (0, 100, 300, 1200, 3000, 4096), 0.5),
    (2, 8, 64, 0, (0, 256, 500, 1000), 0.1),
)
# B, T, H, HV, D; heads enough for an error of A_log and dt_bias, which have one number each
LAYERS = (
    (1, 63, 1, 6, 24),
    (2, 500, 6, 6, 60),
    (2, 1000, 3, 6, 64),
    (3, 1024, 8, 8, 100),
    (4, 1024, 4, 8, 128),
    (4, 2048, 2, 8, 64),
)
# the parameters that a gate of KDA is given, and its bound
KDA_LAYERS = (
    (("A_log", "dt_bias"), None),
    (("A_log",), None),
    (("A_log", "dt_bias"), -5.0),
    (("dt_bias",), -1.0),
    ((), -8.0),
)


def turns(of_gdn, of_kda):
    """(form, case, dtype): every case with every dtype; the interpreter takes the dtypes in turns,
    but for GDN in the full suite: KDA takes longer.
    """
    found = []
    for form, cases in ((gdn, of_gdn), (kda, of_kda)):
        every = GPU or (FULL and form is gdn)
        for n, case in enumerate(cases):
            dtypes = DTYPES if every else (DTYPES[n % len(DTYPES)],)
            found += [(form, case, dtype) for dtype in dtypes]
    return pytest.mark.parametrize(("form", "case", "dtype"), found, ids=str)


def check_row(
    form, shape, dtype, device, *, scale=None, flags=None, at_least=0.0, kinds=None, **options
):
    """Both passes against float64; flags mean something to the recurrence, options do not."""
    checks, flags = CHECKS[form], flags or {}
    x = checks.inputs(*shape, dtype, device, **(kinds or {}))
    do, dht = cotangents(x)
    want = exact(x, do, dht, scale=scale, **flags)
    options |= flags | {"chunk_size": options.get("chunk_size", 64 if GPU or form is gdn else 16)}
    got = checks.triton(x, do, dht, scale=scale, **options)
    raw = flags.get("use_gate_in_kernel")
    dg = 0 if raw else checks.spacing(x["g"], options["chunk_size"])
    checks.check(got, want, dtype, at_least, dg=dg)


@turns(GDN_ROWS, KDA_ROWS)
def test_fla_s_grid(form, case, dtype, device):
    """In the interpreter one q/k head, as much of T as two chunks, for KDA narrow heads."""
    B, T, H, HV, D, scale, norm, mask, l2norm, *rest = case
    if not GPU:
        B, H, HV = 1, 1, min(2, HV // H)
        if form is kda:
            T, D = 17 + T % 13, D // 4 - 1
        elif T >= 100:
            T = 64 + (T % 64 or 20)
    kinds = {"norm": norm, "mask": mask, "raw_qk": l2norm}
    flags, options = {"use_qk_l2norm_in_kernel": l2norm}, {}
    if form is kda:
        gate, safe, keep, C = rest
        flags |= {"use_gate_in_kernel": gate, "safe_gate": safe}
        flags |= {"lower_bound": -5.0} if gate and safe else {}
        kinds |= {"raw_gate": gate, "safe": safe}
        options = {"disable_recompute": keep, "chunk_size": C if GPU else min(C, 32)}
    check_row(
        form, (B, T, H, HV, D, D), dtype, device, scale=scale, flags=flags, kinds=kinds, **options
    )


@turns(GDN_PACKED, KDA_PACKED)
def test_fla_s_packed_rows(form, case, dtype, device):
    H, HV, D, mask, bounds, *shut = case
    lengths = [b - a for a, b in pairwise(bounds)]
    if not GPU:
        H, HV, least = 1, min(2, HV // H), 16 if form is gdn else 5
        lengths, D = [min(T, least + T % 13) for T in lengths[:2]], D if form is gdn else D // 4 - 1
    checks, N = CHECKS[form], len(lengths)
    kinds = {"mask": mask, "N": N} | ({"shut": shut[0]} if shut else {})
    x = checks.inputs(1, sum(lengths), H, HV, D, D, dtype, device, **kinds)
    do, dht = cotangents(x, N)
    bounds = boundaries(lengths, device, torch.int64)
    got = checks.triton(x, do, dht, cu_seqlens=bounds)
    # shut gates cost the digits of the sums they enter: see test_gates_shut_here_and_there
    want, digits = exact(x, do, dht, cu_seqlens=bounds), checks.spacing(x["g"])
    checks.check(got, want, dtype, digits if shut and shut[0] else 0, dg=digits)


@turns(LAYERS if GPU else LAYERS[:1], KDA_LAYERS)
def test_the_gate_of_a_layer(form, case, dtype, device):
    flags, kinds = {"use_gate_in_kernel": True}, {"raw_gate": True}
    if form is gdn:
        shape = (*case, case[-1])
    else:
        shape = (2, 500, 4, 8, 64, 64) if GPU else (1, 17, 1, 3, 8, 8)
        kinds["parameters"], bound = case
        flags |= {"lower_bound": bound, "safe_gate": bound is not None and bound >= -5}
    check_row(form, shape, dtype, device, flags=flags, kinds=kinds)


@turns((16, 32, 64), (16, 32, 64))
def test_chunk_sizes(form, case, dtype, device):
    one, more = ((1, 2, 32, 32), 6) if form is gdn else ((1, 1, 16, 16), 3)
    shape = (4, 1000, 2, 4, 32, 32) if GPU else (1, case + more, *one)
    check_row(form, shape, dtype, device, chunk_size=case)


@turns(
    ((70, 256, 256), (65, 16, 100), (100, 128, 33), (70, 24, 40), (9, 3, 2)),
    ((20, 2, 3), (20, 2, 40), (20, 33, 3), (20, 33, 40)),
)
def test_head_sizes(form, case, dtype, device):
    T, K, V = case
    heads = (1, 1) if form is gdn and K > 100 else (1, 2)
    shape = (2, (10 if form is gdn else 15) * T, 2, 4, K, V) if GPU else (1, T, *heads, K, V)
    check_row(form, shape, dtype, device)


@turns((False, True), (False, True))
def test_beta_before_its_sigmoid(form, case, dtype, device):
    flags = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": case}
    shape = (1, 40, 1, 2, 24, 40) if form is gdn else (1, 20, 1, 2, 12, 8)
    shape = (2, 1000, 2, 4, 64, 64) if GPU else shape
    check_row(form, shape, dtype, device, kinds={"raw_beta": True}, flags=flags)


@turns((), (0.1, 0.5, 0.9))
def test_gates_shut_here_and_there(form, case, dtype, device):
    """g = -1000 for some tokens and channels. A shut gate costs the later decays of its chunk the
    digits of the sum that it adds 150 to: in float32 that is the error, of every result.
    """
    shape, C = ((2, 1000, 4, 4, 64, 64), 64) if GPU else ((1, 40, 1, 1, 20, 24), 32)
    x = kda_checks.inputs(*shape, dtype, device, shut=case)
    at_least = kda_checks.spacing(x["g"], C)
    assert at_least < 5e-4
    check_row(form, shape, dtype, device, kinds={"shut": case}, at_least=at_least, chunk_size=C)


@pytest.mark.parametrize(
    ("T", "D", "dtype"),
    [
        *itertools.product((1, 63, 500, 1024, 1500), (60, 64, 100, 128, 256), DTYPES),
        *itertools.product((8192,), (128,), DTYPES),
    ]
    if GPU
    else [(1, 60, DTYPES[1]), (9, 256, DTYPES[0]), (9, 128, DTYPES[2]), (17, 64, DTYPES[0])],
    ids=str,
)
@pytest.mark.parametrize("safe", [False, True] if GPU else [True])
def test_sizes_of_kda(T, D, dtype, safe, device):
    heads = (1, 2) if T > 1500 else (2, 4) if GPU else (1, 1)
    shape = (1 if T > 1500 or not GPU else 2, T, *heads, D, D)
    check_row(kda, shape, dtype, device, kinds={"safe": safe}, flags={"safe_gate": safe})


# -- in float64


GDN_GATES = ("trained", "none", "reset", "closed")
KDA_GATES = {"trained": {}, "open": {"mask": 1.0}, "shut": {"shut": 1.0}, "some": {"shut": 0.125}}
LENGTHS = (1, 15, 63, 64, 65, 100)


def check_float64(form, x, C):
    got = form.f(**x, output_final_state=True, chunk_size=C)
    q, k, v, g, beta, S = recurrence_arguments(x)
    gates = {"g": g} if form is gdn else {"g": None, "gk": g}
    want = recurrent(q, k, v, beta=beta, initial_state=S, **gates)
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a, b, 1e-12)


@parametrize(T=(*LENGTHS, 257), C=(16, 32, 64), gate=GDN_GATES)
def test_gdn_equals_the_recurrence_in_float64(T, C, gate):
    x = gdn_inputs(2, T, 2, 4, 33, 20, dtype=torch.float64, initial_state=True, seed=T, gate=gate)
    check_float64(gdn, x.asdict(), C)


@parametrize(T=LENGTHS, C=(16, 32, 64), gate=KDA_GATES)
def test_kda_equals_the_recurrence_in_float64(T, C, gate):
    x = kda_checks.inputs(1, T, 2, 4, 33, 20, torch.float64, seed=T, **KDA_GATES[gate])
    check_float64(kda, x, C)


@pytest.mark.parametrize("shut", [0.1, 0.9])
def test_kda_with_shut_gates_in_float64(shut):
    x = kda_checks.inputs(1, 70, 1, 2, 12, 8, torch.float64, shut=shut)
    do, dht = cotangents(x)
    got = kda_checks.run(x, do, dht, output_final_state=True, impl="reference")
    for name, want in exact(x, do, dht).items():
        assert_close(name, got[name], want, 1e-10)


@pytest.mark.parametrize(
    ("form", "raw", "bound", "keep"),
    [
        *((gdn, raw, None, False) for raw in (False, True)),
        *((kda, *gate, keep) for gate in ((False, None), (True, None), (True, -5.0))
          for keep in (False, True)),
    ],
    ids=str,
)  # fmt: skip
def test_gradcheck(form, raw, bound, keep):
    kinds = RAW if raw else {}
    x = CHECKS[form].inputs(1, 18, 1, 2, 2, 2, torch.float64, **kinds)
    options = {"output_final_state": True, "chunk_size": 16, "impl": "reference"}
    options |= dict.fromkeys(NAMES, raw) | ({"disable_recompute": keep} if form is kda else {})
    options |= {} if bound is None else {"lower_bound": bound}

    def f(*tensors):
        return form.f(**dict(zip(x, tensors, strict=True)), **options)

    leaves = [t.requires_grad_() for t in x.values()]
    assert torch.autograd.gradcheck(f, leaves, fast_mode=raw or form is kda)


# -- stages


OPERATORS = {gdn: gdn_operator, kda: kda_operator}
STAGES = [
    (form, stage.name)
    for form, operator in OPERATORS.items()
    for stage in dataclasses.fields(operator.stages("reference"))
]


def both_passes(form, stages, x, do, dht):
    """Outputs and gradients of the composition, by name."""
    operator, options = OPERATORS[form], {"scale": 0.2, "initial_state": x["initial_state"]}
    if form is kda:
        options |= {"lower_bound": -4.0} | {n: x[n] for n in kda_checks.GATE}
    tensors = [x[n] for n in ("q", "k", "v", "g", "beta")]
    C = 64 if form is gdn else 16
    o, S, kept = operator.forward(
        stages, *tensors, output_final_state=True, chunk_size=C, **options
    )
    kept = kept if form is gdn else kept._replace(gc=None)
    gradients = operator.backward(stages, *tensors, kept, do, dht, **options)
    names = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")
    return {"o": o, "ht": S} | dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize(("form", "stage"), STAGES, ids=str)
def test_any_one_stage_can_be_swapped(form, stage, device):
    sizes, raw = ((1, 100, 1, 2, 24, 40), False) if form is gdn else ((1, 40, 1, 2, 24, 40), True)
    x = CHECKS[form].inputs(*sizes, torch.float32, device, raw_gate=raw)
    do, dht = cotangents(x)
    stages = OPERATORS[form].stages
    mixed = dataclasses.replace(stages("reference"), **{stage: getattr(stages("triton"), stage)})
    wide = {n: t.double() for n, t in x.items()}
    want = both_passes(form, stages("reference"), wide, do.double(), dht.double())
    for name, got in both_passes(form, mixed, x, do, dht).items():
        assert (got is None) == (want[name] is None), name
        if got is not None:
            of_outputs = form is gdn and name in ("o", "ht")
            tol = 5e-6 if of_outputs else CHECKS[form].tolerance(name, torch.float32)
            assert_close(name, got, want[name], tol)
