"""The loan to transformers: our functions as the packages that it looks for."""

import importlib.metadata
import sys
import warnings
from types import ModuleType

import torch

from linattn_edu.integrations import calls, packages
from linattn_edu.ops import check

KERNELS = "_KERNEL_MODULE_MAPPING"  # where transformers 5 before 5.15 keeps packages it has found


def enable(*, impl: str = "auto") -> None:
    """Lend the operators of this library to transformers as fla, mamba_ssm and causal_conv1d.

    Call it before a model's file is imported: a model built after it runs on our operators from
    the start, and so does remote code that imports these packages. What a file has imported it
    keeps; :func:`disable` ends the loan for files to come. A package that is installed is hidden
    meanwhile, its version too.

    :func:`~linattn_edu.integrations.transformers.use` does more: it serves the gated norms as well,
    Mamba2ForCausalLM hands boundaries of packed sequences on, a beta that olmo_hybrid has doubled
    is told to the operator, which a call of fla's function does not do, and it can be undone.

    Args:
        impl: "triton", "reference" or "auto", as in :func:`linattn_edu.chunk_gated_delta_rule`.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: fla, mamba_ssm or causal_conv1d is imported already; or transformers is older
            than 5.15, which looks for them only where CUDA is, and there is none.
        ValueError: impl is none of the three, or another than that of a loan that is not ended.

    Warns:
        UserWarning: A file of models has been imported before, and keeps the functions it has.
    """
    check.choice("impl", impl, ("auto", "triton", "reference"))
    new = _version() >= (5, 15)
    others = packages.foreign()
    if others:
        raise RuntimeError(
            f"{' and '.join(others)} must not be imported before enable(): use(model) works then"
        )
    if not new and not torch.cuda.is_available():
        raise RuntimeError(
            "transformers older than 5.15 asks for fla and mamba_ssm only where CUDA is, and there "
            "is none: use(model) works here"
        )
    before = packages.lent()
    if before is not None:
        if before.impl != impl:
            raise ValueError(f"impl must be {before.impl!r}, that of the loan, got {impl!r}")
        return
    packages.lend(impl, whole_layers=new)
    _forget()
    files = [name for name, file in list(sys.modules.items()) if _is_served(name, file)]
    if files:
        warnings.warn(
            f"{', '.join(files)} had been imported before enable(), and keep the functions they "
            f"have: use(model) serves their models",
            stacklevel=2,
        )


def disable() -> None:
    """End the loan of :func:`enable`, if there is one; files that were imported meanwhile keep it.

    fla, mamba_ssm and causal_conv1d are found again where they are installed.
    """
    packages.take_back()
    _forget()


def _version() -> tuple[int, ...]:
    """The first two numbers of the version of transformers."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("enable() needs transformers, which is not installed") from None
    return tuple(int(number) for number in version.split(".")[:2])


def _is_served(name: str, file: ModuleType | None) -> bool:
    """Whether a module is a file of transformers whose models run on functions like ours."""
    return (
        name.startswith("transformers.models.")
        and ".modeling_" in name
        and bool(calls.RECURRENCES.keys() & vars(file).keys())
    )


def _forget() -> None:
    """Make transformers ask again which packages there are."""
    answers = sys.modules.get("transformers.utils.import_utils")
    for package in ("mamba_ssm", "mamba_2_ssm", "flash_linear_attention", "causal_conv1d"):
        answer = getattr(answers, f"is_{package}_available", None)
        if hasattr(answer, "cache_clear"):
            answer.cache_clear()
    kept = getattr(sys.modules.get("transformers.integrations.hub_kernels"), KERNELS, {})
    for name, package in list(kept.items()):
        if package is None or packages.is_lent(package):
            del kept[name]
