"""With which Tritons the kernels in Gluon are used. Gluon is not stable yet; this file needs none.

With a Triton newer than the last one tried they are tried too: each is compiled at its first
launch, and where that fails its place is taken by the kernel in plain Triton.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Callable
from typing import NamedTuple

import triton

from linattn_edu.choices import gluon_is_off

VERSIONS = (3, 6), (3, 9)  # the oldest and the newest Triton with which they have been run
# a launcher's name, or "" for all of them -> why it is off in this process
_off: dict[str, str] = {}


class Support(NamedTuple):
    """Whether kernels in Gluon can be used with this Triton, and why, in words."""

    usable: bool
    reason: str


def version(text: str) -> tuple[int, int]:
    """The first two numbers of a version; 0, 0 of a text that has none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


THIS = version(str(triton.__version__))  # where the book is built, there is something else
# In the OPTIONS of a launch "maxnreg" is what a thread has at the start; a warp that loads keeps 24
# of them, and the others take the rest. Beside it, of kernels that fill them: Triton 3.9 has ptxas
# 13.4 allocate by level 2, against a fault of earlier 13.x, and they spill (scan_intra_bwd 104
# bytes, not 8). This gives back the level that ptxas has by itself.
ALLOCATE = {"ptx_options": "--regAllocOptLevel=4"} if THIS == (3, 9) else {}
if ALLOCATE and (_more := triton.knobs.nvidia.ptxas_options):
    ALLOCATE["ptx_options"] += f" {_more}"


def tried() -> bool:
    """Whether the kernels have been run with this Triton, so that a failure is an error."""
    return VERSIONS[0] <= THIS <= VERSIONS[1]


def available(launcher: str = "") -> Support:
    """Whether kernels in Gluon, or that of one launcher, can be used with this Triton."""
    oldest, newest = (".".join(map(str, x)) for x in VERSIONS)
    this = f"Triton {triton.__version__}"
    if VERSIONS[0] > THIS:
        return Support(False, f"off, {this}: it needs {oldest} or newer")
    if tried():
        return Support(True, f"{this}, with which they have been run")
    if "" not in _off:
        try:
            importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
            importlib.import_module("triton.experimental.gluon.nvidia.hopper")
        except Exception as error:
            left_out(error)
    for name in ("", launcher):
        if name in _off:
            return Support(False, _off[name])
    return Support(
        True,
        f"{this}, newer than {newest}, the last one with which they have been run: each is "
        "compiled at its first launch, and where that fails plain Triton takes its place",
    )


class Absent:
    """In the place of modules that cannot be imported: their launchers launch nothing."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_: gluon_is_off(_off[""])


def left_out(error: Exception) -> Absent:
    """Keep, and say once, why the kernels in Gluon cannot be imported; with a Triton that was
    tried, raise.
    """
    if tried():
        raise error
    _turn_off("", "the kernels in Gluon", error)
    return Absent()


def attempt(launch: Callable[..., None]) -> Callable[..., bool]:
    """Of a launcher of kernels in Gluon one that returns whether it launched: else its caller
    launches the kernel in plain Triton. With a Triton that was tried, a failure is raised.
    """

    @functools.wraps(launch)
    def attempted(*args: object) -> bool:
        name = launch.__name__
        if tried() or available(name).usable:
            try:
                launch(*args)
                return True
            except Exception as error:
                if tried():
                    raise
                _turn_off(name, name, error)
        return gluon_is_off(available(name).reason)

    return attempted


def _turn_off(name: str, what: str, error: Exception) -> None:
    """Keep why, and warn, once a process."""
    if name in _off:
        return
    said = " ".join(str(error).split())[:300]
    _off[name] = f"off, Triton {triton.__version__}, newer than any tried: {what}: " + (
        f"{type(error).__name__}: {said}"
    )
    warnings.warn(f"Gluon is {_off[name]}. Plain Triton takes its place: slower", stacklevel=3)
