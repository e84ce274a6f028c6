"""Means, norms and softmaxes of rows, made of sums that each have a fixed order.

A few elements are added up one after the other, in float32; this fuses with its neighbours. The op
``power_sum`` adds up more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.power_sum.op import POWER_SUM

FEW = 16  # most elements that are added up one after the other: experts of a token, streams


@dataclass(frozen=True, slots=True, kw_only=True)
class RowArithmetic:
    """Torch's functions of a tensor's rows, with the arguments of torch's own.

    With ``power`` 2 the sums are of squares. If ``like`` itself holds squares, ``input`` is the
    tensor that was squared, less its ``addend`` if there is one.

    Attributes:
        like: the tensor, or its fake during tracing; its shape and dtype are read here. ``input``
            is the tensor, or its proxy in a graph.
        impl: implementation of the op ``power_sum``.
        power: 1 for sums, 2 for sums of squares.
        addend: second term of the tensor that is squared.
    """

    like: Tensor
    impl: str
    power: int = 1
    addend: Any = None

    def sum(
        self, input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Tensor:
        total = self._total(input, self._place(dim), keepdim=keepdim)
        return total.to(dtype or self.like.dtype)

    def mean(
        self, input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Tensor:
        place = self._place(dim)
        total = self._total(input, place, keepdim=keepdim) / self.like.shape[place]
        return total.to(dtype or self.like.dtype)

    def norm(
        self,
        input: Tensor,
        p: Any = "fro",
        dim: Any = None,
        keepdim: bool = False,
        dtype: Any = None,
        out: None = None,
    ) -> Tensor:
        if p not in ("fro", 2):
            raise UnsupportedError(f"batch_invariant: norms of rows have p=2, the model has {p}")
        squares = self._squares().sum(input, dim, keepdim, dtype=torch.float32)
        return squares.sqrt().to(dtype or self.like.dtype)

    def vector_norm(
        self,
        input: Tensor,
        ord: Any = 2,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: Any = None,
    ) -> Tensor:
        return self.norm(input, ord, dim, keepdim, dtype)

    def softmax(
        self, input: Tensor, dim: Any = None, dtype: Any = None, *, _stacklevel: int = 3
    ) -> Tensor:
        place = self._place(dim)
        parts = (input.to(torch.float32) - self._most(input, place)).exp()
        return (parts / self._total(parts, place, keepdim=True)).to(dtype or self.like.dtype)

    def log_softmax(
        self, input: Tensor, dim: Any = None, dtype: Any = None, *, _stacklevel: int = 3
    ) -> Tensor:
        place = self._place(dim)
        shifted = input.to(torch.float32) - self._most(input, place)
        total = self._total(shifted.exp(), place, keepdim=True)
        return (shifted - total.log()).to(dtype or self.like.dtype)

    def logsumexp(self, input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
        place = self._place(dim)
        most = self._most(input, place)
        most = most.masked_fill(most.abs() == torch.inf, 0.0)  # inf - inf would be NaN
        parts = (input.to(torch.float32) - most).exp()
        total = self._total(parts, place, keepdim=True).log() + most
        return (total if keepdim else total.squeeze(place)).to(self.like.dtype)

    def rms_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        self._check_one_dim("rms_norm", normalized_shape)
        eps = torch.finfo(self.like.dtype).eps if eps is None else eps
        squares = self._squares().mean(input, -1, True, dtype=torch.float32)
        normed = input.to(torch.float32) * (squares + eps).rsqrt()
        return (normed if weight is None else normed * weight).to(self.like.dtype)

    def layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        self._check_one_dim("layer_norm", normalized_shape)
        centred = input.to(torch.float32) - self.mean(input, -1, True, dtype=torch.float32)
        variance = self._squares().mean(centred, -1, True, dtype=torch.float32)
        normed = centred * (variance + eps).rsqrt()
        normed = normed if weight is None else normed * weight
        return (normed if bias is None else normed + bias).to(self.like.dtype)

    def _squares(self) -> RowArithmetic:
        return replace(self, power=2)

    def _total(self, x: Tensor, place: int, *, keepdim: bool) -> Tensor:
        """Sum x or its squares along a dim, in float32."""
        if self.like.shape[place] > FEW:
            rows, addend = (self._rows(each, place) for each in (x, self.addend))
            total: Tensor = POWER_SUM(rows, self.power, addend, impl=self.impl)
        else:
            terms = self._terms(x, place)
            terms = [term * term for term in terms] if self.power == 2 else terms
            total = _in_turn(lambda a, b: a + b, terms)
        return total.unsqueeze(place) if keepdim else total

    def _rows(self, x: Any, place: int) -> Any:
        return x if x is None or place == self.like.dim() - 1 else x.movedim(place, -1)

    def _most(self, x: Tensor, place: int) -> Tensor:
        """Find the largest of each row, in float32; its bits do not depend on the order."""
        if self.like.shape[place] > FEW:
            return x.to(torch.float32).amax(place, keepdim=True)
        return _in_turn(lambda a, b: a.maximum(b), self._terms(x, place)).unsqueeze(place)

    def _terms(self, x: Tensor, place: int) -> list[Tensor]:
        return [x.select(place, i).to(torch.float32) for i in range(self.like.shape[place])]

    def _place(self, dim: Any) -> int:
        """Resolve the one dim that is summed over to a number from 0 on."""
        if isinstance(dim, Sequence) and len(dim) == 1:
            [dim] = dim
        if not isinstance(dim, int):
            raise UnsupportedError(
                f"batch_invariant: the model sums over several dims at once, {dim} of "
                f"{list(self.like.shape)}"
            )
        place = dim % self.like.dim()
        if not isinstance(self.like.shape[place], int):
            raise UnsupportedError(
                f"batch_invariant: the model sums over a dim whose size goes by the batch, {dim} "
                f"of {list(self.like.shape)}"
            )
        return place

    def _check_one_dim(self, name: str, normalized_shape: Sequence[int]) -> None:
        if len(normalized_shape) != 1:
            raise UnsupportedError(
                f"batch_invariant: the model calls {name} over several dims, {normalized_shape}"
            )


def _in_turn(add: Callable[[Tensor, Tensor], Tensor], terms: Sequence[Tensor]) -> Tensor:
    total, *others = terms
    for term in others:
        total = add(total, term)
    return total


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": RowArithmetic.sum,
    "mean": RowArithmetic.mean,
    "norm": RowArithmetic.norm,
    "linalg_vector_norm": RowArithmetic.vector_norm,
    "softmax": RowArithmetic.softmax,
    "log_softmax": RowArithmetic.log_softmax,
    "logsumexp": RowArithmetic.logsumexp,
    "rms_norm": RowArithmetic.rms_norm,
    "layer_norm": RowArithmetic.layer_norm,
}
