"""The next token of each sequence, again and again, without the host's part of a call."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linattn_edu.layers.cache import Cache
from linattn_edu.ops import inplace

WARM = 3  # calls before the capture: they compile kernels and find their programs


class Step:
    """``module(x, cache=cache)`` for the next token of each sequence, replayed from a CUDA graph.

    A token's kernels take less time than the host takes to launch them one by one; a graph is one
    launch. The first call, and one after the states, parameters or modules became others, captures:
    it runs the module some times and gives the states back their numbers in between. Elsewhere than
    on a GPU, with a cache of attention, which grows, and where a call cannot be captured, the
    module is called each time, with the same bits. With a cache that is made for guesses the calls
    may have one token and as many guesses; a call of another number of tokens captures anew.

    Args:
        module: A layer or :class:`LanguageModel`. What is written to its parameters is seen, and so
            are other parameters and modules in their place; for other options make another step.
        cache: Of its ``make_cache``; calls of the module itself may come between those of the step.

    Attributes:
        reason: Why the last call was no replay of a graph, in words; None: it was.

    Source: chapter 26.
    """

    def __init__(self, module: nn.Module, cache: Cache | Sequence[Cache]):
        self.module, self.cache = module, cache
        self.reason: str | None = "there was no call"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: tuple | None = None  # states and kind of the input of the graph, or tried
        self._parts: list[tuple] = []  # of the module, when it was captured: where they are kept

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """What the module gives for x, ``[N, T, ...]``, in a new tensor; no gradient is recorded.

        T is 1, or with guesses in the cache 1 to 1 + guesses.

        Raises:
            TypeError, ValueError: as the module; the states are as before then.
        """
        caches = [self.cache] if isinstance(self.cache, Cache) else self.cache
        if why := _why_not(x, caches):
            self.reason = why
            return self.module(x, cache=self.cache)
        for cache in caches:
            cache.own()
        states = [state for cache in caches for state in cache.memory]
        kind = (*map(id, states), x.shape, x.dtype, x.device, _autocast(x))
        if kind != self._captured or not all(map(_there, self._parts)):
            self._graph, self._captured, self._parts = None, None, _parts(self.module)
            self._states = states  # whose numbers tell them apart while they are held
            self._capture(x, states)
            self._captured = kind
        if self._graph is None:
            return self.module(x, cache=self.cache)
        self._x.copy_(x)
        self._graph.replay()
        self.reason = None
        return self._y.clone()

    def _capture(self, x: Tensor, states: list[Tensor]) -> None:
        """Capture a call, where that can be; the states have the same numbers after it."""
        kept = [state.clone() for state in states]
        try:
            self._run(x)
        finally:
            for state, before in zip(states, kept, strict=True):
                with inplace.writable(state):
                    state.copy_(before)

    def _run(self, x: Tensor) -> None:
        self._x = x.clone()
        self.module(self._x, cache=self.cache)  # refuses what does not fit
        stream, cached = torch.cuda.Stream(), torch.is_autocast_cache_enabled()
        stream.wait_stream(torch.cuda.current_stream())
        torch.set_autocast_cache_enabled(False)  # a cast that is kept would be of the graph's pool
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM):
                    self.module(self._x, cache=self.cache)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._y = self.module(self._x, cache=self.cache)
            self._graph = graph
        except RuntimeError as error:  # something waits for the device, or moves parameters to it
            torch.cuda.synchronize()
            self.reason = f"a call cannot be captured: {error}"
        finally:
            torch.set_autocast_cache_enabled(cached)


def _why_not(x: object, caches: Sequence) -> str | None:
    """Why a call cannot be a replay, or None."""
    if not isinstance(x, Tensor) or not x.is_cuda:
        return f"there are graphs on a GPU alone, and x is on {getattr(x, 'device', None)}"
    if not all(isinstance(cache, Cache) for cache in caches):
        return "a cache of attention grows with each token"
    return "another graph is captured" if torch.cuda.is_current_stream_capturing() else None


def _parts(module: nn.Module) -> list[tuple]:
    """Where each module and parameter inside is kept, under which name, it, and its address."""
    return [
        (kept, name, x, x.data_ptr() if type(x) in (Tensor, nn.Parameter) else None)
        for m in module.modules()
        for kept in (m._modules, m._parameters, m._buffers)
        for name, x in kept.items()
    ]


def _there(part: tuple) -> bool:
    kept, name, x, address = part
    return kept.get(name) is x and (address is None or x.data_ptr() == address)


def _autocast(x: Tensor) -> torch.dtype | None:
    on = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else None
