"""A dict of at most so many entries that still finds most of them when asked for a few more."""

import random
import threading
from collections.abc import Callable


class Bounded(dict):
    """Beyond `limit()` entries a new one takes the place of another, chosen at random.

    Were it the oldest, who asks for limit + 1 things in turn would find none: each is forgotten
    just before its turn. At random, about one in limit / 2 is missed.
    """

    def __init__(self, limit: Callable[[], int]):
        super().__init__()
        self.limit, self._keys = limit, []
        self._draw, self._lock = random.Random(0), threading.Lock()

    def put(self, key: object, value: object) -> None:
        with self._lock:
            if key not in self:
                while len(self._keys) >= max(self.limit(), 1):
                    i = self._draw.randrange(len(self._keys))
                    self._keys[i], self._keys[-1] = self._keys[-1], self._keys[i]
                    self.pop(self._keys.pop(), None)
                self._keys.append(key)
            self[key] = value

    def clear(self) -> None:
        with self._lock:
            super().clear()
            self._keys.clear()
