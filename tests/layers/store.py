"""What fla's and mamba_ssm's own layers give: python store.py FOLDER writes layers_DEVICE.npz.

On a GPU their kernels run. On a CPU, where these cannot, the operators inside their layers are
replaced by the PyTorch references that the two packages ship, and the convolution and the norm of
fla by those of PyTorch. Weights and inputs are drawn by NumPy and not stored; the names and shapes
of the weights are, as the layers of the two packages have them. A process for each case, and of the
many configurations that a kernel could try the smallest.
"""

import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import sys
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

# name: class, arguments, tokens of padding before the second row
CASES = {
    "gdn": (
        "GatedDeltaNet",
        {"hidden_size": 16, "head_dim": 16, "num_heads": 1, "num_v_heads": 2},
        5,
    ),
    "gdn_bare": (
        "GatedDeltaNet",
        {
            "hidden_size": 16, "head_dim": 16, "num_heads": 2, "expand_v": 1, "use_gate": False,
            "allow_neg_eigval": True, "conv_bias": True,
        },
        0,
    ),
    "kda": ("KimiDeltaAttention", {"hidden_size": 16, "head_dim": 16, "num_heads": 2}, 5),
    "kda_bound": (
        "KimiDeltaAttention",
        {
            "hidden_size": 16, "head_dim": 16, "num_heads": 1, "num_v_heads": 2, "safe_gate": True,
            "lower_bound": -5.0,
        },
        0,
    ),
    "mamba2": ("Mamba2", {"d_model": 16, "d_state": 16, "headdim": 16, "chunk_size": 32}, 0),
    "mamba2_wide": (
        "Mamba2",
        {
            "d_model": 16, "d_state": 16, "headdim": 16, "expand": 4, "ngroups": 2,
            "norm_before_gate": True, "bias": True, "D_has_hdim": True, "chunk_size": 32,
        },
        0,
    ),
    "rwkv7": (
        "RWKV7",
        {
            "hidden_size": 32, "head_dim": 16, "layer_idx": 0, "num_hidden_layers": 2,
            "norm_eps": 0.1,
        },
        0,
    ),
    "rwkv7_later": (
        "RWKV7",
        {
            "hidden_size": 16, "head_dim": 16, "layer_idx": 1, "num_hidden_layers": 2,
            "fuse_norm": False, "decay_low_rank_dim": 8,
        },
        0,
    ),
}  # fmt: skip
B, T = 2, 40
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def draw(case: str, shapes: dict[str, list[int]]) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """The weights of these names and shapes, x and dy: the same numbers wherever it is called."""
    random = np.random.RandomState(sorted(CASES).index(case))

    def normal(shape) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(tuple(shape)).astype(np.float32))

    state = {}
    for name, shape in sorted(shapes.items()):
        x = normal(shape)
        if name.endswith("dt_bias"):
            x = 0.5 * x - 2
        elif name.endswith("norm.weight"):
            x = 1 + 0.2 * x
        elif len(shape) > 1 and "conv1d" not in name:
            x = x * shape[-1] ** -0.5
        else:
            x = 0.5 * x
        state[name] = x
    width = CASES[case][1].get("hidden_size", 16)
    return state, normal((B, T, width)), normal((B, T, width))


def mask(case: str) -> torch.Tensor | None:
    """The mask of a case [B, T], or None."""
    padding = CASES[case][2]
    if not padding:
        return None
    given = torch.ones(B, T, dtype=torch.int64)
    given[1, :padding] = 0
    return given


def run(layer, case: str, call, dtype: torch.dtype, device) -> dict[str, torch.Tensor]:
    """y and the gradient of x; call(layer, x, mask) gives y."""
    state, x, dy = draw(case, {n: list(p.shape) for n, p in layer.state_dict().items()})
    layer.load_state_dict(state, strict=True)
    layer.to(device, dtype).train()
    x = x.to(device, dtype).requires_grad_()
    given = mask(case)
    y = call(layer, x, None if given is None else given.to(device))
    y.backward(dy.to(device, dtype))
    return {"y": y, "dx": x.grad}


def bits(x: torch.Tensor) -> np.ndarray:
    """The numbers, or of bfloat16, which NumPy does not have, the bits."""
    x = x.detach().cpu().contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def values(x: np.ndarray) -> torch.Tensor:
    """What bits was given."""
    x = torch.from_numpy(x)
    return x.view(torch.bfloat16) if x.dtype == torch.int16 else x


def with_one_configuration(init):
    """Autotuner.__init__ that knows of the smallest alone: the fastest does not matter here."""

    def size(config):
        return math.prod(config.kwargs.values()), config.num_stages, config.num_warps

    def one(self, fn, arg_names, configs, *args, **kwargs):
        init(self, fn, arg_names, [min(configs, key=size)], *args, **kwargs)

    return one


def of_case(case: str) -> tuple[dict[str, list[int]], dict[str, np.ndarray]]:
    """The shapes of a layer's weights, and its results by name."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, arguments, _ = CASES[case]
    if name == "KimiDeltaAttention":  # TileLang refuses values of 16 numbers
        os.environ["FLA_TILELANG"] = "0"
    cls, stored = theirs(device)[name], {}
    for dtype_name, dtype in DTYPES.items():
        layer = cls(**arguments)
        for key, x in run(layer, case, CALLS[name], dtype, device).items():
            assert x.isfinite().all(), (case, key)
            stored[f"{case}.{dtype_name}.{key}"] = bits(x)
    return {n: list(x.shape) for n, x in layer.state_dict().items()}, stored


def main(folder: str) -> None:
    with ProcessPoolExecutor(len(CASES), multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(CASES, pool.map(of_case, CASES), strict=True))
    stored = {key: x for _, results in found.values() for key, x in results.items()}
    stored["shapes"] = np.array(json.dumps({case: shapes for case, (shapes, _) in found.items()}))
    file = Path(folder) / f"layers_{'cuda' if torch.cuda.is_available() else 'cpu'}.npz"
    np.savez_compressed(file, **stored)
    print(f"{file}: {file.stat().st_size} bytes, {len(stored)} tensors")


CALLS = {
    "GatedDeltaNet": lambda layer, x, mask: layer(x, attention_mask=mask)[0],
    "KimiDeltaAttention": lambda layer, x, mask: layer(x, attention_mask=mask)[0],
    "Mamba2": lambda layer, x, mask: layer(x),
    "RWKV7": lambda layer, x, mask: layer(x, v_first=None if layer.layer_idx == 0 else x)[0],
}


def theirs(device: torch.device) -> dict[str, type]:
    """The layers of the two packages; on a CPU with the operators that can run there."""
    for name in ("selective_scan_cuda", "causal_conv1d_cuda"):  # which nothing here calls
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    from triton.runtime.autotuner import Autotuner

    Autotuner.__init__ = with_one_configuration(Autotuner.__init__)
    from fla.layers import gated_deltanet, kda, rwkv7
    from mamba_ssm.modules import mamba2

    if device.type == "cpu":
        on_cpu(gated_deltanet, kda, mamba2)
        rwkv7_on_cpu(rwkv7)
    # of its two paths, the fused one needs the package causal_conv1d
    fused = device.type == "cuda" and mamba2.causal_conv1d_fn is not None
    return {
        "GatedDeltaNet": gated_deltanet.GatedDeltaNet,
        "KimiDeltaAttention": kda.KimiDeltaAttention,
        "Mamba2": functools.partial(mamba2.Mamba2, use_mem_eff_path=fused),
        "RWKV7": rwkv7.RWKV7Attention,
    }


def on_cpu(gated_deltanet, kda, mamba2) -> None:
    """Replace what cannot run without a GPU."""
    from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda
    from mamba_ssm.ops import selective_scan_interface
    from mamba_ssm.ops.triton.layernorm_gated import rms_norm_ref
    from mamba_ssm.ops.triton.ssd_combined import ssd_selective_scan

    def pieces(cu_seqlens, *tensors):
        """The tensors of each packed sequence, or all at once."""
        bounds = [0, tensors[0].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        for a, b in itertools.pairwise(bounds):
            yield [x[:, a:b] for x in tensors]

    def convolve(x, weight, bias, cu_seqlens=None, **_):
        """silu of the convolution, weight [D, W]."""
        W = weight.shape[1]

        def one(x):
            y = F.conv1d(F.pad(x.mT, (W - 1, 0)), weight[:, None], bias, groups=len(weight))
            return F.silu(y).mT

        return torch.cat([one(y) for (y,) in pieces(cu_seqlens, x)], 1), None

    def convolution(self, x, cu_seqlens=None, **_):
        return convolve(x, self.weight[:, 0], self.bias, cu_seqlens)

    def rows(x, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def norm(self, x):
        return (rows(x.float(), self.eps) * self.weight.float()).to(x.dtype)

    def norm_gated(self, x, g):
        act = torch.sigmoid if self.activation == "sigmoid" else F.silu
        y = rows(x.float(), self.eps) * self.weight.float()
        return (y * act(g.float())).to(x.dtype)

    def delta(rule, gate, q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, cu_seqlens):
        """A naive rule with what its kernel does inside; GDN's has as many q heads as v heads."""
        g = gate(g, A_log, dt_bias)
        q, k = (F.normalize(x.float(), dim=-1, eps=1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        beta = beta.float().sigmoid() * (1 + allow_neg_eigval)
        outputs = [
            rule(q=q, k=k, v=v.float(), g=g, beta=beta)[0]
            for q, k, v, g, beta in pieces(cu_seqlens, q, k, v, g, beta)
        ]
        return torch.cat(outputs, 1).to(v.dtype), None

    def gdn_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval=False, cu_seqlens=None, **_):
        rule = naive_recurrent_gated_delta_rule, naive_gdn_gate
        return delta(*rule, q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, cu_seqlens)

    def kda_rule(
        q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval=False, lower_bound=None,
        cu_seqlens=None, **_,
    ):  # fmt: skip
        def gate(g, A_log, dt_bias):
            if lower_bound is None:
                return naive_kda_gate(g, A_log, dt_bias)
            return naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound=lower_bound)

        rule = naive_recurrent_kda
        return delta(rule, gate, q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, cu_seqlens)

    def scan(
        x, dt, A, B, C, chunk_size, seq_idx, cu_seqlens, return_final_states, return_varlen_states,
        **kw,
    ):  # fmt: skip
        return ssd_selective_scan(x, dt, A, B, C, **kw)

    def grouped(self, x, z):
        options = {"group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
        return rms_norm_ref(x, self.weight, None, z, self.eps, **options)

    selective_scan_interface.selective_scan_fn = selective_scan_interface.selective_scan_ref
    mamba2.causal_conv1d_fn, mamba2.mamba_chunk_scan_combined = None, scan
    mamba2.RMSNormGated.forward = grouped
    ShortConvolution.forward = convolution
    FusedRMSNormGated.forward, RMSNorm.forward = norm_gated, norm
    gated_deltanet.causal_conv1d = convolve
    gated_deltanet.chunk_gated_delta_rule, kda.chunk_kda = gdn_rule, kda_rule


def rwkv7_on_cpu(rwkv7) -> None:
    """The same in fla's RWKV-7."""
    from fla.modules.token_shift import token_shift_ref
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref

    def rule(r, w, k, v, a, b, **_):
        r = r * r.shape[-1] ** 0.5  # which the reference divides by
        o, _ = dplr_recurrence(*(x.transpose(1, 2) for x in (r, k, v, a, b, w)))
        return o.transpose(1, 2), None

    rwkv7.token_shift = lambda x, cu_seqlens, **_: (token_shift_ref(x, cu_seqlens), None)
    rwkv7.fused_addcmul_rwkv7, rwkv7.fused_k_rwkv7 = torch_addcmul_rwkv7, k_update_ref
    rwkv7.gate_output_correction, rwkv7.chunk_rwkv7 = gate_output_correction_ref, rule


if __name__ == "__main__":
    main(*sys.argv[1:])
