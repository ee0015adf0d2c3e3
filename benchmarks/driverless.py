"""A GPU that is not there: kernels are not compiled, and launching one does nothing.

What remains of a call is the host's part: the composition, PyTorch's, Triton's front and the
launcher in Python. Tensors lie on the CPU. Not in it: the function in C that launches, CUDA's own
time, and what its allocator takes.
"""

import ctypes
from contextlib import suppress
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

HOPPER = {"major": 9, "minor": 0, "multi_processor_count": 132, "max_shared_mem": 232448}
LAUNCH = "".format  # a function in C that takes whatever a launcher hands on
SCRATCH = 0  # bytes of memory that a launch needs for itself
MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False, "is_im2col": False}


class Kernel:
    """In the place of a compiled kernel."""

    function, packed_metadata = 1, (4, 1, 0)

    def __init__(self, src, target=None, options=None, _env_vars=None):
        maps = [x for x in src.signature.values() if x.startswith("tensordesc")]
        metadata = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
        for name in ("global", "profile"):
            metadata |= {
                f"{name}_scratch_size": SCRATCH * (name == "global"),
                f"{name}_scratch_align": 1,
            }
        metadata["tensordesc_meta"] = [MAP | {"block_size": [64, 64]} for _ in maps]
        self.src, self.metadata = src, SimpleNamespace(**metadata)
        self.run = nvidia.CudaLauncher(src, self.metadata)

    def launch_metadata(self, grid, stream, *args):
        return None

    def result(self):
        return self


class Driver:
    """Of a GPU that is not there."""

    launcher_cls = staticmethod(lambda src, metadata: None)
    utils = SimpleNamespace(
        launch=LAUNCH,
        build_signature_metadata=lambda signature: b"",
        fill_tma_descriptor=lambda *about: about,
        fill_tma_descriptor_tiled=lambda *about: about,
    )
    get_current_stream = staticmethod(lambda device: 0)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


def replaced() -> list[tuple[object, str, object]]:
    """Where, under which name, what: of Triton's."""
    out = [
        (type(driver), "active", Driver()),
        (nvidia, "PyKernelArg", SimpleNamespace),
        (triton.compiler, "compile", Kernel),
    ]
    if hasattr(nvidia, "make_launcher"):  # Triton 3.6
        made = lambda **_: SimpleNamespace(launch=Driver.utils.launch)
        out += [(nvidia, "library_dirs", list), (nvidia, "compile_module_from_src", made)]
    return out


def install() -> None:
    """From here on this process computes nothing."""
    from linattn_edu.kernels.host import plan
    from linattn_edu.ops import check

    with suppress(AttributeError):  # freed memory stays here, as it does in CUDA's allocator
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0), mallopt(-1, -1), mallopt(-2, 1 << 28)
    for where in replaced():
        setattr(*where)
    properties = SimpleNamespace(shared_memory_per_block_optin=232448, **HOPPER)
    torch.cuda.get_device_properties = lambda index=None: properties
    torch.cuda.current_device = lambda: None
    torch.Tensor.is_cuda = property(lambda x: True)
    check._why_not = lambda device, dtypes: None
    plan.DEVICES.add("cpu")
