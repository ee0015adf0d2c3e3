"""Where the warps of a kernel in Gluon wait, from its machine code for Hopper.

    python tools/waits.py WORD... [--lines N]   kernels whose names have all the words

A line a loop: its instructions, those that multiply or spill, and the clocks of a turn; then the
source lines that take the most.  It is a model of one warp a scheduler: an instruction begins when
the compiler's own count says so and what it waits for is there, products run one after the other.
Of other warps, memory and mbarriers it knows nothing: a group of warps that has a multiprocessor to
itself takes up to a half longer, with others beside it about twice as long.  No GPU is needed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LINE = re.compile(
    r'//## File "([^"]+)", line (\d+)|^(\.L\w+):'
    r"|/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ +)?([^;]*?) *;\s+/\* 0x[0-9a-f]{16} \*/"
    r"\n\s+/\* 0x([0-9a-f]{16}) \*/",
    re.M,
)
BACK = re.compile(r"BRA `\((\.L\w+)\)")
GROUP = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)")
# clocks until a result is there; of what is not here OTHER
LATENCY = {"LDS": 30, "LDSM": 33, "MUFU": 24, "SHFL": 24, "SYNCS": 30}
OTHER, READ = 20, 12  # READ: until operands may be overwritten
PRODUCT, AFTER = 32, 30  # 64 x 64 x 16; after the last one of a group
UNIT = {"MUFU": 8, "LDS": 2, "STS": 2, "LDSM": 8, "STSM": 8}  # clocks that a unit is taken
HELD = {"BAR": 25, "FENCE": 20}  # until the next instruction
SCOREBOARDS = 6


class Instruction(NamedTuple):
    text: str
    place: str  # file and line
    stall: int  # clocks until the next may begin
    sets: tuple[int, int]  # scoreboards: of the result, of the operands; 7: none
    waits: int  # for these, a bit each

    @property
    def name(self) -> str:
        return self.text.split()[0].split(".")[0]


def parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of what `nvdisasm -hex -g` says, and before which of them the labels are."""
    found, labels, place = [], {}, ""
    for file, line, label, code, control in LINE.findall(text):
        if file:
            place = f"{Path(file).name}:{line}"
        elif label:
            labels[label] = len(found)
        else:
            c = int(control, 16) >> 41
            found.append(Instruction(code, place, c & 15, (c >> 5 & 7, c >> 8 & 7), c >> 11 & 63))
    return found, labels


def loops(code: list[Instruction], labels: dict[str, int]) -> Iterator[list[Instruction]]:
    """Bodies of the loops with products; what hands parts of a kernel to warps is no loop of it."""
    for n, x in enumerate(code):
        back = BACK.match(x.text)
        body = code[labels[back[1]] : n + 1] if back and labels.get(back[1], n) < n else []
        names = {y.name for y in body}
        if "HGMMA" in names and not names & {"USETMAXREG", "EXIT"}:
            yield body


def clocks(body: list[Instruction]) -> Counter:
    """Of a turn of the loop, by source line."""
    now, ready, free, product, groups = 0, [0] * SCOREBOARDS, Counter(), 0, []
    for _ in range(2):  # the second turn waits for what the first one began
        taken = Counter()
        for x in body:
            begun = now
            now = max([now, *(t for i, t in enumerate(ready) if x.waits >> i & 1)])
            if x.name in UNIT:
                now = max(now, free[x.name[:3]])
                free[x.name[:3]] = now + UNIT[x.name]
            if x.name == "HGMMA":
                product = max(now, product) + PRODUCT
                groups += [product + AFTER] * ("gsb0" in x.text)
            if waited := GROUP.match(x.text):  # all groups but so many of the last have ended
                now = max([now, *groups[: max(0, len(groups) - int(waited[1], 16))][-1:]])
            now += HELD.get(x.name, 0)
            for scoreboard, after in zip(x.sets, (LATENCY.get(x.name, OTHER), READ), strict=True):
                if scoreboard < SCOREBOARDS:
                    ready[scoreboard] = max(ready[scoreboard], now + after)
            now += max(x.stall, 1)
            taken[x.place] += now - begun
    return taken


def report(code: str, lines: int) -> Iterator[str]:
    """What is printed of a kernel's machine code."""
    for body in loops(*parsed(code)):
        names, taken = Counter(x.name for x in body), clocks(body)
        yield (
            f"  {len(body)} instructions, {names['HGMMA']} multiply, "
            f"{names['STL'] + names['LDL']} spill: {taken.total()} clocks"
        )
        yield from (f"    {n:>5}  {place}" for place, n in taken.most_common(lines))


def disassembled(cubin: bytes) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        command = [tool, "-hex", "-g", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="+", metavar="WORD", help="of a kernel's name")
    parser.add_argument("--lines", type=int, default=8, metavar="N", help="source lines of a loop")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / x) for x in ("tests/kernels", "tests", ".")]
    import triton
    from compile_gluon import forms
    from triton.backends.compiler import GPUTarget

    for form, source, options in forms():
        if all(word in form["kernel"] for word in args.words):
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            print(*(f"{name}={x}" for name, x in form.items()))
            print(*report(disassembled(compiled.asm["cubin"]), args.lines), sep="\n", flush=True)


if __name__ == "__main__":
    main()
