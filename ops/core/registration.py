"""Registration of this package's ops: schema, mutations, fake and implementations.

``Library.define`` with a Python implementation costs a few microseconds a call, several times
less than the ``custom_op`` decorator, and traces the same: an opaque node with declared mutations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from torch_hybrid.ops.core.autograd import register_with_backward, register_without_backward
from torch_hybrid.ops.core.capability import Implementation, Need
from torch_hybrid.ops.core.flops import register_formula

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "torch_hybrid"
# Every op's implementations by its name, entered once when its module is imported.
REGISTERED: dict[str, Mapping[str, Implementation]] = {}
# Launchers of traced implementations by op, entered when first called.
LAUNCHERS: dict[str, dict[str, Callable[..., Any]]] = {}
_LIBRARIES: dict[str, torch.library.Library] = {}  # one for each op, with which it goes
_num_dispatch_modes = torch._C._len_torch_dispatch_stack


def define_op(
    signature: str,
    *,
    implementations: Mapping[str, Implementation],
    like: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    value: Callable[..., Any],
    check: Callable[[Any], None],
    flops: Callable[[Any], int],
    backward: Callable[..., Any] | None = None,
    saves_results: int = 0,
) -> torch._ops.OpOverload:
    """Register ``signature``, whose last argument is ``str impl``, and return its overload.

    The op's ``direct`` calls its kernel past the dispatcher, unless a profiler or a dispatch mode
    wants to see calls: for code that a compiler makes (``graphs/compiling/direct_calls.py``).

    Args:
        signature: ``name(args) -> returns``; every mutated tensor is marked ``Tensor(a!)``.
        implementations: by name; the op's ``impl`` argument picks one, so it shows in the graph.
            One that returns several tensors serves a signature of one too: its first.
        like: the tensor arguments that the outputs have shape and dtype of, each in turn.
        fake: for other outputs: takes the op's arguments and returns tensors of the right shapes
            and dtypes.
        value: makes of the op's arguments the one value that its launchers take.
        check: is given that value where the implementation does not check indices itself.
        flops: counts multiplications and additions of products, given that value.
        backward: of a functional op, as ``register_with_backward`` wants it; else it has none.
        saves_results: likewise.
    """
    name = signature.partition("(")[0]
    schema = torch._C.parse_schema(f"{NAMESPACE}::{signature}")
    fake = fake or _fake_like(schema, like)
    returns_one = len(schema.returns) == 1

    def launch(*args: Any, **options: Any) -> Any:
        x = value(*args, **options)
        implementation = implementations[x.impl]
        if not implementation.checks_indices:
            check(x)
        out = implementation.load()(x)
        return out[0] if returns_one and isinstance(out, tuple) else out

    REGISTERED[name], LAUNCHERS[name] = implementations, {}
    if name in _LIBRARIES:  # declared again, by a cell of a notebook
        _LIBRARIES.pop(name)._destroy()
    library = _LIBRARIES[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    if backward is None:
        register_without_backward(library, name, launch)
    else:
        register_with_backward(library, name, backward, saves_results=saves_results)
    op = getattr(getattr(torch.ops, NAMESPACE), name)
    register_formula(op, lambda *args, **options: flops(value(*args, **options)))
    overload: torch._ops.OpOverload = op.default

    def direct(*args: Any, **options: Any) -> Any:
        is_watched = profiler._is_profiler_enabled or _num_dispatch_modes()
        return (overload if is_watched else launch)(*args, **options)

    op.direct = direct
    return overload


def _constant(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function whose result a compiler takes for a constant, without looking inside.

    ``torch.compiler.assume_constant_result`` does the same, and imports all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def load_traced(op: str, impl: str) -> bool:
    """Enter the launcher of a traced implementation into LAUNCHERS; a compiler does not see how."""
    if impl not in LAUNCHERS[op]:
        LAUNCHERS[op][impl] = REGISTERED[op][impl].load()
    return True


def first_impl(op: str, device: torch.device, dtype: torch.dtype, **sizes: int) -> str:
    """Find the first implementation of an op that serves and needs no plan, "torch" at last.

    A graph is of these sizes alone, also one that ``dynamic=True`` asks for.
    """
    return _first_impl(op, device, dtype, **{name: index(size) for name, size in sizes.items()})


@_constant
def _first_impl(op: str, device: torch.device, dtype: torch.dtype, **sizes: int) -> str:
    need = Need(device=device, dtype=dtype, sizes=sizes)
    names = (
        name
        for name, each in REGISTERED[op].items()
        if not each.capability.why_not(need) and (each.planner is None or not each.needs_plan)
    )
    return next(names, "torch")


def same_or_first_impl(
    op: str, impl: str, device: torch.device, dtype: torch.dtype, **sizes: int
) -> str:
    """Take an op's implementation of this name, else the first that serves."""
    return impl if impl in REGISTERED[op] else first_impl(op, device, dtype, **sizes)


def _fake_like(schema: torch.FunctionSchema, names: Sequence[str]) -> Callable[..., Any]:
    """Empty outputs like the arguments of these names; None where there are none."""
    places = {argument.name: i for i, argument in enumerate(schema.arguments)}
    given = [places[name] for name in names]

    def fake(*args: Any, **_options: Any) -> Any:
        outputs = tuple(args[i].new_empty(args[i].shape) for i in given)
        return outputs[0] if len(outputs) == 1 else outputs or None

    return fake


def plain_reads() -> AbstractContextManager[object]:
    """Read shapes, dtypes and strides past a ``TorchFunctionMode``, which an uncompiled step has.

    Each read would be a call of the mode, of a microsecond: a mixer's op reads fifty.
    """
    if torch.compiler.is_compiling() or not torch._C._is_torch_function_mode_enabled():
        return nullcontext()
    context: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return context


def check_shapes(expected: Mapping[str, tuple[Tensor | None, Sequence[int]]]) -> None:
    """Raise ValueError for the first tensor whose shape is not the expected one."""
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def check_groups(what: str, size: int, num_groups: int, groups: str) -> None:
    """Raise ValueError unless groups divide a size: ``what`` a multiple of the 2 ``groups``."""
    if num_groups < 1 or size % num_groups:
        raise ValueError(f"{what} a multiple of the {num_groups} {groups}, got {size}")


def check_dtypes(expected: Mapping[str, tuple[Tensor | None, torch.dtype]]) -> None:
    """Raise ValueError for the first tensor whose dtype is not the expected one."""
    for name, (tensor, dtype) in expected.items():
        if tensor is not None and tensor.dtype != dtype:
            # Autocast rounds what comes from a matrix product and nothing else that an op takes.
            autocast = torch.is_autocast_enabled(tensor.device.type)
            why = "; leave torch.autocast, which casts some of them alone" if autocast else ""
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}{why}")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raise ValueError for the first tensor that is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def check_scale(scale: float) -> None:
    """Raise ValueError unless logits grow with the products that they are made of."""
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")


def check_planned(
    impl: str, implementations: Mapping[str, Implementation], planned: Sequence[Tensor]
) -> None:
    """Raise ValueError where an implementation is not given the plan that it needs, or one that
    plans nothing is given one."""
    plans = implementations[impl].planner is not None
    if plans and implementations[impl].needs_plan and not planned:
        raise ValueError(f"impl {impl!r} must be given what its planner planned, got nothing")
    if planned and not plans:
        raise ValueError(f"impl {impl!r} plans nothing, got {len(planned)} planned tensors")


def given(planned: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Make the argument ``planned`` of an op; leave it out where nothing was planned."""
    return {"planned": list(planned)} if planned else {}


def check_impl(
    impl: str,
    implementations: Mapping[str, Implementation],
    device: torch.device,
    sizes: Mapping[str, int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    features: frozenset[str] | None = None,
) -> None:
    """Raise ValueError when ``impl`` names no implementation, or one for other tensors.

    Args:
        impl: the name that the caller gave.
        implementations: of the op.
        device: of the tensors.
        sizes: those that a capability may limit.
        dtype: that of the tensors, where implementations differ in what they take.
        features: that the arguments want, where implementations differ in those.
    """
    if impl not in implementations:
        raise ValueError(f"impl must be one of {list(implementations)}, got {impl!r}")
    capability = implementations[impl].capability
    if device.type not in capability.devices:
        raise ValueError(
            f"impl {impl!r} runs on {sorted(capability.devices)}, got tensors on {device}"
        )
    if dtype is not None and dtype not in capability.dtypes:
        names = sorted(map(str, capability.dtypes))
        raise ValueError(f"impl {impl!r} takes {names}, got tensors of {dtype}")
    if features is not None and (reasons := capability.features_refused(features)):
        raise ValueError(f"impl {impl!r} cannot take these arguments: {'; '.join(reasons)}")
    if reasons := capability.sizes_refused(sizes or {}):
        raise ValueError(f"impl {impl!r} cannot take these sizes: {'; '.join(reasons)}")
