"""What the small models are trained on: windows of a text, by default that of Python's help."""

import importlib
import random
import re
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10  # one part in so many of a text is for validation


def text(path: str | Path | None = None) -> bytes:
    """The bytes of a file, or of the help that Python ships.

    Without a path: the topics of ``help()``, ``pydoc_data/topics.py`` of the standard library. They
    are the Python language reference, written by the Python Software Foundation under the PSF
    License Version 2, which comes with every Python; nothing of them is in this repository. A
    paragraph that stands under several topics is taken once. What is left is 370 KB of English for
    Python 3.11, a little more or less for others.

    Raises:
        ValueError: the file cannot be read, or this Python was installed without its help.
    """
    if path is not None:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"text must be a file that can be read, got {path}: {error}") from None
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise ValueError(
            "this Python has no pydoc_data.topics, the text of help(): some distributions leave it "
            "out; give a file of English as text"
        ) from None
    paragraphs = (
        p.strip("\n") for name in sorted(topics) for p in re.split(r"\n{2,}", topics[name])
    )
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def generator(seed: int, step: int) -> torch.Generator:
    """The random numbers of a step: a resumed run draws them again without the steps before."""
    # a generator keeps 32 bits of its seed: the two numbers are hashed into them
    return torch.Generator().manual_seed(random.Random(f"{seed} {step}").getrandbits(32))


class Windows:
    """Windows of a text as a byte-level task; the end of the text is held out.

    Args:
        text: At least 10 (length + 1) bytes.  length: Tokens of a window.
    """

    def __init__(self, text: bytes, length: int):
        if len(text) < HELD_OUT * (length + 1):
            raise ValueError(
                f"text must have at least {HELD_OUT * (length + 1)} bytes for windows of {length} "
                f"tokens, got {len(text)}"
            )
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = len(tokens) - len(tokens) // HELD_OUT
        self.train, self.held_out, self.length = tokens[:cut], tokens[cut:], length

    def batch(self, size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[size, length]`` of a step; they follow from seed and step alone."""
        draw = generator(seed, step)
        starts = torch.randint(len(self.train) - self.length, (size,), generator=draw)
        return self._at(self.train, starts)

    def validation(self, size: int) -> tuple[Tensor, Tensor]:
        """Up to size windows of the held-out end, evenly spread, always the same."""
        room = len(self.held_out) - self.length
        return self._at(self.held_out, torch.linspace(0, room - 1, min(size, room)).long())

    def _at(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = tokens[starts[:, None] + torch.arange(self.length + 1)].long()
        return windows[:, :-1], windows[:, 1:]
