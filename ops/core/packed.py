"""Ops over packed sequences without pools: states go in and come out, and nothing is mutated.

A forward runs the kernels of an op with a pool, on a pool of its own. A backward is an op too, and
is given what its forward was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, cast, get_type_hints

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.capability import Capability, Implementation
from torch_hybrid.ops.core.declaration import Declaration
from torch_hybrid.ops.core.declare import Cpp, Op, define, pair_made, several_made
from torch_hybrid.ops.core.registration import same_or_first_impl
from torch_hybrid.ops.core.state_bounds import check_offsets

P = ParamSpec("P")


@dataclass(slots=True, repr=False, eq=False)
class PackedOp(Op):
    """Arguments that a forward and its backward have; ``define_pair`` makes the classes of both.

    Args:
        cu_seqlens: [N + 1] int32, from 0 to at most T.
        output_final_state: whether a forward makes final states.
        dout: gradient of the outputs, like these.
        dfinal_state: gradient of the final states, like initial ones, or None for zeros.

    Attributes:
        like: field that the outputs have shape and dtype of.
    """

    like: ClassVar[str]

    if TYPE_CHECKING:
        output_final_state: bool = field(kw_only=True)  # of a forward alone

        @property
        def cu_seqlens(self) -> Tensor: ...
        @property
        def initial_state(self) -> Tensor | None: ...
        @property
        def dout(self) -> Tensor: ...  # of a backward alone, as the next one
        @property
        def dfinal_state(self) -> Tensor | None: ...

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
        rows: Tensor = getattr(self, self.like)
        return rows

    @property
    def work(self) -> torch.dtype:
        """Dtype of states and sums: float32, or float64."""
        return torch.promote_types(self.rows.dtype, torch.float32)

    def states(self, num_states: int) -> Tensor:
        """Allocate so many states, like initial ones; a packing has room for many more sequences
        than there are."""
        op: Any = type(self)
        sizes, is_wide = _declared_states(op)
        dtype = self.work if is_wide else self.rows.dtype
        return self.rows.new_empty(num_states, *sizes(self), dtype=dtype)

    def check_indices(self) -> None:
        """Raise ValueError unless sequences are among the tokens."""
        check_offsets(self.cu_seqlens, num_tokens=self.rows.shape[0])


@cache
def _declared_states(op: type[Any]) -> tuple[Callable[[PackedOp], tuple[int, ...]], bool]:
    """Compile the sizes of one state, and tell whether states are float32 at least."""
    declaration = Declaration(op)
    return declaration.sizes_of("initial_state"), (
        declaration.kinds["initial_state"].dtype == "work"
    )


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
    *given, initial_state = (getattr(x, name) for name in _differentiable(x))
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
    arguments: Callable[P, PackedOp],
    forwards: Mapping[str, Implementation],
    backwards: Mapping[str, Implementation],
    *,
    cpp: Cpp | None = None,
    limited: Mapping[str, str] | None = None,
    flops: tuple[str, str] = ("0", "0"),
) -> tuple[Callable[P, tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, ...]]]:
    """Define a forward and the backward that it goes through.

    ``TrainedWkv`` has the arguments of ``wkv_forward`` and of ``wkv_backward``. The former is also
    told whether to make final states, the latter is also given gradients of results.

    Args:
        arguments: class of what both take. Its docstring is the forward's.
        forwards, backwards: their implementations, by name.
        cpp: names of the backward's C++ kernel; see ``define``.
        limited: letters of sizes that implementations of either may limit.
        flops: of the forward, and of the backward.
    """
    trained = cast(type[PackedOp], arguments)
    bound = Declaration(trained).bound
    sizes = {name: bound[letter] for name, letter in (limited or {}).items()}
    forward, backward = _forward_of(trained), _backward_of(trained)
    back: Callable[..., tuple[Tensor, ...]] = define(
        backward,
        backwards,
        returns=several_made(len(_differentiable(trained)), empty_gradients),
        limited=limited,
        flops=flops[1],
        cpp=cpp,
    )
    run: Callable[..., tuple[Tensor, Tensor]] = define(
        forward,
        forwards,
        returns=pair_made(empty_results),
        limited=limited,
        flops=flops[0],
        backward=partial(_gradients, forward, back, sizes),
    )
    return cast(Callable[P, tuple[Tensor, Tensor]], run), back


def _forward_of(trained: type[PackedOp]) -> type[PackedOp]:
    """Make the class of a forward's arguments."""
    own = [("output_final_state", bool, field(kw_only=True))]
    return _derived(trained, "Forward", own, trained.__doc__)


def _backward_of(trained: type[PackedOp]) -> type[PackedOp]:
    """Make the class of a backward's arguments: those of its forward, and gradients of results."""
    hints = get_type_hints(trained, include_extras=True)
    own = [("dout", hints[trained.like]), ("dfinal_state", hints["initial_state"])]
    forward = f"{Declaration(trained).name.removeprefix('trained_')}_forward"
    given = ", ".join(each.name for each in fields(trained) if each.name != "impl")
    doc = f"""Gradients of :func:`{forward}`, in fixed orders of sums.

    Args:
        {given}: those of the forward.

    Returns:
        Gradients of {", ".join(_differentiable(trained))}; empty where these are None.
    """
    return _derived(trained, "Backward", own, doc)


def _derived(trained: type[PackedOp], suffix: str, own: Any, doc: str | None) -> type[PackedOp]:
    name = f"{trained.__name__.removeprefix('Trained')}{suffix}"
    namespace = {"__module__": trained.__module__, "__doc__": doc}
    options = {"slots": True, "repr": False, "eq": False}
    return make_dataclass(name, own, bases=(trained,), namespace=namespace, **options)


def _differentiable(op: Any) -> list[str]:
    """Name the tensors among a forward's arguments, also given those of its backward."""
    positional = (each.name for each in fields(op) if not each.kw_only)
    return [name for name in positional if name not in _NO_GRADIENTS]


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
