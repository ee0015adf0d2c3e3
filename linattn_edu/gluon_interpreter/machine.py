"""One program of a kernel: its parts, its mbarriers, and what is under way without them.

A part is what `warp_specialize` makes of some warps. Each is a thread here, of which one runs at a
time: at every operation that other parts could notice it gives the turn back, and who has the next
one is drawn, with a seed. Copies are drawn like parts and land when it is their turn; a product is
computed at the wait for it. So what a kernel does not wait for comes late.
"""

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

from linattn_edu.gluon_interpreter.errors import ByteCount, Deadlock, KernelError, Race, Unfinished
from linattn_edu.gluon_interpreter.memory import Access, Shared, race
from linattn_edu.gluon_interpreter.values import Block

MARKER = "__gluon_interpreter__"  # a global name of every function of a kernel


class Record:
    """Named values that functions of a kernel hand on; `fields` are their names."""

    fields: list[str]

    def __init__(self, *values: object):
        for name, value in zip(self.fields, values, strict=True):
            setattr(self, name, value)


class Barrier:
    """An mbarrier: a phase ends when all arrivals, and all bytes that are expected, have come."""

    def __init__(self, count: int):
        self.count, self.phase, self.fenced = count, 0, False
        self.knows = {}  # what those who arrived in the phases that have ended knew
        self._begin()

    def _begin(self) -> None:
        self.pending, self.gathers = self.count, {}
        self.expected = self.issued = self.landed = 0  # bytes

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity has ended, of the two that a wait can mean."""
        return self.phase % 2 != parity

    def come(self, knows: dict, arrivals: int = 0, landed: int = 0) -> None:
        """Arrivals or bytes, with what is known to who brings them."""
        merge(self.gathers, knows)
        self.pending -= arrivals
        self.landed += landed
        if self.pending <= 0 and self.landed == self.expected:
            merge(self.knows, self.gathers)
            self.phase += 1
            self._begin()


def merge(knows: dict, others: dict) -> None:
    """Clocks of both: of each actor the later time."""
    for actor, time in others.items():
        knows[actor] = max(time, knows.get(actor, 0))


class Copy:
    """A copy of a tile to shared memory that is under way. `barrier` is told when it lands."""

    def __init__(self, tensor, place: Shared, barrier: Barrier, size: int):
        self.tensor, self.place, self.barrier, self.size = tensor, place, barrier, size

    def land(self):
        self.place.tensor.copy_(self.tensor())
        self.barrier.come({self: 1}, landed=self.size)


class Begun:
    """What a part has begun and waits for later: a copy from shared memory, or a product."""

    def __init__(self, finish: Callable):
        self.finish = finish


class Product(Block):
    """a @ b, or acc + a @ b: numbers that are there after a wait for it."""

    def __init__(self, a: object, b: Shared, acc: Block, use_acc: bool):
        super().__init__(None)
        self._a, self._b, self._acc, self._use = a, b, acc, use_acc
        self._shape, self.begun = acc.shape, Begun(self._finish)

    @property
    def shape(self):
        return self._shape

    @property
    def data(self):
        raise Unfinished("a product's result is used, and no wait says that it is there")

    @property
    def result(self) -> Block:
        """After a wait for it the numbers, else itself."""
        return self if self._data is None else Block(self._data)

    def _finish(self):
        # operands have 16 bits, so that in fp32 their products are exact
        a, b = (x.tensor if isinstance(x, Shared) else x.data for x in (self._a, self._b))
        self._data = a.float() @ b.float()
        if self._use:
            self._data += (
                self._acc.result.data if isinstance(self._acc, Product) else self._acc.data
            )


class Part:
    """Some warps of a program, with a thread of control and a clock.

    knows: actor -> time up to which all of these warps know of what it did. A part's own time
    advances at each barrier of its warps: what one of them did since, the others do not know of,
    nor does who waits where one of them arrives.
    """

    def __init__(self, machine: "Machine", name: str, num_warps: int, knows: dict):
        self.machine, self.name, self.num_warps = machine, name, num_warps
        self.knows, self.time = {**knows}, 1
        self.ended = {}  # what some of these warps saw the end of: all know at the next barrier
        self.unfenced: list[Access] = []
        self.products, self.stores, self.reads = deque(), deque(), deque()
        self.waits: tuple[Shared, Barrier, int] | None = None  # for which phase of a barrier

    # -- what it may touch
    def knows_of(self, access: Access, by_one: bool) -> bool:
        """Whether an access is before what these warps do now, or what one of them does."""
        if access.actor is self:
            return not by_one or access.time < self.time
        return self.knows.get(access.actor, 0) >= access.time

    def touch(self, view: Shared, writes: bool, actor: object = None, what: str = "") -> Access:
        """Check an access and keep it: through registers, or for an actor that one warp begins."""
        for old in view.allocation.conflicts(view.region, writes):
            if not self.knows_of(old, actor is not None):
                name_memory()
                raise race(old, "is written" if writes else "is read", what or self.name, view.name)
            if actor is not None and not writes and old.fenced != 0:
                fenced = old.fenced is not None and self.knows_of(_at(old, old.fenced), True)
                if not fenced:
                    name_memory()
                    raise Race(
                        f"{view.name} is read by {what}, and between that and its writing through "
                        "registers there is no fence_async_shared with a barrier after it"
                    )
        done = "was written" if writes else "was read"
        by = f"{done} by {what or self.name}"
        access = Access(view.region, writes, actor or self, 1 if actor else self.time, by)
        if actor is None and writes:
            self.unfenced.append(access)
        else:
            access.fenced = 0  # none is needed
        view.allocation.add(access)
        return access

    def published(self) -> dict:
        """What who waits for this part knows when one of its warps arrives."""
        return self.knows | {self: self.time - 1}

    @property
    def ready(self) -> bool:
        """Whether it can have a turn."""
        return self.waits is None or self.waits[1].passed(self.waits[2])

    # -- its operations, each of which others may notice
    def turn(self) -> None:
        """Let others go first, if they are drawn."""
        self.machine.give_turn(self)

    def barrier(self) -> None:
        """A barrier of these warps: what each has done, all know of."""
        self.turn()
        self.time += 1
        merge(self.knows, self.ended)
        self.ended = {}

    def fence(self) -> None:
        """After the next barrier, copies and products may read what was written until now."""
        for access in self.unfenced:
            access.fenced = self.time
        self.unfenced = []
        for barrier in self.machine.barriers:
            barrier.fenced = True

    def wait(self, view: Shared, parity: int) -> None:
        """Until a phase has ended; then to know what those who arrived in it knew."""
        barrier = self.machine.barrier_of(view)
        self.waits = view, barrier, parity
        self.turn()
        self.waits = None
        merge(self.knows, barrier.knows)

    def arrive(self, view: Shared, count: int, expected: int = 0) -> None:
        """Arrivals at an mbarrier, whose phase waits for so many more bytes."""
        barrier = self.machine.barrier_of(view)
        self.turn()
        barrier.expected += expected
        barrier.come(self.published(), arrivals=count)

    def load(self, tensor: Callable, view: Shared, size: int, bar: Shared) -> None:
        """Begin a copy to shared memory by the copy engine."""
        self.turn()
        barrier = self.machine.barrier_of(bar)
        if not barrier.fenced:
            raise Race(f"{bar.name} is used by a copy, and no fence is after its init")
        barrier.issued += size
        if barrier.issued > barrier.expected:
            raise ByteCount(
                f"{bar.name} expects {barrier.expected} bytes, and copies bring {barrier.issued}: "
                f"the last of them to {view.name}"
            )
        copy = Copy(tensor, view, barrier, size)
        self.touch(view, True, copy, "a copy of " + self.name)
        view.tensor.fill_(float("nan"))
        self.machine.copies.append(copy)

    def store(self, write: Callable, view: Shared) -> None:
        """Begin a copy from shared memory."""
        self.turn()
        store = Begun(write)
        self.touch(view, False, store, "a copy out of " + self.name)
        self.stores.append(store)

    def read(self, view: Shared, values: Callable) -> None:
        """Begin a copy to shared memory by these warps, around registers."""
        copy = Begun(values)
        copy.access = self.touch(view, True, copy, "a copy by pointers of " + self.name)
        copy.access.fenced = None
        view.tensor.fill_(float("nan"))
        self.reads.append(copy)

    def wait_reads(self, most: int) -> None:
        """What has been copied so counts as written through registers: it wants a fence."""
        for copy in self.finish(self.reads, most):
            copy.access.actor, copy.access.time = self, self.time
            self.unfenced.append(copy.access)

    def multiply(self, a: object, b: Shared, acc: Block, use_acc: bool) -> Product:
        """Begin a product, which reads shared memory until a wait for it."""
        product = Product(a, b, acc, use_acc)
        for operand in (a, b):
            if isinstance(operand, Shared):
                self.touch(operand, False, product.begun, "a product of " + self.name)
        self.products.append(product.begun)
        return product

    def finish(self, under_way: deque, most: int) -> list:
        """Finish what was begun first until at most so many are under way."""
        self.turn()
        done = []
        while len(under_way) > most:
            done.append(under_way.popleft())
            done[-1].finish()
            self.ended[done[-1]] = 1
        return done

    def check_end(self) -> None:
        """Raise Unfinished if something is under way."""
        if self.stores or self.products or self.reads:
            raise Unfinished(f"{self.name} ends, and no wait says that what it began is done")


def _at(access: Access, time: int) -> Access:
    return Access(access.region, access.writes, access.actor, time, access.what)


class _Stopped(BaseException):
    """Ends a part's thread after an error in another one."""


class Machine:
    """A program: the parts it has now, and the copies under way."""

    def __init__(self, name: str, seed: object, grid: int, pid: int, num_warps: int):
        self.grid, self.pid, self.random = grid, pid, random.Random(f"{seed} {pid}")
        self.copies: list[Copy] = []
        self.barriers: list[Barrier] = []
        self.part = self.main = Part(self, name, num_warps, {})
        self.threads: dict[Part, threading.Thread] = {}
        self.error = None

    def barrier_of(self, view: Shared) -> Barrier:
        return view.allocation.barriers[view.tensor.storage_offset()]

    def make_barrier(self, view: Shared, count: int) -> None:
        barrier = view.allocation.barriers[view.tensor.storage_offset()] = Barrier(count)
        self.barriers.append(barrier)

    def left_behind(self) -> Unfinished:
        return Unfinished(f"a copy to {self.copies[0].place.name} is under way at the end")

    # -- turns
    def give_turn(self, part: Part) -> None:
        """Come back when it is this part's turn again, and what it waits for has come."""
        if part is not self.main:
            self.back.release()
            self.go[part].acquire()
            if self.error:
                raise _Stopped
            return
        while not part.ready:  # before and after it is in parts, and has no others beside it
            self.land([part])

    def land(self, waiting: list[Part]) -> None:
        """One of the copies; without any, nobody can go on."""
        if not self.copies:
            raise self.stuck(waiting)
        i = self.random.randrange(len(self.copies))
        self.copies.pop(i).land()

    def stuck(self, waiting: list[Part]) -> KernelError:
        """Why none of these parts can go on."""
        for part in waiting:
            view, barrier, _ = part.waits
            if barrier.pending <= 0 and barrier.landed < barrier.expected:
                return ByteCount(
                    f"{view.name} expects {barrier.expected} bytes, and copies bring "
                    f"{barrier.landed}: {part.name} waits for the rest"
                )
        said = (f"{x.name} waits for {x.waits[0].name} (phase {x.waits[2]})" for x in waiting)
        return Deadlock("nobody answers: " + "; ".join(said))

    def specialize(self, calls: list[tuple], warps: list[int]) -> None:
        """Run the parts until all have ended."""
        name_memory()
        self.main.barrier()  # it is one for all warps
        knows, warps = self.main.knows | {self.main: self.main.time}, [self.main.num_warps, *warps]
        parts = [
            Part(self, f"part {i} ({function.__name__})", n, knows)
            for i, ((function, _), n) in enumerate(zip(calls, warps, strict=True))
        ]
        self.go = {part: threading.Semaphore(0) for part in parts}
        self.back = threading.Semaphore(0)
        for part, (function, args) in zip(parts, calls, strict=True):
            self.threads[part] = threading.Thread(
                target=self.run, args=(part, function, args), daemon=True
            )
            self.threads[part].start()
        weights = {part: self.random.choice((1, 4, 16)) for part in parts}
        landing = self.random.choice((1, 4, 16))
        left = parts
        try:
            while left:
                able = [x for x in left if x.ready]
                if not able:
                    self.land(left)
                    continue
                chances = [weights[x] for x in able] + [landing] * bool(self.copies)
                (drawn,) = self.random.choices([*able, None][: len(chances)], chances)
                if drawn is None:
                    self.land(left)
                    continue
                self.part = drawn
                self.go[drawn].release()
                self.back.acquire()
                if self.error:
                    raise self.error
                left = [x for x in left if self.threads[x] is not None]
        except BaseException as error:
            self.error = error
            for part in left:
                if self.threads[part] is not None:
                    self.go[part].release()
                    self.threads[part].join()
            raise
        finally:
            self.part = self.main
        for part in parts:
            merge(self.main.knows, part.knows | {part: part.time})

    @torch.no_grad()  # which each thread has for itself
    def run(self, part: Part, function: Callable, args: tuple) -> None:
        """A part's thread."""
        self.go[part].acquire()
        try:
            if not self.error:
                function(*args)
                part.check_end()
        except _Stopped:
            return
        except BaseException as error:
            self.error = error
        self.threads[part] = None
        self.back.release()


def _frames() -> Iterator[dict]:
    """The local variables of the kernel's functions that run now, the kernel's own first."""
    found, frame = [], sys._getframe()
    while frame:
        if MARKER in frame.f_globals:
            found.append(frame.f_locals)
        frame = frame.f_back
    yield from reversed(found)


def _inside(name: str, value: object) -> list[tuple[str, object]]:
    """What a value holds, by the names by which the kernel has it."""
    if isinstance(value, Record):
        return [(f"{name}.{field}", getattr(value, field)) for field in value.fields]
    if isinstance(value, (tuple, list)):
        return [(f"{name}[{i}]", x) for i, x in enumerate(value)]
    return []


def name_memory() -> None:
    """Give allocations the names that the kernel has for them, the shortest first."""
    for variables in _frames():
        some = [*variables.items()]
        while some:
            for name, value in some:
                if isinstance(value, Shared) and value.allocation.name is None:
                    value.allocation.name = name
            some = [pair for name, value in some for pair in _inside(name, value)]
