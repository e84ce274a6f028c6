"""Tensor parallelism: the processes that run one model together, their shards and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError

Block = tuple[int, int]  # heads and the width of each


def divide(name: str, count: int, num_ranks: int) -> int:
    """Divide ``count`` things among the ranks, none held twice; return each rank's number.

    Raises:
        UnsupportedError: the ranks do not divide them.
    """
    if count % num_ranks:
        raise UnsupportedError(
            f"the number of ranks must divide {name}, got {num_ranks} ranks and {count}"
        )
    return count // num_ranks


def divide_or_repeat(name: str, count: int, num_ranks: int) -> int:
    """Divide ``count`` things among the ranks; if they are fewer, several ranks hold the same one.

    Raises:
        UnsupportedError: neither number divides the other.
    """
    if count % num_ranks and num_ranks % count:
        raise UnsupportedError(
            f"the number of ranks must divide {name} or be a multiple of it, "
            f"got {num_ranks} ranks and {count}"
        )
    return max(count // num_ranks, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A process among those that share a model.

    ``group_name`` names a ``torch.distributed`` process group: the compiler takes it as a constant.
    """

    rank: int
    size: int
    group_name: str

    def cut(self, weight: Tensor, blocks: Sequence[Block], dim: int = 0) -> Tensor:
        """Cut this rank's heads out of a weight, out of each block along ``dim`` on its own.

        A projection to ``[q | k | v]`` has three blocks. If its rows were cut as one, a rank could
        get heads of q alone. A block of one head is whole on every rank.
        """
        sizes = [heads * width for heads, width in blocks]
        parts: tuple[Tensor, ...] = weight.detach().split(sizes, dim)
        held = [
            self._heads(part, heads, dim) for part, (heads, _) in zip(parts, blocks, strict=True)
        ]
        return torch.cat(held, dim)

    def _heads(self, part: Tensor, count: int, dim: int) -> Tensor:
        held = divide_or_repeat("the heads of a weight", count, self.size)
        first = self.rank * count // self.size
        heads: Tensor = part.unflatten(dim, (count, -1))
        return heads.narrow(dim, first, held).flatten(dim, dim + 1)

    def parameter(self, weight: Tensor, blocks: Sequence[Block], dim: int = 0) -> nn.Parameter:
        """Make a parameter of this rank's heads of a weight (``cut``)."""
        return nn.Parameter(self.cut(weight, blocks, dim), requires_grad=False)

    def rows(self, linear: nn.Linear, blocks: Sequence[Block]) -> nn.Linear:
        """Make a linear layer that computes this rank's heads of each block of outputs."""
        _check_plain(linear)
        bias = None if linear.bias is None else self.cut(linear.bias, blocks)
        return linear_of(self.parameter(linear.weight, blocks), bias)

    def columns(self, linear: nn.Linear, num_heads: int) -> nn.Linear:
        """Make a linear layer of this rank's heads of inputs; the ranks' outputs are to be summed.

        Raises:
            UnsupportedError: the ranks do not divide the heads.
        """
        _check_plain(linear)
        divide(f"the {linear.in_features} inputs of a projection", num_heads, self.size)
        width = linear.in_features // num_heads
        weight = self.parameter(linear.weight, [(num_heads, width)], dim=1)
        part = linear_of(weight, linear.bias)
        return self.count_bias_once(part)

    def summed_columns(self, linear: nn.Linear, num_heads: int) -> nn.Linear:
        """Make a linear layer of this rank's heads of inputs; it sums its outputs over the ranks.

        Raises:
            UnsupportedError: the ranks do not divide the heads.
        """
        part = self.columns(linear, num_heads)
        return SummedLinear(part.weight, part.bias, self)  # type: ignore[arg-type]

    def count_bias_once(self, linear: nn.Linear) -> nn.Linear:
        """Keep the bias on rank 0 alone, for a layer whose outputs are summed over the ranks."""
        if linear.bias is None or self.rank == 0:
            return linear
        return linear_of(linear.weight, torch.zeros_like(linear.bias))

    def sum(self, part: Tensor) -> Tensor:
        """Sum over all ranks; each gets the result.

        Start and wait are two calls, so that a schedule can put other work between them.
        """
        started = torch.ops._c10d_functional.all_reduce(part, "sum", self.group_name)
        total: Tensor = torch.ops._c10d_functional.wait_tensor(started)
        return total

    def least(self, count: int, device: torch.device) -> int:
        """Find the least of the ranks' counts; each gets it. It is not for use within a step.

        Args:
            count: this rank's count.
            device: a device whose tensors the process group exchanges.
        """
        counts = torch.tensor([count], dtype=torch.int64, device=device)
        started = torch.ops._c10d_functional.all_reduce(counts, "min", self.group_name)
        return int(torch.ops._c10d_functional.wait_tensor(started))

    def exchange(self, rows: Tensor) -> Tensor:
        """Exchange parts (all-to-all): send part i of the rows to rank i, receive part i from it.

        Args:
            rows: [R * n, ...] for R ranks; n is the same on each.
        """
        splits = [rows.shape[0] // self.size] * self.size
        started = torch.ops._c10d_functional.all_to_all_single(
            rows, splits, splits, self.group_name
        )
        received: Tensor = torch.ops._c10d_functional.wait_tensor(started)
        return received

    def gather(self, part: Tensor) -> Tensor:
        """Gather the ranks' parts side by side on each: [N, n] to [N, R * n] for R ranks."""
        started = torch.ops._c10d_functional.all_gather_into_tensor(
            part.contiguous(), self.size, self.group_name
        )
        parts: Tensor = torch.ops._c10d_functional.wait_tensor(started)
        side_by_side: Tensor = parts.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1)
        return side_by_side

    def mean_of_groups(self, means: Tensor, num_groups: int) -> Tensor:
        """Average over each group of channels, of which this rank holds a part.

        Args:
            means: [..., G, 1], means over this rank's channels of each of its G groups.
            num_groups: groups of the whole layer. The ranks of a group hold equally many of its
                channels.
        """
        if num_groups % self.size == 0:
            return means
        ranks_of_group = self.size // num_groups
        group = self.rank // ranks_of_group
        # Every group has a row; ranks without its channels put zero there.
        spread = F.pad(means, (0, 0, group, num_groups - 1 - group))
        return self.sum(spread).narrow(-2, group, 1) / ranks_of_group


def add_up(parts: Tensor) -> Tensor:
    """Sum the ranks' parts [R, ...] in the order of the ranks; round once."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    total, *others = (part.to(wide) for part in parts.unbind())
    for other in others:
        total = total + other
    return total.to(parts.dtype)


def _check_plain(linear: nn.Module) -> None:
    # The cut copies weights alone: what a subclass or a wrapper adds would be lost.
    if type(linear) is not nn.Linear:
        raise UnsupportedError(
            f"cannot shard a {type(linear).__module__}.{type(linear).__qualname__}: only plain "
            "linear layers have nothing but their weights to cut"
        )


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Make a linear layer of a weight and a bias, outside autograd."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, dtype=weight.dtype, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


class SummedLinear(nn.Linear):
    """A linear layer whose inputs are spread over the ranks: partial products, then their sum.

    Args:
        weight: [outputs, inputs of this rank].
        bias: [outputs], which each rank adds to its part before the sum, or None.
        ranks: the ranks that hold the inputs.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks) -> None:
        super().__init__(
            weight.shape[1],
            weight.shape[0],
            bias=bias is not None,
            dtype=weight.dtype,
            device="meta",
        )
        self.weight, self.bias, self.ranks = weight, bias, ranks  # type: ignore[assignment]
        self.product = Product()  # an adapter of the layer adds to it

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs of this rank] to [..., outputs], the same bits on every rank."""
        return self.ranks.sum(self.product(x, self.weight, self.bias))


class Product(nn.Module):
    """Product of rows and a weight, of which the ranks have parts that are not summed yet."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [..., inputs] and weight [outputs, inputs], and add the bias."""
        return F.linear(x, weight, bias)


def own_means(means: Tensor) -> Tensor:
    """Return the means of groups of channels unchanged: this rank holds whole groups."""
    return means


class OwnColumns(nn.Module):
    """A linear layer of this rank's stretch of inputs, which every rank has whole."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part, self.ranks = part, ranks

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs], which are to be summed over the ranks."""
        out: Tensor = self.part(x.chunk(self.ranks.size, dim=-1)[self.ranks.rank])
        return out


class SumOverRanks(nn.Module):
    """A module whose output is summed over the ranks; of several outputs, the first."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part, self.ranks = part, ranks

    def forward(self, x: Tensor, *others: object) -> Any:
        """Map [..., dim] to [..., dim], the same bits on every rank."""
        out = self.part(x, *others)
        if isinstance(out, tuple):
            return self.ranks.sum(out[0]), *out[1:]
        return self.ranks.sum(out)


class RMSNormOverRanks(nn.Module):
    """RMSNorm over all heads together, of which each rank has some.

    Args:
        weight: weight of this rank's heads.
        eps: eps of the norm.
        ranks: ranks that hold the heads, each equally many.
    """

    def __init__(self, weight: nn.Parameter, eps: float, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.eps, self.ranks = weight, eps, ranks

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., channels] in float32; round once."""
        x32 = x.float()
        means = x32.pow(2).mean(-1, keepdim=True)
        mean = self.ranks.sum(means) / self.ranks.size
        return (self.weight * (x32 * torch.rsqrt(mean + self.eps))).to(x.dtype)
