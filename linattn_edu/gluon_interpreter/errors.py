"""What the interpreter finds in a kernel, and says with the kernel's own names."""


class KernelError(Exception):
    """A mistake in a kernel that a GPU may or may not show."""


class Deadlock(KernelError):
    """A wait that nobody answers."""


class Race(KernelError):
    """Memory that is read before it is written, or written while it may still be read."""


class ByteCount(KernelError):
    """Copies bring more bytes than a barrier was told to expect, or fewer."""


class Unfinished(KernelError):
    """A product's result is used before a wait for it, or a copy is under way at the end."""
