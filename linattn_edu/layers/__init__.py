"""Layers of PyTorch: what stands between the hidden states of a model and the operators."""

from linattn_edu.layers.cache import Cache
from linattn_edu.layers.ema import EMA
from linattn_edu.layers.gated_deltanet import GatedDeltaNet
from linattn_edu.layers.gdn2 import GatedDeltaNet2
from linattn_edu.layers.kda import KimiDeltaAttention
from linattn_edu.layers.layer import Layer
from linattn_edu.layers.mamba2 import Mamba2
from linattn_edu.layers.rms_norm_gated import RMSNormGated
from linattn_edu.layers.rwkv7 import RWKV7
from linattn_edu.layers.short_convolution import ShortConvolution
from linattn_edu.layers.step import Step

__all__ = [
    "EMA",
    "RWKV7",
    "Cache",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "KimiDeltaAttention",
    "Layer",
    "Mamba2",
    "RMSNormGated",
    "ShortConvolution",
    "Step",
]
