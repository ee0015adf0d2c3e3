"""The functions of this library under the names of fla, mamba_ssm and causal_conv1d.

What a program imports from these packages while they are lent comes from here: a finder stands
first on sys.meta_path, answers for their modules and for their versions, and is taken away again.
"""

import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from linattn_edu.integrations import calls
from linattn_edu.integrations.lent import DISTRIBUTIONS, MODULES, VERSIONS


class Metadata(importlib.metadata.Distribution):
    """Name and version of a lent package."""

    def __init__(self, name: str, version: str) -> None:
        self.text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class Lender(MetaPathFinder, Loader):
    """Finds and fills the modules above."""

    def __init__(self, impl: str, whole_layers: bool) -> None:
        # whole_layers: transformers from 5.15 on, which looks a function up in the package itself
        # first, and has layers that go on one by one where the split function returns None.
        self.impl, self.whole_layers = impl, whole_layers

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        return ModuleSpec(
            name, self, origin=f"linattn_edu for {name}", is_package=_has_modules(name)
        )

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        for key, lent in MODULES[name].items():
            setattr(module, key, _with_impl(lent, self.impl))
        if name in VERSIONS:
            module.__version__ = VERSIONS[name]
        if name == "mamba_ssm" and self.whole_layers:
            module.mamba_split_conv1d_scan_combined = calls.one_by_one
        for child in MODULES:
            if child.rpartition(".")[0] == name:
                importlib.import_module(child)

    def find_distributions(self, context: Any = None) -> Iterator[Metadata]:
        name = (getattr(context, "name", None) or "").lower().replace("_", "-")
        if name in DISTRIBUTIONS:
            yield Metadata(name, VERSIONS[DISTRIBUTIONS[name]])


@functools.cache
def _with_impl(lent: Any, impl: str) -> Any:
    """What is lent, on this impl where it has one: the same for every module that has it."""
    if impl == "auto" or "impl" not in inspect.signature(lent).parameters:
        return lent
    if not isinstance(lent, type):
        return functools.partial(lent, impl=impl)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        lent.__init__(self, *args, **{"impl": impl} | kwargs)

    return type(lent.__name__, (lent,), {"__init__": __init__, "__doc__": lent.__doc__})


def _has_modules(name: str) -> bool:
    return any(child.startswith(name + ".") for child in MODULES)


def lent() -> Lender | None:
    """The finder at work, or None."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Lender)), None)


def is_lent(module: ModuleType | None) -> bool:
    """Whether a module is one that a finder has filled."""
    return isinstance(getattr(module, "__loader__", None), Lender)


def foreign() -> list[str]:
    """The packages of others under these names that are imported."""
    modules = ((name, sys.modules.get(name)) for name in VERSIONS)
    return [name for name, module in modules if module is not None and not is_lent(module)]


def lend(impl: str, whole_layers: bool) -> None:
    """Put the finder first."""
    sys.meta_path.insert(0, Lender(impl, whole_layers))


def take_back() -> None:
    """Remove the finder, and the modules that it has filled."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Lender)]
    for name in MODULES:
        if is_lent(sys.modules.get(name)):
            del sys.modules[name]
