"""What the machine code of a program says of its shared memory, on pieces of code."""

import numpy as np
import pytest
from kernels import sass

THREAD = "S2R R0, SR_TID.X"
PIECES = {
    "MOV R1, 0x10": lambda t: 16 + 0 * t,
    "IMAD.MOV.U32 R1, RZ, RZ, R0": lambda t: t,
    "IMAD.SHL.U32 R1, R0.reuse, 0x10, RZ": lambda t: 16 * t,
    "IMAD R1, R0, 0x41, R0": lambda t: 66 * t,
    "IMAD.IADD R1, R0, 0x1, -R0": lambda t: 0 * t,
    "VIADD R1, R0, 0xfffffff0": lambda t: t - 16 + (t < 16) * 2**32,
    "IADD3 R1, P0, R0, 0x3, R0": lambda t: 2 * t + 3,
    "LEA R1, R0, R0, 0x4": lambda t: 17 * t,
    "LEA.HI R1, R0, R0, RZ, 0x1e": lambda t: t + t // 4,
    "LOP3.LUT R1, R0, 0x60, RZ, 0xc0, !PT": lambda t: t & 0x60,
    "LOP3.LUT P0, R1, R0, 0x8, RZ, 0xfc, !PT": lambda t: t | 8,
    "LOP3.LUT R1, R0, 0x70, 0x18, 0x78, !PT": lambda t: t ^ 0x70 & 0x18,
    "LOP3.LUT R1, R0, 0x30, 0x3, 0xf6, !PT": lambda t: t | 0x30 ^ 0x3,
    "SHF.R.U32.HI R1, RZ, 0x2, R0": lambda t: t >> 2,
    "SHF.L.U32 R1, R0, 0x3, RZ": lambda t: t << 3,
    "SGXT.U32 R1, R0, 0x4": lambda t: t & 15,
    "PRMT R1, R0, 0x4040, RZ": lambda t: t | t << 16,
    "VIADD R1, R0, 0xffffffc0 ; PRMT R1, R1, 0x8880, RZ": lambda t: t - 64 + 2**32,
    "UMOV UR4, 0x400 ; IMAD.U32 R1, RZ, RZ, UR4": lambda t: 0x400 + 0 * t,
    "STL [R1+0x8], R0 ; MOV R0, RZ ; LDL.LU R1, [R1+0x8]": lambda t: t,
    "IMAD.WIDE.U32 R0, R0, 0x4, RZ ; MOV R1, 0x8": lambda t: 8 + 0 * t,
}
UNKNOWN = [
    "LDG.E R1, desc[UR4][R2.64]",
    "MOV R1, RZ ; LDG.E.128 R0, desc[UR4][R4.64]",
    "MOV R1, RZ ; @P0 MOV R1, 0x10",
    "MOV R1, RZ ; HGMMA.64x32x16.F32.BF16 R0, gdesc[UR4], R0",
    "MOV R1, RZ ; HMMA.16816.F32.BF16 R0, R4, R8, R12",
    "MOV R1, RZ ; LDSM.16.M88.4 R0, [RZ]",
    "MOV R1, RZ ; CS2R R0, SRZ",
    "MOV R1, RZ ; DADD R0, R4, R6",
    "IADD3.X R1, R0, RZ, RZ, P0, !PT",
    "SHF.R.U64 R1, R0, 0x2, R0",
    "SHF.L.U64.HI R1, R0, 0x2, RZ",
    "IMAD.WIDE.U32 R0, R0, 0x4, RZ",
    "LDS R1, [RZ]",
    "S2R R1, SR_CTAID.X",
    "STL [R1], R5 ; LDL R1, [R1]",
]


def program(code: str) -> str:
    lines = [x.strip() for x in f"{THREAD} ; {code} ; STS [R1], RZ ; EXIT".split(" ; ")]
    place = "        /*{:04x}*/                   {} ;"
    return "\n".join(x if x[-1] == ":" else place.format(i, x) for i, x in enumerate(lines))


def address(code: str, threads: int = 64) -> np.ndarray | None:
    """Of the last access to shared memory."""
    *_, (_, at, n) = sass.accesses(program(code), threads)
    assert n == 4
    return at


@pytest.mark.parametrize("code", PIECES)
def test_integers(code):
    assert np.array_equal(address(code), PIECES[code](np.arange(64)))


@pytest.mark.parametrize("code", UNKNOWN)
def test_unknown(code):
    assert address(code) is None


@pytest.mark.parametrize("other", ["0x10", "0x20"])
def test_ways_that_meet(other):
    """What both make alike is known behind them; a way that ends is none."""
    first = "@!P0 BRA `(.L_x_0) ; MOV R1, 0x10 ; BRA `(.L_x_1)"
    second = f".L_x_0: ; MOV R1, {other}"
    known = address(f"{first} ; {second} ; .L_x_1:")
    assert (known is not None) == (other == "0x10")
    assert (address(f"{first} ; {second} ; EXIT ; .L_x_1:") == 16).all()


@pytest.mark.parametrize("other", ["R1", "R2"])
def test_a_call(other):
    """What a function writes to is not known behind it."""
    begin = "MOV R1, 0x10 ; CALL.REL.NOINC `($f)"
    rest = f"STS [R1], RZ ; EXIT ; $f: ; MOV {other}, 0x8 ; RET.REL.NODEC R8 `(main)"
    (_, at, _), *_ = sass.accesses(program(f"{begin} ; {rest}"), 32)
    assert (at is None) == (other == "R1")


def test_a_loop_is_gone_through_once():
    loop = "MOV R1, 0x10 ; .L_x_0: ; STS [R1], RZ ; VIADD R1, R1, 0x4 ; @P0 BRA `(.L_x_0)"
    places = [int(at[0]) for _, at, _ in sass.accesses(program(loop), 32)]
    assert places == [16, 20]


# part of the place of 16 bytes of each thread; ptxas 12.9 took R3 when another use had it
EIGHTH, OTHER = "LOP3.LUT R3, R0, 0x8, RZ, 0xc0, !PT", "IMAD R3, R3, 0x200, R0"
RIGHT = f"{EIGHTH} ; IMAD.SHL.U32 R2, R3, 0x2, RZ ; {OTHER}"
WRONG = f"{EIGHTH} ; {OTHER} ; IMAD.SHL.U32 R2, R3, 0x2, RZ"


@pytest.mark.parametrize("cc", [80, 90])
def test_beyond(cc):
    """1024 bytes, behind 1024 of the system's on Hopper."""
    begin = f"MOV R4, {sass.SYSTEM if cc == 90 else 0:#x} ; IMAD R4, R0, 0x10, R4"
    end = "LOP3.LUT R1, R4, R2, RZ, 0x3c, !PT ; STS.128 [R1], R8"
    assert sass.beyond(program(f"{begin} ; {RIGHT} ; {end}"), cc, 64, 1024) == []
    first, *_ = sass.beyond(program(f"{begin} ; {WRONG} ; {end}"), cc, 64, 1024)
    assert first.startswith("/*") and "STS.128 [R1], R8" in first
    assert len(sass.beyond(program(f"{begin} ; {RIGHT} ; {end}"), cc, 64, 1023)) == 1
