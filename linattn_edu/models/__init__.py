"""Models of the layers."""

from linattn_edu.models.attention import Attention, KeyValueCache
from linattn_edu.models.language_model import MIXERS, Block, Config, GatedMLP, LanguageModel

__all__ = [
    "MIXERS",
    "Attention",
    "Block",
    "Config",
    "GatedMLP",
    "KeyValueCache",
    "LanguageModel",
]
