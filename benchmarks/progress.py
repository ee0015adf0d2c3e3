"""What a command prints: a bar where there is a terminal and tqdm, lines elsewhere, errors."""

import sys
import threading
import time

EXIT_USAGE = 2


def fail(message: str) -> int:
    """Say on one line why a command cannot run; its exit code."""
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


class Progress:
    """Counts the steps of a run and prints its lines without breaking the bar."""

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.time()
        self.bar, self.lock = None, threading.Lock()
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=total, unit="step", dynamic_ncols=True)

    def at(self, text: str) -> None:
        """Say what runs now; only the bar shows it."""
        if self.bar is not None:
            self.bar.set_description(text)

    def step(self, line: str) -> None:
        """One step is done; print its line."""
        with self.lock:
            self.done += 1
            if self.bar is not None:
                self.bar.write(line)
                self.bar.update()
            else:
                elapsed = time.time() - self.start
                print(f"[{self.done:3d}/{self.total} {elapsed:4.0f} s] {line}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
