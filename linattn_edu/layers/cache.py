"""What a layer keeps of the tokens that it has seen, for decoding."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.ops import check, inplace
from linattn_edu.ops.ring import Ring, commit_ring
from linattn_edu.ops.tensors import known, traced


@dataclass(eq=False)
class Cache:
    """The states of one layer, which its forward pass reads and writes in place.

    Made by the layer's ``make_cache``. Without a gradient never allocated anew, so that a CUDA
    graph of a step may be replayed: capture one after training, and after a step without a
    gradient. :func:`copy.deepcopy` gives a second memory of the same tokens.

    Where a gradient is recorded, in training over the pieces of a document, new states with their
    history take the place of the old ones: a backward pass goes on into earlier pieces, as far as
    the last :meth:`detach`.

    Args:
        layer: Name of the layer's class.
        conv_states: For each short convolution, in the order of the forward pass, its last W inputs
            ``[N, D, W]``, newest last, in the dtype of the activations; RWKV-7's shift is one, W 2.
        recurrent_state: The state of the recurrence ``[N, ...]``, in float32 or float64, or in 16
            bits where that was asked for; with a ring as it was when the ring was empty, until
            :meth:`commit`.
        ring: What steps of one token wrote since, or None: they write the state.
        guesses: How many tokens :meth:`take_back` may be asked for, of which the ring then has
            room, and conv_states are ``[N, D, W + guesses]``. One token more is a step too.
    """

    layer: str
    conv_states: tuple[Tensor, ...]
    recurrent_state: Tensor
    ring: Ring | None = None
    guesses: int = 0

    @property
    def batch_size(self) -> int:
        """N, the sequences whose states these are."""
        return self.recurrent_state.shape[0]

    @property
    def states(self) -> tuple[Tensor, ...]:
        """All states."""
        return (*self.conv_states, self.recurrent_state)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All states, and the tensors of the ring."""
        return (*self.states, *(self.ring[:4] if self.ring else ()))

    def commit(self, impl: str = "auto") -> None:
        """Bring recurrent_state up to the last token, in place: the ring is empty then.

        A state with a history has an empty ring: steps, which fill it, own theirs.
        """
        if self.ring and not self.recurrent_state.requires_grad:
            commit_ring(self.recurrent_state, self.ring, impl=impl)

    def take_back(self, tokens: int) -> None:
        """Forget the last tokens, in place: guesses that were wrong. They were of the last call, or
        of several since :meth:`commit` that fit into the ring together.

        Raises:
            ValueError: tokens are not 0 to guesses.
        """
        check_back(tokens, self.guesses)
        if tokens:
            counts = self.ring.counts
            with inplace.writable(counts), torch.no_grad():
                counts[..., 1] += counts[..., 2] - tokens
                counts[..., 2] = 0
            for i, state in enumerate(self.conv_states):
                self.put(i, shifted(state, tokens))

    def put(self, i: int, value: Tensor) -> None:
        """Make value the state number i of :attr:`states`: in place, or where it or the old one
        has a gradient's history, with that, in a new tensor.
        """
        if not torch.is_grad_enabled():
            self.own()
        state = self.states[i]
        if not (value.requires_grad or state.requires_grad):
            with inplace.writable(state), torch.no_grad():
                state.copy_(value)
            return
        self._replace(i, value.to(state.dtype).contiguous())

    def _replace(self, i: int, value: Tensor) -> None:
        if i == len(self.conv_states):
            self.recurrent_state = value
        else:
            self.conv_states = (*self.conv_states[:i], value, *self.conv_states[i + 1 :])

    def detach(self) -> None:
        """Keep the states and forget their history: no gradient goes back over this place."""
        self.conv_states = tuple(state.detach() for state in self.conv_states)
        self.recurrent_state = self.recurrent_state.detach()

    def own(self) -> None:
        """Let go of histories, with copies that may be written."""
        for i, state in enumerate(self.states):
            if state.requires_grad:
                self._replace(i, owned(state))

    def __deepcopy__(self, memo: dict) -> "Cache":
        """Copies with their history, which a deepcopy of tensors refuses."""
        *conv, state = (x.clone() for x in self.states)
        ring = self.ring and Ring(*(x.clone() for x in self.ring[:4]), *self.ring[4:])
        return Cache(self.layer, tuple(conv), state, ring, self.guesses)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all tokens: set the states to zero, in place; those with a history anew."""
        for i, state in enumerate(self.states):
            self.put(i, torch.zeros_like(state))
        if self.ring:
            with inplace.writable(self.ring.counts):
                self.ring.counts.zero_()

    def reorder(self, rows: Tensor) -> None:
        """Give row n the states of row ``rows[n]``, in place: beam search.

        Args:
            rows: ``[N]``, int32 or int64, from 0 to N - 1; on a GPU PyTorch looks at the numbers.

        Raises:
            TypeError, ValueError: rows are none of these; nothing has been written then.
        """
        N = self.batch_size
        check.integers("rows", rows)
        if rows.shape != (N,):
            raise ValueError(f"rows must have shape [N={N}], got {tuple(rows.shape)}")
        check.same_device(("the cache", self.recurrent_state), ("rows", rows))
        if known(rows) and not ((rows >= 0) & (rows < N)).all():
            raise ValueError(f"rows must be from 0 to {N - 1}, got {rows.tolist()}")
        for i, state in enumerate(self.states):
            self.put(i, state.index_select(0, rows))
        for part in self.ring[:4] if self.ring else ():
            with inplace.writable(part), torch.no_grad():
                part.copy_(part.index_select(0, rows))


def check_back(tokens: object, guesses: int) -> None:
    """Refuse to take back what a cache is not made for."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= guesses:
        raise ValueError(
            f"tokens must be an integer from 0 to guesses={guesses} of make_cache, got {tokens!r}"
        )


def shifted(inputs: Tensor, tokens: int) -> Tensor:
    """The inputs of a convolution [N, D, S] without the last tokens, behind zeros."""
    return F.pad(inputs[..., : inputs.shape[-1] - tokens], (tokens, 0))


def owned(state: Tensor) -> Tensor:
    """A copy without history that may be written, and in training read, wherever it is made."""
    with nullcontext() if traced(state) else torch.inference_mode(False), torch.no_grad():
        return state.detach().clone()
