"""One token of each sequence, again and again, without the host's part of a call."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linattn_edu.layers.cache import Cache
from linattn_edu.ops import inplace

WARM = 3  # calls before the capture: they compile kernels and find their programs


class Step:
    """``module(x, cache=cache)`` for one token of each sequence, replayed from a CUDA graph.

    A token's kernels take less time than the host takes to launch them one by one; a graph is one
    launch. The first call, and one after the cache's states became others, captures: it runs the
    module some times and gives the states back their numbers in between. Elsewhere than on a GPU,
    with a cache of attention, which grows, and where a call cannot be captured, the module is
    called each time, with the same bits.

    Args:
        module: A layer or :class:`LanguageModel`, whose parameters stay where they are: those that
            are replaced and not written are not seen; make another step then.
        cache: Of its ``make_cache``; calls of the module itself may come between those of the step.

    Source: chapter 26.
    """

    def __init__(self, module: nn.Module, cache: Cache | Sequence[Cache]):
        self.module, self.cache = module, cache
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: tuple | None = None  # states and kind of the input of the graph, or tried

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """What the module gives for x, ``[N, 1, ...]``, in a new tensor; no gradient is recorded.

        Raises:
            TypeError, ValueError: as the module; the states are as before then.
        """
        caches = [self.cache] if isinstance(self.cache, Cache) else self.cache
        here = isinstance(x, Tensor) and x.is_cuda and all(isinstance(c, Cache) for c in caches)
        if not here or torch.cuda.is_current_stream_capturing():
            return self.module(x, cache=self.cache)
        for cache in caches:
            cache.own()
        states = [state for cache in caches for state in cache.memory]
        kind = (*map(id, states), x.shape, x.dtype, x.device, _autocast(x))
        if kind != self._captured:
            self._graph, self._captured = None, None
            self._states = states  # whose numbers tell them apart while they are held
            self._capture(x, states)
            self._captured = kind
        if self._graph is None:
            return self.module(x, cache=self.cache)
        self._x.copy_(x)
        self._graph.replay()
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
        except RuntimeError:  # something waits for the device, or moves parameters to it
            torch.cuda.synchronize()
        finally:
            torch.set_autocast_cache_enabled(cached)


def _autocast(x: Tensor) -> torch.dtype | None:
    on = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else None
