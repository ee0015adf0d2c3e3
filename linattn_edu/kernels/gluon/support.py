"""With which Tritons the kernels in Gluon are used. Gluon is not stable yet; this file needs none.

With a Triton newer than the last one tried they are tried too: each is compiled at its first
launch, and where that fails its place is taken by the kernel in plain Triton.
"""

import re
import warnings
from collections.abc import Callable
from typing import NamedTuple

import triton

VERSIONS = (3, 6), (3, 9)  # the oldest and the newest Triton with which they have been run
# a launcher's name, or "" for all of them -> why it is off in this process
_off: dict[str, str] = {}


class Support(NamedTuple):
    """Whether kernels in Gluon can be used with this Triton, and why, in words."""

    usable: bool
    reason: str


def version(text: str = triton.__version__) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = re.match(r"(\d+)\.(\d+)", text).groups()
    return int(major), int(minor)


def tried() -> bool:
    """Whether the kernels have been run with this Triton, so that a failure is an error."""
    return VERSIONS[0] <= version() <= VERSIONS[1]


def available(launcher: str = "") -> Support:
    """Whether kernels in Gluon, or that of one launcher, can be used with this Triton."""
    oldest, newest = (".".join(map(str, x)) for x in VERSIONS)
    if version() < VERSIONS[0]:
        return Support(False, f"Gluon is off with Triton {triton.__version__}: it needs {oldest}")
    for name in ("", launcher):
        if name in _off:
            return Support(False, _off[name])
    if tried():
        return Support(True, f"the kernels in Gluon have been run with Triton {version_text()}")
    return Support(
        True,
        f"Triton {triton.__version__} is newer than {newest}, the last one with which the kernels "
        "in Gluon have been run: each is compiled at its first launch, and where that fails plain "
        "Triton takes its place",
    )


def version_text() -> str:
    """This Triton's first two numbers."""
    return ".".join(map(str, version()))


def left_out(error: Exception) -> None:
    """Keep, and say once, why the kernels in Gluon cannot be imported; with a Triton that was
    tried, raise.
    """
    if tried():
        raise error
    _turn_off("", "The kernels in Gluon are off", error)


def attempt(launch: Callable[..., None], *args: object) -> bool:
    """launch(*args), the launch of a kernel in Gluon. Returns whether that was done: else the
    caller launches the kernel in plain Triton. With a Triton that was tried, a failure is raised.
    """
    if tried():
        launch(*args)
        return True
    if not available(launch.__name__).usable:
        return False
    try:
        launch(*args)
    except Exception as error:
        _turn_off(launch.__name__, f"{launch.__name__} is off", error)
        return False
    return True


def _turn_off(name: str, what: str, error: Exception) -> None:
    """Keep why, and warn, once a process."""
    said = " ".join(str(error).split())[:300]
    why = (
        f"{what} with Triton {triton.__version__}, which is newer than any that was tried: "
        f"{type(error).__name__}: {said}"
    )
    if name not in _off:
        _off[name] = why
        warnings.warn(f"{why}. Plain Triton takes its place: slower", stacklevel=3)
