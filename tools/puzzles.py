"""Write puzzles/NN_stage.py from puzzles/solutions/NN_stage.py, whose lines marked ``# blank:`` are
emptied.

    python tools/puzzles.py
"""

from pathlib import Path

from linattn_edu.puzzles import blanked

PUZZLES = Path(__file__).resolve().parents[1] / "puzzles"

if __name__ == "__main__":
    for solution in sorted((PUZZLES / "solutions").glob("*.py")):
        (PUZZLES / solution.name).write_text(blanked(solution.read_text()))
