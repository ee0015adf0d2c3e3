"""Operators on DTensors: two processes compute what one does, each its share of batch or heads."""

import json
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import leave, with_forks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from linattn_edu import (
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_global_cumsum,
    chunk_kda,
    chunk_local_cumsum,
    ema_scan,
    fused_gdn_gate,
    fused_kda_gate,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    l2norm,
    selective_state_update,
    solve_tril,
)
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs

PROCESSES = 2
R, BATCH, HEADS, STATE_HEADS = Replicate(), Shard(0), Shard(2), Shard(1)
BY_BATCH = dict.fromkeys(("q", "k", "v", "g", "beta", "initial_state", "o", "S"), BATCH)
BY_HEADS = dict.fromkeys(("q", "k", "v", "g", "beta", "o"), HEADS)
BY_HEADS |= dict.fromkeys(("initial_state", "S"), STATE_HEADS)
# of the key heads one alone: it cannot be shared out
ONE_KEY_HEAD = BY_HEADS | dict.fromkeys(("q", "k"), R)
MIXED = BY_BATCH | {"k": HEADS, "v": R, "g": Shard(1), "initial_state": STATE_HEADS}
UNEVEN = BY_BATCH | {"o": R, "S": R}


def delta(f, inputs, placements, *, B=2, H=2, N=None, gate=False, **options):
    """Arguments of the delta rule, the placements of all tensors, the call."""
    x = inputs(B, 9, H, 4, 6, 8, initial_state=True).asdict()
    if N is not None:
        x["initial_state"] = torch.randn(N, 4, 6, 8)
    if gate:
        x |= {"A_log": torch.randn(4), "dt_bias": torch.randn(x["g"].shape[2:])}
        options["use_gate_in_kernel"] = True

    def call(**given):
        o, S = f(**given, **options, output_final_state=True, impl="reference")
        return {"o": o, "S": S}

    return x, placements, call


def average(placements):
    """The same of ema_scan."""
    x = {"x": torch.randn(2, 9, 4, 6), "g": -torch.rand(2, 9, 4), "weight": torch.rand(2, 9, 4)}
    x["initial_state"] = torch.randn(2, 4, 6)

    def call(**given):
        y, S = ema_scan(**given, output_final_state=True, impl="reference")
        return {"y": y, "S": S}

    return x, placements, call


def convolution(placements):
    """The same of causal_conv1d."""
    x = {"x": torch.randn(2, 9, 6), "weight": torch.randn(6, 4), "bias": torch.randn(6)}
    x |= {"residual": torch.randn(2, 9, 6), "initial_state": torch.randn(2, 6, 4)}

    def call(**given):
        y, S = causal_conv1d(**given, activation="silu", output_final_state=True, impl="reference")
        return {"y": y, "S": S}

    return x, placements, call


def one(f, shape, place):
    """A function of one tensor."""
    return {"x": torch.randn(shape)}, {"x": place, "y": place}, lambda x: {"y": f(x)}


GDN = (chunk_gated_delta_rule, gdn_inputs)
KDA = (chunk_kda, kda_inputs)
GDN_STEPS = (fused_recurrent_gated_delta_rule, gdn_inputs)
KDA_STEPS = (fused_recurrent_kda, kda_inputs)
FORMS = {"chunk_gdn": GDN, "chunk_kda": KDA, "recurrent_gdn": GDN_STEPS, "recurrent_kda": KDA_STEPS}
AVERAGE = ("x", "g", "weight", "initial_state", "y", "S")
AVERAGE_BY_HEADS = dict.fromkeys(AVERAGE, HEADS) | {"initial_state": STATE_HEADS, "S": STATE_HEADS}
CONV = dict.fromkeys(("x", "residual", "initial_state", "y", "S"), BATCH)
CONV_BY_CHANNELS = dict.fromkeys(("x", "residual", "y"), HEADS)
CONV_BY_CHANNELS |= {"weight": Shard(0), "bias": Shard(0)}
CONV_BY_CHANNELS |= {"initial_state": STATE_HEADS, "S": STATE_HEADS}
EVERY = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
BOUNDS = torch.tensor([0, 4, 4, 9])
CASES = {
    **{f"{n}, batch": (delta, (*form, BY_BATCH), {}) for n, form in FORMS.items()},
    **{f"{n}, heads": (delta, (*form, BY_HEADS), {"gate": True}) for n, form in FORMS.items()},
    **{
        f"{n}, packed by heads": (delta, (*form, BY_HEADS), {"B": 1, "N": 3, "cu_seqlens": BOUNDS})
        for n, form in FORMS.items()
    },
    "chunk_gdn, batch, gate": (delta, (*GDN, BY_BATCH), {"gate": True, **EVERY}),
    "chunk_kda, batch, gate": (delta, (*KDA, BY_BATCH), {"gate": True, **EVERY}),
    "recurrent_kda, heads, all": (delta, (*KDA_STEPS, BY_HEADS), {"gate": True, **EVERY}),
    "chunk_gdn, mixed": (delta, (*GDN, MIXED), {}),
    "recurrent_kda, mixed": (delta, (*KDA_STEPS, MIXED), {"gate": True}),
    "chunk_gdn, uneven batch": (delta, (*GDN, UNEVEN), {"B": 3}),
    "chunk_gdn, one key head": (delta, (*GDN, ONE_KEY_HEAD | {"o": R, "S": R}), {"H": 1}),
    "chunk_gdn, whole": (delta, (*GDN, dict.fromkeys(BY_BATCH, R)), {}),
    "ema_scan, batch": (average, (dict.fromkeys(AVERAGE, BATCH),), {}),
    "ema_scan, heads": (average, (AVERAGE_BY_HEADS,), {}),
    "causal_conv1d, batch": (convolution, (CONV,), {}),
    "causal_conv1d, channels": (convolution, (CONV_BY_CHANNELS,), {}),
    "l2norm, batch": (one, (l2norm, (2, 3, 4), BATCH), {}),
    "l2norm, tokens": (one, (l2norm, (3, 6, 4), Shard(1)), {}),
    "gdn gate": (one, (lambda x: fused_gdn_gate(x, torch.zeros(4)), (2, 5, 4), BATCH), {}),
    "kda gate": (one, (lambda x: fused_kda_gate(x, torch.zeros(4)), (2, 5, 4, 3), BATCH), {}),
    "solve_tril": (one, (lambda x: solve_tril(x / 4), (2, 5, 4, 16), HEADS), {}),
    "local sums": (one, (lambda x: chunk_local_cumsum(x, 4), (2, 5, 4), BATCH), {}),
    "global sums": (one, (chunk_global_cumsum, (2, 5, 4), BATCH), {}),
}  # fmt: skip


def compare(mesh, make, arguments, options):
    """Outputs, their placements and all gradients, against those of whole tensors."""
    torch.manual_seed(0)
    x, placements, call = make(*arguments, **options)
    whole = {n: t.clone().requires_grad_() for n, t in x.items() if t is not None}
    want = call(**whole)
    d_outputs = [torch.randn_like(y) for y in want.values()]
    gradients = torch.autograd.grad(list(want.values()), list(whole.values()), d_outputs)
    parts = {
        n: distribute_tensor(t.detach(), mesh, [placements.get(n, R)]).requires_grad_()
        for n, t in whole.items()
    }
    got = call(**parts)
    for n, y in got.items():
        assert isinstance(y, DTensor) and y.placements == (placements[n],), (n, y.placements)
        assert_close(n, y.full_tensor(), want[n], 1e-6)
    d_parts = [
        distribute_tensor(dy, mesh, y.placements)
        for dy, y in zip(d_outputs, got.values(), strict=True)
    ]
    d_parts = torch.autograd.grad(list(got.values()), list(parts.values()), d_parts)
    for n, dy, want_dy in zip(parts, d_parts, gradients, strict=True):
        assert dy.shape == want_dy.shape
        assert_close(f"d{n}", dy.full_tensor(), want_dy, 3e-6)


def decode(mesh):
    """Heads of a pool lie apart, and are written where they lie."""
    torch.manual_seed(0)
    x = gdn_inputs(2, 3, 2, 4, 6, 8).asdict()
    del x["initial_state"]
    pool, slots = torch.randn(5, 4, 6, 8), torch.tensor([3, 1])
    apart = distribute_tensor(pool.clone(), mesh, [STATE_HEADS])
    options = {"ssm_state_indices": slots, "inplace_final_state": True, "impl": "reference"}
    o, _ = fused_recurrent_gated_delta_rule(**x, initial_state=pool, **options)
    parts = {n: distribute_tensor(t, mesh, [HEADS]) for n, t in x.items()}
    got, same = fused_recurrent_gated_delta_rule(**parts, initial_state=apart, **options)
    assert same is apart
    assert_close("o", got.full_tensor(), o, 1e-6)
    assert_close("pool", apart.full_tensor(), pool, 1e-6)


def refuse_copies(mesh):
    """Copies of a pool would each get the states of some sequences only."""
    x = gdn_inputs(2, 3, 2, 4, 6, 8).asdict()
    del x["initial_state"]
    parts = {n: distribute_tensor(t, mesh, [BATCH]) for n, t in x.items()}
    pool = distribute_tensor(torch.zeros(5, 4, 6, 8), mesh, [R])
    with pytest.raises(ValueError, match="initial_state is written in place"):
        fused_recurrent_gated_delta_rule(
            **parts, initial_state=pool, ssm_state_indices=torch.tensor([3, 1]),
            inplace_final_state=True, impl="reference",
        )  # fmt: skip
    assert not pool.full_tensor().any()


def decode_ssd(mesh):
    """The same of Mamba-2, with the heads of two groups; one number a head is expanded."""
    torch.manual_seed(0)
    H, P, N = 4, 6, 8
    x, dt, B, C = (torch.randn(2, *shape) for shape in ((H, P), (H, 1), (2, N), (2, N)))
    A, pool, slots = -torch.rand(H, 1, 1), torch.randn(5, H, P, N), torch.tensor([3, 1])
    options = {"state_batch_indices": slots, "dt_softplus": True, "impl": "reference"}

    def step(state, x, dt, A, B, C):
        A, dt = A.expand(-1, P, N), dt.expand(-1, -1, P)
        return selective_state_update(state, x, dt, A, B, C, **options)

    apart = distribute_tensor(pool.clone(), mesh, [STATE_HEADS])
    out = step(pool, x, dt, A, B, C)
    parts = [distribute_tensor(t, mesh, [Shard(1)]) for t in (x, dt)]
    parts += [distribute_tensor(A, mesh, [Shard(0)])]
    parts += [distribute_tensor(t, mesh, [Shard(1)]) for t in (B, C)]
    got = step(apart, *parts)
    assert_close("out", got.full_tensor(), out, 1e-6)
    assert_close("pool", apart.full_tensor(), pool, 1e-6)


POOLS = {
    "decoding, heads": decode,
    "decoding of Mamba-2, heads": decode_ssd,
    "decoding, copies": refuse_copies,
}


def work(rank, folder):
    """All cases in one process; what went wrong is written to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    wrong = {}
    for name in (*CASES, *POOLS):
        try:
            POOLS[name](mesh) if name in POOLS else compare(mesh, *CASES[name])
        except (Exception, pytest.fail.Exception):
            wrong[name] = traceback.format_exc()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(wrong, file)
    del mesh
    leave()


PROGRAM = """
sys.path.insert(0, sys.argv[1])
from ops import test_sharding
mp.spawn(test_sharding.work, (sys.argv[2],), nprocs=test_sharding.PROCESSES)
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """What went wrong in each process, by case."""
    if not dist.is_gloo_available():
        pytest.skip("PyTorch is built without gloo")
    folder = tmp_path_factory.mktemp("processes")
    with_forks(PROGRAM, str(Path(__file__).parents[1]), str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.long
@pytest.mark.parametrize("name", [*CASES, *POOLS])
def test_two_processes(name, wrong):
    for rank, of_process in enumerate(wrong):
        assert name not in of_process, f"process {rank}:\n{of_process[name]}"


def test_a_mesh_of_two_dimensions():
    """Batch along one, heads along the other, which divide them by their own sizes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 4))
        x = gdn_inputs(2, 5, 4, 8, 6, 8, initial_state=True).asdict()
        places = {"initial_state": [Shard(0), Shard(1)]}
        parts = {
            n: distribute_tensor(t, mesh, places.get(n, [Shard(0), Shard(2)]), src_data_rank=None)
            for n, t in x.items()
        }
        o, S = chunk_gated_delta_rule(**parts, output_final_state=True, impl="reference")
        assert o.placements == (Shard(0), Shard(2)) and o.shape == (2, 5, 8, 8)
        assert S.placements == (Shard(0), Shard(1)) and S.shape == (2, 8, 6, 8)
        assert o.to_local().shape == (1, 5, 2, 8)
        want, _ = chunk_gated_delta_rule(
            **{n: t.to_local() for n, t in parts.items()}, impl="reference"
        )
        assert torch.equal(o.to_local(), want)
        again = {
            n: distribute_tensor(t, mesh, [Shard(0), Shard(0)], src_data_rank=None)
            for n, t in x.items()
        }
        o, _ = chunk_gated_delta_rule(**again, impl="reference")
        assert o.placements == (Shard(0), Replicate()) and o.shape == (2, 5, 8, 8)
    finally:
        dist.destroy_process_group()
