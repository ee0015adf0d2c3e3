"""The kernels in Gluon, each as a launcher calls it, for the interpreter of Gluon."""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import pytest
import stages
import torch
from apart import apart
from gdn_checks import PAYS
from stages.fused import pair
from torch.nn.functional import normalize

from linattn_edu.gluon_interpreter import interpreted
from linattn_edu.kernels.routes import forced
from linattn_edu.reference.delta.kda_intra import kda_intra
from linattn_edu.testing import relative_rms

HEAD = 128
# with a GPU the kernels in plain Triton around them are compiled, and take no tensors of the CPU
NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: kernels are interpreted where none is"
)
BF16, FP16 = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """A stage on small parts, in such a form that its launcher takes these kernels in Gluon."""

    stage: str
    family: str
    kernels: str  # the names of those that run, without `_gluon_kernel`
    forced: dict  # what routes choose
    T: int = 192
    K: int = HEAD
    V: int = HEAD
    dtype: torch.dtype = BF16
    kinds: dict = MappingProxyType({})  # of parts
    without: tuple = ()  # parts
    more: dict | Callable = MappingProxyType(
        {}
    )  # options of the stage, or what gives them of parts
    C: int = 64
    between: tuple = ()  # what parts have before the dtype
    change: Callable | None = None  # of the parts
    by: Callable | None = None  # the check, else that of the family

    def check(self, device, **how) -> None:
        """The stage's results are its reference's; how: of `interpreted`."""
        torch.manual_seed(how.get("seed", 0))
        with forced(**PAYS, **self.forced), interpreted(**how) as ran:
            sizes = self.T, self.K, self.V, self.C, *self.between, self.dtype, device
            options = {"without": self.without, "change": self.change, "more": self.more}
            options["check"] = self.by
            stages.check(self.stage, self.family, *sizes, **options, **self.kinds)
        assert [x.__name__.removesuffix("_gluon_kernel") for x in ran] == self.kernels.split()


def in_halves(r) -> None:
    """v_new and Z in two numbers of bfloat16, the low ones as `low`, and the rest in one."""
    whole = r.v_new, r.Z
    for n in ("q", "k", "v", "h", "v_new", "do", "dh", "Z"):
        setattr(r, n, getattr(r, n).bfloat16())
    r.low = tuple((x - y.float()).bfloat16() for x, y in zip(whole, (r.v_new, r.Z), strict=True))


def some_cancel(r) -> None:
    """The same of P and A * G, which one head alone has."""
    low = tuple((x - x.bfloat16().float()).bfloat16() for x in (r.P, r.AG))
    for n in ("q", "k", "v", "do", "P", "AG"):
        setattr(r, n, getattr(r, n).bfloat16())
    cancels = torch.tensor([[0, -1]], dtype=torch.int32).expand(len(r.q), -1).contiguous()
    r.more = {"low": low, "cancels": cancels}


def one_alike(r) -> None:
    """What a user gives is of bfloat16, and keys of one head are alike, beta beyond 1."""
    r.k[:, :, 1] += 3 * r.k[:, :1, 1]
    r.k[:, :, 1] /= r.k[:, :, 1].norm(dim=-1, keepdim=True)
    r.beta, r.some = (r.beta.clone(), True)
    r.beta[:, :, 1] = 1.8
    for n in ("q", "k", "v", "do"):
        setattr(r, n, getattr(r, n).bfloat16())


def some_kept(r) -> None:
    """What the forward pass leaves of one head that cancels, beside one that does not."""
    one_alike(r)
    r.cancels = torch.tensor([[0, -1]], dtype=torch.int32).expand(len(r.q), -1).contiguous()
    wide = (r.q.float(), r.k.float(), r.beta, r.gc)
    r.whole = kda_intra(*wide, chunk_size=64)
    r.inner = tuple(x.bfloat16() for x in r.whole)


def either_bound(r) -> None:
    """Keys are alike and next to nothing fades: one head cancels by what is read alone, where beta
    is small; the other by what the state takes, as its queries have nothing of what keys share.
    """
    shared = normalize(torch.randn(HEAD), dim=0)
    own = normalize(torch.randn(r.k.shape), dim=-1)
    own = normalize(own - (own @ shared)[..., None] * shared, dim=-1)
    r.k = (0.9**0.5 * shared + 0.1**0.5 * own).bfloat16()
    r.q, r.v = own.bfloat16(), r.v.bfloat16()
    r.q[:, :, 0] = r.k[:, :, 0]
    r.beta = torch.tensor([0.3, 1.8]).expand_as(r.beta).contiguous()
    r.gc = (-0.03 * (1 + torch.arange(r.gc.shape[1]) % 64))[None, :, None].expand_as(r.gc).clone()


def check_both(kernel, reference, args, **options) -> None:
    for f in (kernel, reference):
        assert f(*args, **options)[-1].tolist() == [[-1, -1]], "cancels"


def check_some(kernel, reference, args, **options) -> None:
    """All but P and A in fp32, of which heads that do not cancel have anything."""
    options |= {"output_final_state": True}
    got, want = kernel(*args, **options), reference(*args, **options)
    assert got[-1].tolist() == want[-1].tolist() == [[0, -1]] * len(got[-1]), "cancels"
    for i in range(6):
        x, y = (z[i][:, :, 1] if i > 3 else z[i] for z in (got, want))
        assert relative_rms(x, y) < (2**-13 if i > 3 else 2**-7), f"output {i}"


def check_found(kernel, reference, args, **options) -> None:
    """What a head has that does not cancel, and which do."""
    got, want = kernel(*args, **options), reference(*args, **options)
    assert got[-1].tolist() == want[-1].tolist() == [[0, -1]] * len(got[-1]), "cancels"
    for i, (x, y) in enumerate(zip(got[:-1], want, strict=False)):
        heads = 1 if i == 1 else 2
        if y is not None:
            x, y = (z.select(heads, 0) for z in (x, y))
            assert relative_rms(x, y) < 2**-7, f"output {i}"


def check_gradients(kernel, reference, args, **options) -> None:
    got, want = kernel(*args, **options), reference(*args, **options)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert (x is None and y is None) or relative_rms(x, y) < 2**-6, f"output {i}"


def in_pairs(r) -> None:
    """v_new and Z in both numbers of bfloat16 one after the other, the rest in one."""
    r.v_new, r.Z = pair(r.v_new), pair(r.Z)
    for n in ("q", "k", "v", "h", "do", "dh"):
        setattr(r, n, getattr(r, n).bfloat16())


def check_pairs(kernel, reference, args, **options) -> None:
    """The kernel on rows of both halves is its reference on their sums: as near as its own numbers
    are, and dbeta as those of the states, of which v_new knows more; of channels that are not near
    dgc too is in part of rounded numbers.
    """
    wide = [x.double() for x in args]
    for i in (6, 9):  # v_new and Z
        wide[i] = sum(wide[i].chunk(2, -1))
    got, want = kernel(*args, fine=True, **options), reference(*wide, **options)
    assert [x.shape for x in got] == [x.shape for x in want]
    for i, (x, y, close) in enumerate(zip(got, want, (8, 8, 8, 10), strict=True)):
        assert relative_rms(x, y) < 2.0**-close, f"output {i}"


def gates(T: int) -> torch.Tensor:
    """[1, T, 2, 128]: slow ones, another for each channel, so that states live for some chunks. In
    the second chunk half of the channels of one head close at some tokens, in the third all.
    """
    torch.manual_seed(T)
    g = -torch.rand(1, T, 2, HEAD) * torch.linspace(0, 0.02, HEAD)
    g[:, 108:112, 0, 64:] = -20.0
    g[:, 172:176] = -20.0
    return g


def far_rows(T: int) -> torch.Tensor:
    """`gates`, after some of which, in the middle of a block, rows are 2^144 from its first."""
    g = gates(T)
    g[:, 20:25] = -20.0
    return g


def shut(T: int) -> torch.Tensor:
    """`gates`, of which the first of the second chunk is shut: its channels are near."""
    g = gates(T)
    g[:, 64, 1] = -200.0
    return g


def tokens_apart(r) -> None:
    """x is a slice of the rows of a projection."""
    r.x = apart(r.x, 2)


ENDS = ("h0", "dht")
_INTRA = {"intra_chunk": "gluon"}
_BOTH, _EACH = {"together": 1}, {"together": 0}
_SCANS, _KDA = {"scans": "gluon"}, {"kda_fused_scans": "gluon"}
_SSD, _STATES = {"ssd_bwd_dx": "gluon"}, {"ssd_states": "gluon"}
_SSD_DC = {"ssd_bwd_dc": "gluon"}
CASES = {
    "gdn_intra": Case("intra_chunk", "gdn_fused", "intra_chunk", _INTRA, 150),
    "gdn_intra, K=64, gated": Case(
        "intra_chunk", "gdn_fused", "intra_chunk", _INTRA, 150, 64, more={"gated": True}
    ),
    "gdn_intra, no inverse": Case(
        "intra_chunk", "gdn_fused", "intra_chunk", _INTRA, more={"return_inverse": False}
    ),
    "gdn_intra, ring": Case(
        "intra_chunk", "gdn_fused", "intra_chunk_ring", _INTRA | {"intra_ring": 2}
    ),
    "gdn_intra, ring, K=64, no inverse": Case(
        "intra_chunk", "gdn_fused", "intra_chunk_ring", _INTRA | {"intra_ring": 3}, 192, 64,
        more={"return_inverse": False},
    ),
    "gdn_scan": Case("scan", "gdn_fused", "scan", {"scan": "gluon"}, 320),
    "gdn_scan, K=64, no states": Case(
        "scan", "gdn_fused", "scan", {"scan": "gluon"}, 320, 64, dtype=FP16, without=("h0",),
        more={"output_final_state": False},
    ),
    "gdn_fwd": Case("chunk_fwd", "gdn_fused", "chunk_fwd", {"chunk_fwd": "one"}, 320),
    "gdn_fwd, nothing kept": Case(
        "chunk_fwd", "gdn_fused", "chunk_fwd", {"chunk_fwd": "one"}, 320, more={"keep": False}
    ),
    "gdn_fwd, V=64, no states": Case(
        "chunk_fwd", "gdn_fused", "chunk_fwd", {"chunk_fwd": "one"}, 320, 64, 64,
        without=("h0",), more={"output_final_state": False, "keep": False},
    ),
    "gdn_fwd, V=64": Case("chunk_fwd", "gdn_fused", "chunk_fwd", {"chunk_fwd": "one"}, 320, 64, 64),
    "gdn_fwd, where heads cancel": Case(
        "chunk_fwd", "gdn_fused", "chunk_fwd", {"chunk_fwd": "one"}, dtype=torch.float32,
        kinds={"own": True}, change=one_alike, by=check_found, more={"cancelling": True},
    ),
    "gdn_fwd, where heads cancel, nothing kept": Case(
        "chunk_fwd", "gdn_fused", "chunk_fwd", {"chunk_fwd": "one"}, 192, 64, 64,
        dtype=torch.float32, kinds={"own": True}, change=one_alike, by=check_found,
        more={"cancelling": True, "keep": False},
    ),
    "gdn_fwd, either bound": Case(
        "chunk_fwd", "gdn_fused", "chunk_fwd", {"chunk_fwd": "one"}, 128, dtype=torch.float32,
        kinds={"own": True}, change=either_bound, by=check_both, more={"cancelling": True},
    ),
    "gdn_scans, forth": Case("scan_states", "gdn_fused", "scan_states", _SCANS, 320),
    "gdn_scans, back": Case("scan_bwd", "gdn_fused", "scan_bwd", _SCANS, 320),
    "gdn_scans, both": Case("scans", "gdn_fused", "scans", _SCANS | _BOTH, dtype=FP16),
    "gdn_scans, no states": Case(
        "scans", "gdn_fused", "scan_states scan_bwd", _SCANS | _EACH, without=ENDS
    ),
    "gdn_intra_bwd": Case(
        "intra_chunk_bwd", "gdn_fused", "intra_chunk_bwd", {"intra_chunk_bwd": "gluon"}
    ),
    "gdn_intra_bwd, fp16": Case(
        "intra_chunk_bwd", "gdn_fused", "intra_chunk_bwd", {"intra_chunk_bwd": "gluon"}, dtype=FP16
    ),
    "gdn_intra_bwd, K=64": Case(
        "intra_chunk_bwd", "gdn_fused", "intra_chunk_bwd", {"intra_chunk_bwd": "gluon"}, 192, 64, 64
    ),
    "gdn_intra_bwd, K=64, a key head each": Case(
        "intra_chunk_bwd", "gdn_fused", "intra_chunk_bwd", {"intra_chunk_bwd": "gluon"}, 192,
        64, 64, kinds={"own": True},
    ),
    "gdn_intra_bwd, halves": Case(
        "intra_chunk_bwd", "gdn_fused", "intra_chunk_bwd", {"intra_chunk_bwd": "gluon"},
        dtype=torch.float32, change=in_halves, more=lambda r: {"low": r.low},
    ),
    "gdn_intra_bwd, halves, a key head each": Case(
        "intra_chunk_bwd", "gdn_fused", "intra_chunk_bwd", {"intra_chunk_bwd": "gluon"},
        dtype=torch.float32, kinds={"own": True}, change=in_halves, more=lambda r: {"low": r.low},
    ),
    "gdn_bwd": Case(
        "chunk_bwd", "gdn_fused", "scan_states scan_intra_bwd",
        _SCANS | {"scan_intra_bwd": "one"}, 320, kinds={"own": True},
    ),
    "gdn_bwd, some cancel": Case(
        "chunk_bwd", "gdn_fused", "scan_states scan_intra_bwd intra_chunk_bwd",
        _SCANS | {"scan_intra_bwd": "one", "intra_chunk_bwd": "gluon"}, dtype=torch.float32,
        kinds={"own": True}, change=some_cancel, more=lambda r: r.more,
    ),
    "gdn_bwd, some cancel, two by two": Case(
        "chunk_bwd", "gdn_fused", "scans intra_chunk_bwd intra_chunk_bwd",
        _SCANS | _BOTH | {"scan_intra_bwd": "two", "intra_chunk_bwd": "gluon"}, 128,
        dtype=torch.float32, kinds={"own": True}, change=some_cancel, more=lambda r: r.more,
    ),
    "gdn_bwd, a head at a time": Case(
        "chunk_bwd", "gdn_fused", "scan_states scan_intra_bwd scan_states scan_intra_bwd",
        _SCANS | {"scan_intra_bwd": "one", "head_groups": 2}, 128, kinds={"own": True},
    ),
    "gdn_bwd, no states": Case(
        "chunk_bwd", "gdn_fused", "scan_states scan_intra_bwd",
        _SCANS | {"scan_intra_bwd": "one"}, 64, dtype=FP16, kinds={"own": True}, without=ENDS,
    ),
    "ssd_bwd": Case(
        "ssd_bwd_dx", "ssd_fused", "ssd_bwd_dx", _SSD, 256, HEAD, 64, C=128,
        between=((5, 1), "all"), without=("seq_idx",),
    ),
    "ssd_bwd, parts of a group, no D": Case(
        "ssd_bwd_dx", "ssd_fused", "ssd_bwd_dx", _SSD | {"SSD_MANY": 2}, 128, HEAD, 64,
        dtype=FP16, C=128, between=((6, 2), "none"),
    ),
    "ssd_bwd, tokens apart": Case(
        "ssd_bwd_dx", "ssd_fused", "ssd_bwd_dx", _SSD, 128, HEAD, 64, C=128,
        between=((4, 2), "all"), without=("seq_idx",), change=tokens_apart,
    ),
    "ssd_states": Case(
        "ssd_states", "ssd_fused", "ssd_states", _STATES, 384, HEAD, 64, C=128,
        between=((4, 2), "all"), without=("seq_idx",),
    ),
    "ssd_states, in pieces": Case(
        "ssd_states", "ssd_fused", "ssd_states", _STATES | {"SSD_PIECE": 128}, 384, HEAD, 64,
        dtype=FP16, C=128, between=((4, 1), "none"),
    ),
    "ssd_states, tokens apart": Case(
        "ssd_states", "ssd_fused", "ssd_states", _STATES, 256, HEAD, 64, C=128,
        between=((4, 2), "all"), without=("seq_idx",), change=tokens_apart,
    ),
    "ssd_states, back": Case(
        "ssd_states_bwd", "ssd_fused", "ssd_states", _STATES, 256, HEAD, 64, C=128,
        between=((4, 2), "all"), without=("seq_idx",),
    ),
    "ssd_states, back in pieces": Case(
        "ssd_states_bwd", "ssd_fused", "ssd_states", _STATES | {"SSD_PIECE": 128}, 384, HEAD, 64,
        dtype=FP16, C=128, between=((4, 1), "none"),
    ),
    "ssd_bwd_dc": Case(
        "ssd_bwd_dc", "ssd_fused", "ssd_bwd_dc", _SSD_DC, 256, HEAD, 64, C=128,
        between=((9, 1), "all"), without=("seq_idx",),
    ),
    "ssd_bwd_dc, parts of a group": Case(
        "ssd_bwd_dc", "ssd_fused", "ssd_bwd_dc", _SSD_DC | {"SSD_MANY": 2}, 128, HEAD, 64,
        dtype=FP16, C=128, between=((6, 2), "none"),
    ),
    "ssd_fwd": Case(
        "ssd_fwd", "ssd_fused", "ssd_fwd", {"ssd_fwd": "gluon"}, 256, HEAD, 64, C=128,
        between=((4, 2), "channels"), without=("seq_idx", "z"), more={"output_final_state": True},
    ),
    "ssd_fwd, in pieces": Case(
        "ssd_fwd", "ssd_fused", "ssd_fwd", {"ssd_fwd": "gluon", "SSD_PIECE": 128}, 384, HEAD, 64,
        dtype=FP16, between=((4, 1), "none"), without=("seq_idx", "z"),
        more={"output_final_state": True},
    ),
    "ssd_fwd, tokens apart": Case(
        "ssd_fwd", "ssd_fused", "ssd_fwd", {"ssd_fwd": "gluon"}, 256, HEAD, 64, C=128,
        between=((4, 2), "none"), without=("z",), more={"output_final_state": True},
        change=tokens_apart,
    ),
    "ssd_fwd, no states": Case(
        "ssd_fwd", "ssd_fused", "ssd_fwd", {"ssd_fwd": "gluon"}, 192, HEAD, 64,
        between=((2, 1), "all"), without=("seq_idx", "z", "h0"), more={"output_final_state": False},
    ),
    "kda_intra": Case(
        "kda_gate_prepare", "kda_fused", "kda_prepare", {"kda_gate_prepare": "gluon"}, 150,
        kinds={"g": far_rows(150)},
    ),
    "kda_intra, gates of 16 bit": Case(
        "kda_gate_prepare", "kda_fused", "kda_prepare", {"kda_gate_prepare": "gluon"}, 100,
        kinds={"g": far_rows(150)[:, :100].bfloat16()},
    ),
    "kda_intra, promised": Case(
        "kda_gate_prepare", "kda_fused", "kda_prepare", {"kda_gate_prepare": "gluon"}, 100,
        kinds={"g": torch.full((1, 100, 2, HEAD), -4.9)}, more={"safe_bound": -5.0},
    ),
    "kda_intra, gated": Case(
        "kda_gate_prepare", "gdn2_fused", "kda_prepare", {"kda_gate_prepare": "gluon"}, 150,
        kinds={"g": far_rows(150)},
    ),
    "kda_scan": Case(
        "kda_fused_scan", "kda_fused", "kda_scan", {"kda_scan": "gluon", "workers": 1}, 320,
        kinds={"g": gates(320)},
    ),
    "kda_scan, two": Case(
        "kda_fused_scan", "kda_fused", "kda_scan", {"kda_scan": "gluon", "workers": 2}, 320,
        dtype=FP16, kinds={"g": gates(320)}, without=("h0",), more={"output_final_state": False},
    ),
    "kda_scans, both": Case(
        "kda_fused_scans", "kda_fused", "kda_scans", _KDA | _BOTH | {"workers": 1}, 320,
        kinds={"g": gates(320)},
    ),
    "kda_scans, two, no states": Case(
        "kda_fused_scans", "kda_fused", "kda_scan_states kda_scan_bwd",
        _KDA | _EACH | {"workers": 2}, dtype=FP16, kinds={"g": gates(192)}, without=ENDS,
    ),
    "kda_scan, gated": Case(
        "kda_fused_scan", "gdn2_fused", "kda_scan", {"kda_scan": "gluon", "workers": 1}, 320,
        kinds={"g": gates(320)},
    ),
    "kda_scan, two, gated": Case(
        "kda_fused_scan", "gdn2_fused", "kda_scan", {"kda_scan": "gluon", "workers": 2},
        dtype=FP16, kinds={"g": gates(192)},
    ),
    "kda_scans, both, gated": Case(
        "kda_fused_scans", "gdn2_fused", "kda_scans", _KDA | _BOTH | {"workers": 1}, 320,
        kinds={"g": gates(320)},
    ),
    "kda_scans, two, gated": Case(
        "kda_fused_scans", "gdn2_fused", "kda_scan_states kda_scan_bwd",
        _KDA | _EACH | {"workers": 2}, kinds={"g": gates(192)}, without=ENDS,
    ),
    "kda_intra_bwd, summed": Case(
        "kda_intra_gate_bwd", "kda_fused", "kda_intra_bwd", {"kda_fused_intra_bwd": "gluon"},
        kinds={"H": 2, "g": shut(192)},
    ),
    "kda_intra_bwd, gated": Case(
        "kda_fused_intra_bwd", "gdn2_fused", "kda_intra_bwd", {"kda_fused_intra_bwd": "gluon"},
        kinds={"H": 2, "g": gates(192)},
    ),
    "kda_intra_bwd, halves": Case(
        "kda_fused_intra_bwd", "kda_fused", "kda_intra_bwd", {"kda_fused_intra_bwd": "gluon"},
        dtype=torch.float32, kinds={"H": 2, "g": gates(192)}, change=in_pairs, by=check_pairs,
    ),
    "kda_halves": Case(
        "kda_halves", "kda_fused", "kda_prepare kda_scan",
        {"kda_gate_prepare": "gluon", "kda_scan": "gluon", "workers": 2}, 128,
        dtype=torch.float32, kinds={"H": 2, "g": gates(128)}, change=one_alike, by=check_some,
    ),
    "kda_halves_bwd": Case(
        "kda_halves_bwd", "kda_fused", "kda_intra_bwd kda_scan_states kda_scan_bwd kda_intra_bwd",
        _KDA | _EACH | {"workers": 2, "kda_fused_intra_bwd": "gluon"}, dtype=torch.float32,
        kinds={"H": 2, "g": gates(192)}, change=some_kept, by=check_gradients,
    ),
    "kda_halves_bwd, both": Case(
        "kda_halves_bwd", "kda_fused", "kda_intra_bwd kda_scans kda_intra_bwd",
        _KDA | _BOTH | {"workers": 1, "kda_fused_intra_bwd": "gluon"}, 128, dtype=torch.float32,
        kinds={"H": 2, "g": gates(128)}, change=some_kept, by=check_gradients,
    ),
    "kda_intra_bwd": Case(
        "kda_fused_intra_bwd", "kda_fused", "kda_intra_bwd", {"kda_fused_intra_bwd": "gluon"},
        kinds={"H": 2, "g": gates(192)},
    ),
}  # fmt: skip
