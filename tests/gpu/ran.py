"""What was run on which GPU with which versions: ran.json, which the page "What is tested" shows.

`make gpu-test` names the file in LINATTN_EDU_RAN; a run of fewer tests names them in its record.
"""

import datetime
import json
from pathlib import Path

import torch

FILE = Path(__file__).with_name("ran.json")
KEY = "gpu", "torch", "triton", "ptxas", "tests"


def read(file: Path = FILE) -> list[dict]:
    """The records, in the order of the file."""
    return json.loads(file.read_text()) if file.exists() else []


def record(tests: list[str], counts: dict[str, int], cut: bool = False) -> dict:
    """What this process can say of a run of these tests; cut: some were not reached."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = torch.cuda.get_device_capability()
    names = {"chapters" if name.endswith(".ipynb") else name for name in tests}
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ptxas": get_ptxas(10 * major + minor).version,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "tests": " ".join(sorted(names)),
        **{name: counts.get(name, 0) for name in ("passed", "failed", "error", "skipped")},
        "cut": cut,
    }


def add(new: dict, file: Path = FILE) -> None:
    """Write a record in the place of an older one of the same GPU, versions and tests."""
    kept = [old for old in read(file) if any(old[n] != new[n] for n in KEY)]
    rows = sorted([*kept, new], key=lambda r: [r[n] for n in KEY])
    file.write_text(json.dumps(rows, indent=1) + "\n")
