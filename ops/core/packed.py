"""Ops over packed sequences without pools: states go in and come out, and nothing is mutated.

A forward runs the kernels of an op with a pool, on a pool of its own. A backward is an op too, and
is given what its forward was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.capability import Capability, Implementation
from torch_hybrid.ops.core.declaration import Declaration
from torch_hybrid.ops.core.declare import Cpp, Op, define, pair_made, several_made
from torch_hybrid.ops.core.registration import same_or_first_impl
from torch_hybrid.ops.core.state_bounds import check_offsets

P = ParamSpec("P")
Q = ParamSpec("Q")


class PackedOp(Op):
    """Arguments that a forward and its backward have.

    Args:
        cu_seqlens: [N + 1] int32, from 0 to at most T.
        output_final_state: whether a forward makes final states.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        cu_seqlens: Tensor
        initial_state: Tensor | None
        output_final_state: bool  # of a forward alone

        def on_pool(self, pool: Tensor, initial: Tensor, final: Tensor) -> Op:
            """Give a forward's arguments of the op with a pool.

            Args:
                pool: to read and write.
                initial, final: slots that each sequence starts from and leaves its state in.
            """

    @property
    def num_seqs(self) -> int:
        """Number of sequences, empty ones included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def rows(self) -> Tensor:
        """Tensor that the outputs have shape and dtype of."""
        rows: Tensor = getattr(self, _positional(self)[0].name)
        return rows

    @property
    def work(self) -> torch.dtype:
        """Dtype of states and sums: float32, or float64."""
        return torch.promote_types(self.rows.dtype, torch.float32)

    def states(self, num_states: int) -> Tensor:
        """Allocate so many states; a packing has room for many more sequences than there are."""
        raise NotImplementedError

    def check_indices(self) -> None:
        """Raise ValueError unless sequences are among the tokens."""
        check_offsets(self.cu_seqlens, num_tokens=self.rows.shape[0])


class PackedRecurrence(PackedOp):
    """Arguments of a recurrence whose value heads have states [V, K]."""

    __slots__ = ()

    if TYPE_CHECKING:
        k: Tensor  # [T, H, K]
        v: Tensor  # [T, HV, V]

    @property
    def rows(self) -> Tensor:
        """Tensor that the outputs have shape and dtype of."""
        return self.v

    def states(self, num_states: int) -> Tensor:
        """Allocate so many states [HV, V, K]."""
        _, num_heads, v_dim = self.v.shape
        return self.v.new_empty(num_states, num_heads, v_dim, self.k.shape[2], dtype=self.work)


def by_pool(
    implementations: Mapping[str, Implementation], *, torch_serves: Capability | None = None
) -> dict[str, Implementation]:
    """Make implementations of a forward of those of an op with a pool.

    ``torch_serves`` is what "torch" can do here, where the op with a pool claims less.
    """
    made = {
        name: Implementation(capability=each.capability, launcher=run_on_pool, options={"by": each})
        for name, each in implementations.items()
    }
    if torch_serves is not None:
        made["torch"] = replace(made["torch"], capability=torch_serves)
    return made


def empty_results(x: PackedOp) -> tuple[Tensor, Tensor]:
    """Make the tensors that a forward returns."""
    return x.rows.new_empty(x.rows.shape), x.states(x.num_seqs if x.output_final_state else 0)


def empty_gradients(x: PackedOp) -> tuple[Tensor, ...]:
    """Make the tensors that a backward returns.

    They are like the forward's arguments, but for offsets; empty where an argument is None.
    """
    names = (each.name for each in _positional(x) if each.name not in _NO_GRADIENTS)
    *given, initial_state = (getattr(x, name) for name in names)
    states = x.states(0 if initial_state is None else x.num_seqs)
    like = [x.rows.new_empty(0) if each is None else each for each in given]
    return *(each.new_empty(each.shape) for each in like), states


_NO_GRADIENTS = {"cu_seqlens", "dout", "dfinal_state"}


@without_autocast
def run_on_pool(x: PackedOp, *, by: Implementation) -> tuple[Tensor, Tensor]:
    """Launch a forward by an implementation of its op with a pool, on a pool of its own.

    Sequence n has slot n + 1; a state that nobody asks for has no slot.
    """
    slots = torch.arange(1, x.num_seqs + 1, dtype=torch.int32, device=x.cu_seqlens.device)
    is_kept = x.output_final_state or x.initial_state is not None
    pool, null = x.states(x.num_seqs + 1 if is_kept else 1), torch.zeros_like(slots)
    if x.initial_state is None:
        pool.zero_()
    else:
        pool[0].zero_()
        pool[1:].copy_(x.initial_state)
    initial, final = null if x.initial_state is None else slots, slots if is_kept else null
    out: Tensor = by.load()(x.on_pool(pool, initial, final))
    return out, pool[1:].clone() if x.output_final_state else x.states(0)


def define_pair(
    forward: Callable[P, PackedOp],
    forwards: Mapping[str, Implementation],
    backward: Callable[Q, PackedOp],
    backwards: Mapping[str, Implementation],
    *,
    cpp: Cpp | None = None,
    limited: Mapping[str, str] | None = None,
    flops: tuple[str, str] = ("0", "0"),
) -> tuple[Callable[P, tuple[Tensor, Tensor]], Callable[Q, tuple[Tensor, ...]]]:
    """Define a forward and the backward that it goes through.

    Args:
        forward, backward: classes of their arguments; the backward has those of the forward first.
        forwards, backwards: their implementations, by name.
        cpp: names of the backward's C++ kernel; see ``define``.
        limited: letters of sizes that implementations of either may limit.
        flops: of the forward, and of the backward.
    """
    bound = Declaration(cast(type[Op], forward)).bound
    sizes = {name: bound[letter] for name, letter in (limited or {}).items()}
    count = sum(each.name not in _NO_GRADIENTS for each in _positional(forward))
    back = define(
        backward,
        backwards,
        returns=several_made(count, empty_gradients),
        limited=limited,
        flops=flops[1],
        cpp=cpp,
    )
    run = define(
        forward,
        forwards,
        returns=pair_made(empty_results),
        limited=limited,
        flops=flops[0],
        backward=partial(_gradients, forward, back, sizes),
    )
    return run, back


def _positional(op: Any) -> list[Field[Any]]:
    return [each for each in fields(op) if not each.kw_only]


def _gradients(
    forward: Callable[..., PackedOp],
    backward: Callable[..., tuple[Tensor, ...]],
    sizes: Mapping[str, tuple[str, int]],
    ctx: Any,
    dout: Tensor | None,
    dfinal_state: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Call ``backward`` on what ``forward`` saved; gradients that are None are zeros.

    ``sizes`` are fields and axes of the sizes that implementations may limit.
    """
    saved = ctx.saved_tensors  # which activation checkpointing gives once
    options = dict(ctx.options)
    x, impl = forward(*saved, **options), options.pop("impl")
    dfinal = dfinal_state if options.pop("output_final_state") else None
    of_call = {name: getattr(x, field).shape[axis] for name, (field, axis) in sizes.items()}
    grads = iter(
        backward(
            *saved,
            torch.zeros_like(x.rows) if dout is None else dout.contiguous(),
            None if dfinal is None else dfinal.contiguous(),
            **options,
            impl=same_or_first_impl(
                backward.__name__, impl, x.rows.device, x.rows.dtype, **of_call
            ),
        )
    )

    def of(given: Tensor | None) -> Tensor | None:
        if given is not None and not given.is_floating_point():
            return None
        grad = next(grads)
        return None if given is None else grad

    return tuple(map(of, saved))
