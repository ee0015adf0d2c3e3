"""The short convolution of every channel, as a module."""

import torch
from torch import Tensor, nn

from linattn_edu.cp.context import CPContext
from linattn_edu.ops import check
from linattn_edu.ops.causal_conv1d import WIDEST, activation_of, causal_conv1d, check_backend
from linattn_edu.ops.causal_conv1d_update import causal_conv1d_update
from linattn_edu.ops.tensors import traced


class ShortConvolution(nn.Conv1d):
    r""":func:`causal_conv1d` as a module: parameters and call of fla's ShortConvolution.

    Parameters: ``weight`` ``[D, 1, W]`` and ``bias`` ``[D]`` (None without bias), drawn as those of
    :class:`torch.nn.Conv1d`, uniform in ``[-W ** -0.5, W ** -0.5]``.

    Args:
        hidden_size: Channels D.
        kernel_size: Tokens of a sum, W, from 1 to 8.
        bias: Whether there is a bias.
        activation: None, "silu" or "swish".
        backend: fla-core's name of its kernels, as in :func:`causal_conv1d`.
        device, dtype: Of the parameters.
        impl: "triton", "reference" or "auto", as in :func:`causal_conv1d`.

    Raises:
        ValueError: sizes that do not fit, or a name that is none of those above.

    Source: chapter 23; fla-core 0.6.0, whose names these are.
    """

    first: float | None = None  # bound of the first weights, if it is not PyTorch's

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str = "auto",
    ):
        check.positive({"kernel_size": WIDEST}, hidden_size=hidden_size, kernel_size=kernel_size)
        activation_of(activation)
        check_backend(backend)
        check.choice("impl", impl, check.IMPLS)
        super().__init__(
            hidden_size, hidden_size, kernel_size, padding=kernel_size - 1, groups=hidden_size,
            bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend
        self.impl = impl

    def reset_parameters(self) -> None:
        """Draw the weight and the bias anew."""
        super().reset_parameters()
        if self.first is not None:
            nn.init.uniform_(self.weight, -self.first, self.first)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        *,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: CPContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """y and the final state of :func:`causal_conv1d`, or None.

        Args:
            x: ``[B, T, D]``.
            mask: 0 or 1 for each token ``[B, T]``, any dtype: tokens with 0 count as zero, whatever
                they hold. x stays as it is, where fla writes to it.
            cache: The tokens before x ``[N, D, W]``, or more of them without cu_seqlens. Where no
                gradient is recorded, one token of each sequence, packed or not, is written to it in
                place (:meth:`step`). For packed ones with as many tokens as sequences the numbers
                of cu_seqlens are read, on a GPU too where cu_seqlens_cpu is not given.
            residual, output_final_state, cu_seqlens, chunk_indices, cu_seqlens_cpu, cp_context: As
                in :func:`causal_conv1d`.

        Raises:
            TypeError, ValueError: As :func:`causal_conv1d` and :func:`causal_conv1d_update`, and a
                mask together with cu_seqlens.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask must be None with cu_seqlens, got both")
            check.tensor("x", x, ("B", "T", "D"), {})
            check.token_mask("mask", mask, x)
            x = x.masked_fill(~mask.bool()[..., None], 0)
        alone = cp_context is None and _one_each(x, cu_seqlens, cu_seqlens_cpu)
        if cache is not None and alone and not torch.is_grad_enabled():
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        wide = isinstance(cache, Tensor) and cache.shape[-1] > (W := self.kernel_size[0])
        if wide and cu_seqlens is None:
            last = cache[..., -W:].contiguous()
            y, _ = self(x, residual, None, last, cp_context=cp_context)
            return y, torch.cat([cache, x.mT], -1)[..., -cache.shape[-1] :].contiguous()
        return causal_conv1d(
            x, self.weight.squeeze(1), self.bias, residual, cache, output_final_state,
            self.activation, self.backend, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context,
            impl=self.impl,
        )  # fmt: skip

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token of each sequence: y, and with output_final_state the cache.

        Args:
            x: ``[N, 1, D]``, or with cu_seqlens ``[1, N, D]``.
            residual: Of x's shape, added to y, or None.
            cache: The tokens before ``[N, D, S]``, overwritten; None: none, new zeros.
            cu_seqlens: Whether x is packed; its numbers are not looked at.

        Raises:
            TypeError, ValueError: As :func:`causal_conv1d_update`.
        """
        one = 1 if cu_seqlens is None else 0
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[one] != 1:
            shape = "[N, 1, D]" if one else "[1, N, D] with cu_seqlens"
            raise ValueError(f"x must be {shape}, got {tuple(getattr(x, 'shape', ()))}")
        rows = x.squeeze(one)
        if cache is None:
            cache = x.new_zeros(*rows.shape, self.kernel_size[0])
        if residual is not None:
            sizes = dict(zip("BTD", x.shape, strict=True))
            check.tensor("residual", residual, ("B", "T", "D"), sizes)
        y = causal_conv1d_update(
            rows, cache, self.weight.squeeze(1), self.bias, self.activation, impl=self.impl
        ).unsqueeze(one)
        y = y if residual is None else (y + residual).to(x.dtype)
        return y, cache if output_final_state else None

    @property
    def state_size(self) -> int:
        """Numbers of the state of a sequence, D W."""
        return self.hidden_size * self.kernel_size[0]

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.hidden_size}, {self.kernel_size[0]}{bias}, activation={self.activation!r}"


def _one_each(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> bool:
    """Whether each sequence has one token; while boundaries are traced they are not read."""
    if not isinstance(x, Tensor) or x.ndim != 3:
        return False
    if cu_seqlens is None:
        return x.shape[1] == 1
    if x.shape[0] != 1 or x.shape[1] != cu_seqlens.shape[0] - 1 or traced(cu_seqlens):
        return False
    bounds = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return bounds.tolist() == list(range(x.shape[1] + 1))
