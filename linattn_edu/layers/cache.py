"""What a layer keeps of the tokens that it has seen, for decoding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops import check, inplace
from linattn_edu.ops.tensors import known


@dataclass(eq=False)
class Cache:
    """The states of one layer, which its forward pass reads and writes in place.

    Made by the layer's ``make_cache``; never allocated anew, so that a CUDA graph of a step may be
    replayed. :func:`copy.deepcopy` gives a second memory of the same tokens.

    Args:
        layer: Name of the layer's class.
        conv_states: For each short convolution, in the order of the forward pass, its last W inputs
            ``[N, D, W]``, newest last, in the dtype of the activations.
        recurrent_state: The state of the recurrence ``[N, ...]``, in float32 or float64.
    """

    layer: str
    conv_states: tuple[Tensor, ...]
    recurrent_state: Tensor

    @property
    def batch_size(self) -> int:
        """N, the sequences whose states these are."""
        return self.recurrent_state.shape[0]

    @property
    def states(self) -> tuple[Tensor, ...]:
        """All states."""
        return (*self.conv_states, self.recurrent_state)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all tokens: set the states to zero, in place."""
        for state in self.states:
            with inplace.writable(state):
                state.zero_()

    @torch.no_grad()
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
        for state in self.states:
            with inplace.writable(state):
                state.copy_(state.index_select(0, rows))
