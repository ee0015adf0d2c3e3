"""tools/waits.py: what it reads of machine code, and the clocks that it counts."""

import os
import subprocess
import sys

import pytest
from book.layout import ROOT, tool

waits = tool("waits")
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
NONE = waits.SCOREBOARDS + 1


def line(code, stall=1, result=NONE, operands=NONE, awaited=0):
    control = (stall | result << 5 | operands << 8 | awaited << 11) << 41
    return f"  /*0010*/   {code} ;   /* 0x{0:016x} */\n     /* 0x{control:016x} */\n"


def loop(*lines, label=".L_x_1"):
    return "".join([f'{label}:\n //## File "/a/b.py", line 7\n', *lines, line(f"BRA `({label})")])


def taken(*lines):
    (body,) = waits.loops(*waits.parsed(loop(*lines)))
    return waits.clocks(body)


def test_products():
    """Two that are waited for at once take less than two that are waited for one by one."""
    apart = taken(line(PRODUCT), line(WAIT), line(PRODUCT), line(WAIT)).total()
    beside = taken(line(PRODUCT), line(PRODUCT), line(WAIT)).total()
    assert apart - beside >= waits.AFTER
    assert beside >= 2 * waits.PRODUCT + waits.AFTER
    first = taken(line(PRODUCT), line(PRODUCT), line(WAIT.replace("0x0", "0x1"))).total()
    assert first == beside - waits.PRODUCT


@pytest.mark.parametrize("name", ["LDS", "MUFU.EX2", "SHFL.BFLY"])
def test_what_is_waited_for(name):
    """Who reads a result begins when it is there; who does not, when the compiler says."""
    read, begun = line(f"{name} R1, R2", result=3), line("FADD R3, R1, R1", awaited=1 << 3)
    latency = waits.LATENCY[name.split(".")[0]]
    product = line(PRODUCT)
    assert taken(product, read, begun).total() == latency + 3
    assert taken(product, read, line("FADD R3, R4, R4", stall=5)).total() == 1 + 1 + 5 + 1


def test_lines_and_loops():
    """Clocks belong to source lines; loops without products, and those that hand out parts of a
    kernel, are none.
    """
    place, late = ' //## File "/a/c.py", line 9\n', line("FADD R1, R2, R3", stall=9)
    assert taken(line(PRODUCT), place, late) == {"b.py:7": 1, "c.py:9": 10}
    for other in (late, line(PRODUCT) + line("USETMAXREG.DEALLOC.CTAPOOL 0x50")):
        assert not [*waits.loops(*waits.parsed(loop(other)))]


def test_a_kernel():
    """Of a kernel's machine code the loop is found with all its products, and its source lines."""
    command = [sys.executable, ROOT / "tools" / "waits.py", "ssd_states", "--lines", "3"]
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    first, body, *lines = result.stdout.splitlines()[:5]
    assert first.startswith("kernel=ssd_states_gluon_kernel") and ", 8 multiply, " in body
    assert any("ssd_states.py:" in x for x in lines)
