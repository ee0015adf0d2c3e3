"""Which shared memory a compiled program reads and writes, from its machine code.

ptxas can give a wrong address to right PTX: with 12.9 one program writes beyond its shared memory
(Triton 3.9's output_bwd for 33 keys and 24 values in float32). A pointer into shared memory depends
on the thread alone, as a rule. So the integers are computed here for all threads of a block, from
the first instruction to the last, of a loop once. A value from memory or an argument is unknown,
and so is what a predicate may have left as it was, or what two ways to a place make differently.
"""

import re
from collections.abc import Iterator

import numpy as np

SYSTEM = 0x400  # bytes of shared memory before a program's own, from capability 9.0 on
WORD = 0xFFFFFFFF
LINE = re.compile(
    r"^(\.L\w+):|/\*[0-9a-f]{4,5}\*/\s+(@!?U?P\w+ +)?([A-Z][\w.]*)(?: ([^;]*?))? *;", re.M
)
LABEL = re.compile(r"\.L\w+")
REGISTER, PREDICATE = re.compile(r"U?R\d+"), re.compile(r"!?U?P[RT\d]")
PLACE = re.compile(r"\[(R\d+|RZ)?\+?(UR\d+)?\+?(-?0x[0-9a-f]+)?\]")
# bytes of a thread; 0: the name says
SHARED = {"LDS": 0, "STS": 0, "LDGSTS": 0, "LDSM": 16, "STSM": 16}
NOTHING = ("ST", "BAR", "WARP", "ISETP", "FSETP", "UISETP", "PLOP3", "R2P")  # of registers
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # of what is not 4
THREADS = {"SR_TID.X": np.arange, "SR_CgaCtaId": np.zeros}


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Bit by bit the entry of a truth table of three inputs."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def prmt(a: np.ndarray, chosen: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Four bytes of two words; the eighth bit of a choice repeats the byte's sign."""
    both, result = b << 32 | a, np.zeros_like(a)
    for i in range(4):
        place = int(chosen[0]) >> 4 * i & 15
        byte = both >> 8 * (place & 7) & 255
        result |= (np.where(byte >> 7, 255, 0) if place & 8 else byte) << 8 * i
    return result


def sgxt(a: np.ndarray, bits: np.ndarray, signed: bool) -> np.ndarray:
    """The last bits of a number; signed: the first of them repeated."""
    low = a & (1 << bits) - 1
    return np.where(signed & (low >> bits - 1), low - (1 << bits), low)


def shf(a: np.ndarray, n: np.ndarray, b: np.ndarray, kinds: list[str]) -> np.ndarray | None:
    """A shift of one word, or None of two: the high one is b, the low one a."""
    high, wide = "HI" in kinds, {"U64", "S64"} & {*kinds}
    if "L" in kinds:
        return None if high or wide else a << n
    if wide or (a if high else b).any():
        return None
    x = b if high else a
    return (x ^ 1 << 31) - (1 << 31) >> n if "S32" in kinds else x >> n


def computed(op: str, kinds: list[str], x: list[np.ndarray]) -> np.ndarray | None:
    """What an instruction on integers makes of its operands; None: it is none that is known."""
    match op.removeprefix("U"), len(x):
        case "MOV", _:
            return x[0]
        case "VIADD", 2:
            return x[0] + x[1]
        case "IADD3", 3 if not kinds:
            return x[0] + x[1] + x[2]
        case "IMAD", 3 if not {"WIDE", "HI", "X"} & {*kinds}:
            return x[0] * x[1] + x[2]
        case "LEA", 3 if not kinds:
            return (x[0] << x[2]) + x[1]
        case "LEA", 4 if kinds == ["HI"]:
            return (x[0] >> 32 - x[3]) + x[1]
        case "LOP3", 4:
            return lop3(*x[:3], int(x[3][0]))
        case "SHF", 3:
            return shf(*x, kinds)
        case "SGXT", 2:
            return sgxt(*x, "U32" not in kinds)
        case "PRMT", 3:
            return prmt(*x)
    return None


class Threads:
    """What all threads of a block have in their registers and, by its place, in their stacks."""

    def __init__(self, count: int):
        self.count, self.known = count, {}
        self.waiting = {}  # label -> what is known on every way that has branched there

    def number(self, text: str) -> np.ndarray | None:
        """An operand, or None: it is not known."""
        name = text.removesuffix(".reuse").lstrip("-~")
        if name in ("RZ", "URZ"):
            value = np.zeros(self.count, np.int64)
        elif re.fullmatch(r"0x[0-9a-f]+|\d+", name):
            value = np.full(self.count, int(name, 0))
        else:
            value = self.known.get(name)
        if value is None:
            return None
        return {"-": -value, "~": ~value}.get(text[0], value) & WORD

    def put(self, name: str, value: np.ndarray | None, n: int = 1) -> None:
        """Into a register; an unknown one into n of them."""
        if value is not None:
            self.known[name] = value & WORD
        elif REGISTER.fullmatch(name):
            kind, first = re.fullmatch(r"(U?R)(\d+)", name).groups()
            for i in range(n):
                self.known.pop(f"{kind}{int(first) + i}", None)

    def branch(self, label: str, always: bool) -> None:
        """To a label farther on; always: nothing comes here but by another label."""
        self.waiting[label] = common(self.known, self.waiting.get(label))
        if always:
            self.known = None

    def arrive(self, label: str) -> None:
        """At a label, from before it and from where a branch came."""
        self.known = common(self.known, self.waiting.pop(label, self.known)) or {}

    def place(self, text: str) -> np.ndarray | None:
        """Of an access, in shared memory."""
        found = PLACE.search(text)
        parts = [self.number(x) for x in found.groups() if x] if found else [None]
        return None if any(x is None for x in parts) else sum(parts) & WORD

    def spill(self, op: str, kinds: list[str], operands: list[str]) -> None:
        """What is written to the stack, or read from there."""
        at, n = PLACE.search(",".join(operands)), width(kinds) // 4
        first = int(at[3], 0) if at and at[3] else 0
        register = operands[0] if op == "LDL" else operands[-1]
        for i in range(n):
            one = f"R{int(register[1:]) + i}" if REGISTER.fullmatch(register) else register
            place = f"[{first + 4 * i}]"
            if op == "LDL":
                self.put(one, self.known.get(place))
            elif (value := self.number(one)) is None:
                self.known.pop(place, None)
            else:
                self.known[place] = value

    def run(self, op: str, kinds: list[str], operands: list[str], sure: bool) -> None:
        """One instruction; sure: no predicate decides about it."""
        if op in ("STL", "LDL") and sure:
            return self.spill(op, kinds, operands)
        first, *rest = [x for x in operands if not PREDICATE.fullmatch(x)] or [""]
        values = [self.number(x) for x in rest]
        result = None
        if op in ("S2R", "S2UR") and rest[0] in THREADS:
            result = THREADS[rest[0]](self.count).astype(np.int64)
        elif op == "R2UR" or all(x is not None for x in values):
            result = values[0] if op == "R2UR" else computed(op, kinds, values)
        return self.put(first, result if sure else None, registers(op, kinds))


def registers(op: str, kinds: list[str]) -> int:
    """How many an instruction writes."""
    if op == "HGMMA":  # 64x32x16: a thread of 128 has 16 of 64 x 32 sums
        return int(kinds[0].split("x")[1]) // 2
    if op in ("HMMA", "IMMA"):
        return 4
    if op == "LDSM":
        return int(kinds[-1]) if kinds[-1].isdecimal() else 1
    if op == "LDTM":
        return max((int(x[1:]) for x in kinds if re.fullmatch(r"x\d+", x)), default=1)
    if op.startswith("D") or {"WIDE", "F64"} & {*kinds} or (op == "CS2R" and "32" not in kinds):
        return 2
    return max(1, width(kinds) // 4)


def width(kinds: list[str]) -> int:
    """Bytes of one access."""
    return next((BYTES[x] for x in kinds if x in BYTES), 4)


def common(a: dict | None, b: dict | None) -> dict | None:
    """What is known in both; None: there is no way from there."""
    if a is None or b is None:
        return b if a is None else a.copy()
    return {n: x for n, x in a.items() if n in b and (x is b[n] or np.array_equal(x, b[n]))}


def accesses(text: str, threads: int) -> Iterator[tuple[str, np.ndarray | None, int]]:
    """The reads and writes of shared memory: line, address of each thread or None, and bytes."""
    block = Threads(threads)
    for line, label, sure, op, kinds, operands in parsed(text):
        if label:
            block.arrive(label)
        if label or block.known is None:
            continue
        if op in SHARED and sure:
            yield line, block.place(line), SHARED[op] or width(kinds)
        if op in ("BRA", "EXIT", "RET"):
            target = LABEL.search(operands[-1])
            block.branch(target[0] if target else "", sure and (op == "RET" or len(operands) == 1))
        elif op == "CALL":  # what is written there is not known
            body = text.partition(f"\n{operands[0].strip('`()')}:")[2].partition(" RET.")[0]
            for _, called, _, *instruction in parsed(body):
                if not called and not instruction[0].startswith(NOTHING):
                    block.run(*instruction, sure=False)
        elif not op.startswith(NOTHING) or op == "STL":
            block.run(op, kinds, operands, sure)


def parsed(text: str) -> Iterator[tuple[str, str | None, bool, str, list[str], list[str]]]:
    """Of each line itself and its label; or of an instruction whether no predicate decides about
    it, its name, what the name says beside, and its operands.
    """
    for found in LINE.finditer(text):
        label, predicate, name, rest = found.groups()
        op, *kinds = (name or "").split(".")
        yield (
            found[0],
            label,
            not predicate,
            op,
            kinds,
            [x.strip() for x in (rest or "").split(",")],
        )


def beyond(text: str, cc: int, threads: int, shared: int) -> list[str]:
    """The lines that read or write behind a program's shared memory, with their addresses."""
    end, outside = shared + (SYSTEM if cc >= 90 else 0), []
    for line, at, n in accesses(text, threads):
        if at is not None and at.max() + n > end:
            line = " ".join(line.split())
            outside.append(f"{line} {at.min():#x} to {at.max() + n:#x} of {end:#x}")
    return outside
