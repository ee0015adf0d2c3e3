"""One token of each sequence: all between a layer's first projections and its last, in one program.

Between them are views, launches and a few operations of PyTorch, whose kernels take less time than
the host does to come to them. They follow from the tensors and the attributes of the layer and of
its modules; so what `ops.repeated` does for a public function is done for them together.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from linattn_edu.layers.cache import Cache
from linattn_edu.layers.rms_norm_gated import RMSNormGated
from linattn_edu.layers.short_convolution import ShortConvolution
from linattn_edu.ops.repeated import PLAN, repeat

PLAIN = (ShortConvolution, RMSNormGated)  # modules that a program takes the place of
OWN = {*nn.Module().__dict__} - {"training"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_programs: dict = {}


def together(layer: nn.Module, given: dict[str, Tensor], cache: Cache, call: Callable) -> Tensor:
    """call(), which makes of the projections `given` what the last one takes, and reads and writes
    the cache; or a program of earlier calls.
    """
    if torch.compiler.is_compiling() or PLAN not in sys.modules or layer.impl == "reference":
        return call()
    inner = [m for n, m in layer._modules.items() if n not in given and n != layer.last]
    if "first" not in vars(type(layer)) or not all(map(_plain, inner)):
        return call()
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return call()
    ring = cache.ring and cache.ring[4:]
    key, tensors = [type(layer), len(given), ring], [*given.values()]
    for m in (layer, *inner):
        own = m.__dict__
        if own["_buffers"]:
            return call()
        key.append(tuple([x for n, x in own.items() if n not in OWN]))
        for name, x in own["_parameters"].items():
            if x is not None:
                key.append(name)
                tensors.append(x)
    try:
        hash(tuple(key))
    except TypeError:  # an attribute of somebody's
        return call()
    memory = cache.memory
    writes = lambda: [False] * len(tensors[: -len(memory)]) + [True] * len(memory)
    tensors += memory
    return repeat(_programs, key, tensors, writes, call)


def _plain(module: nn.Module) -> bool:
    """Whether a call of a module is its forward pass, as it is written here, and nothing else."""
    own = module.__dict__
    others = "forward" in own or "_compiled_call_impl" in own or any(own[n] for n in HOOKS)
    return type(module) in PLAIN and not others
