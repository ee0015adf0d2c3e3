"""The page of helpers: its signatures are those of tiles.py, its traps are there."""

import inspect
import re

import pytest
import torch
import triton
import triton.language as tl
from book.layout import CHAPTERS, ROOT, toc

from linattn_edu.kernels import tiles
from linattn_edu.kernels.tiles import cast, dot

TEXT = (ROOT / "book" / "helpers.md").read_text()
CALLS = re.findall(r"^- `(\w+)\(([^`]*)\)`", TEXT, re.M)
MAMBA_2 = [name for name in toc() if name[:2] in ("14", "15", "16", "17", "18", "19")]


def test_the_page_has_the_helpers():
    assert len(CALLS) == 9


@pytest.mark.parametrize("name, given", CALLS)
def test_signature(name, given):
    signature = inspect.signature(getattr(tiles, name).fn)
    names = [part.split("=")[0].strip() for part in given.split(",")]
    assert names == list(signature.parameters)
    optional = [n for n, p in signature.parameters.items() if p.default is not p.empty]
    assert optional == [part.split("=")[0].strip() for part in given.split(",") if "=" in part]


@pytest.mark.parametrize("name", MAMBA_2)
def test_a_ladder_links_to_the_page(name):
    ladder = (CHAPTERS / f"{name}.md").read_text().split("## Kernel ladder")[1]
    assert "</book/helpers>" in ladder.split("\n## ")[0]


@triton.jit
def products(a_ptr, b_ptr, plain_ptr, helped_ptr, entries_ptr):
    o = tl.arange(0, 16)
    o = o[:, None] * 16 + o[None, :]
    a, b = tl.load(a_ptr + o), tl.load(b_ptr + o)
    tl.store(plain_ptr + o, tl.dot(a, b))
    tl.store(helped_ptr + o, dot(a, b))
    tl.store(entries_ptr + o, (a * b).to(tl.float32))


@triton.jit
def roundings(x_ptr, plain_ptr, helped_ptr):
    o = tl.arange(0, 1024)
    x = tl.load(x_ptr + o)
    tl.store(plain_ptr + o, x.to(tl.bfloat16))
    tl.store(helped_ptr + o, cast(x, tl.bfloat16))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="of the interpreter")
def test_traps_of_bfloat16():
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16).bfloat16()
    plain, helped, entries = torch.empty(3, 16, 16)
    products[(1,)](a, b, plain, helped, entries)
    want = a.float() @ b.float()
    error = lambda x, y: ((x - y).norm() / y.norm()).item()
    assert error(helped, want) < 1e-6 and error(plain, want) > 1e8
    assert not error(entries, a.float() * b.float()) < 1
    x = torch.randn(1024)
    plain, helped = torch.empty(2, 1024, dtype=torch.bfloat16)
    roundings[(1,)](x, plain, helped)
    assert torch.equal(helped, x.bfloat16())
    assert 0.4 < (plain != x.bfloat16()).float().mean() < 0.6
