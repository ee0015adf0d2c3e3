"""Groups of ranks: processes of torch.distributed, or threads of one process that play them."""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu import choices
from linattn_edu.choices import Choice

_numbers = itertools.count()
_simulated: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # name -> _Threads


class _Threads:
    """Ranks that are threads, of which one runs at a time."""

    def __init__(self, world: int):
        self.name = f"simulated:{next(_numbers)}"
        self.turn, self.meeting = threading.Lock(), threading.Condition()
        self.world, self.given = world, [None] * world
        self.here, self.meetings = 0, 0  # ranks that wait, and how often all have met
        self.ended: list[int] = []
        self.over = False
        _simulated[self.name] = self

    def _meet(self) -> None:
        self.turn.release()
        try:
            with self.meeting:
                before, self.here = self.meetings, self.here + 1
                if self.here == self.world:
                    self.here, self.meetings = 0, before + 1
                    self.meeting.notify_all()
                self.meeting.wait_for(lambda: self.meetings > before or self.ended)
                if self.meetings == before:
                    raise RuntimeError(
                        f"rank {self.ended[0]} of {self.world} has ended, and the others wait for "
                        "its tensor: each must make the same calls"
                    )
        finally:
            self.turn.acquire()

    def end(self, rank: int) -> None:
        """No rank is to wait for this one any more."""
        with self.meeting:
            self.ended.append(rank)
            self.meeting.notify_all()

    def all_gather(self, x: Tensor, rank: int) -> Tensor:
        if self.over:
            raise ValueError(
                f"cp_context is of rank {rank} of simulate(), which is over: build another"
            )
        self.given[rank] = x
        self._meet()
        gathered = torch.stack(self.given)
        self._meet()  # before anybody gives the next
        return gathered


@dataclass(frozen=True)
class SimulatedRank:
    """A rank of `simulate`, with what CPContext asks of a process group."""

    threads: _Threads
    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.threads.world

    @property
    def group_name(self) -> str:
        return self.threads.name


def simulate(world: int, f: Callable) -> list:
    """[f(group) for each of `world` ranks], as if each were a process.

    group is the rank's process group, for :func:`build_cp_context`. One rank runs at a time, until
    it waits for the others.

    Raises:
        RuntimeError: a rank has ended, and others wait for what it does not send.
        Whatever the first rank that fails raises; the others end.

    Source: chapter 21.
    """
    threads, results, errors = _Threads(world), [None] * world, []

    def run(rank: int) -> None:
        # else on a GPU the backward passes of all ranks wait for each other in one thread
        with threads.turn, torch.autograd.set_multithreading_enabled(False):
            try:
                results[rank] = f(SimulatedRank(threads, rank))
            except BaseException as error:
                errors.append(error)
            finally:
                threads.end(rank)

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    threads.over = True
    if errors:
        raise errors[0]
    return results


class Gathering:
    """A tensor of every rank, on its way."""

    def __init__(self, x: Tensor, name: str, rank: int, world: int):
        self.on_its_way = False
        if x.is_meta:  # a route is asked for: nothing is sent, and nobody waits for this rank
            choices.tell("exchange", Choice(world, "cp_context"), None, ())
            self.gathered = x.new_empty(world, *x.shape)
            return
        if name in _simulated:
            self.gathered = _simulated[name].all_gather(x, rank)
            return
        import torch.distributed._functional_collectives  # which says what shapes they give

        # operations like others, so that a call with them can be told to `kernels.host.tape`
        self.sent = torch.ops._c10d_functional.all_gather_into_tensor(x, world, name)
        self.gathered, self.on_its_way = self.sent.view(world, *x.shape), True

    def wait(self) -> Tensor:
        """[world, ...]: the tensors of all ranks."""
        if self.on_its_way:
            torch.ops._c10d_functional.wait_tensor(self.sent)
        return self.gathered


def is_simulated(name: str) -> bool:
    """Whether the ranks of the group of this name are threads of :func:`simulate`."""
    return name in _simulated
