"""Autograd's view of this package's ops: they run, and a backward through one is refused.

A functional op, which mutates nothing, may have a backward: an op of its own, through which a
further backward is refused.

A forward with gradients switched on works, since ``torch.no_grad()`` is easily forgotten. What it
returns asks for gradients where an input does, and a backward that comes there raises
NotImplementedError with the op's name. In a compiled graph the refusal is an op of its own, so that
the forward compiles and runs as well. Transforms of ``torch.func`` are refused where they begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.autograd import forward_ad

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_LIBRARY = torch.library.Library("torch_hybrid", "FRAGMENT")


def register_without_backward(
    library: torch.library.Library, qualified: str, launch: Callable[..., Any]
) -> None:
    """Register what the op ``qualified`` of ``library`` does for autograd and for ``torch.func``.

    ``launch`` is what it does on tensors of a CPU or of CUDA. Nothing of this is called under
    ``torch.inference_mode()``.
    """
    name, _, overload = qualified.partition(".")
    op_name = f"{library.ns}::{name}"

    def run(keyset: Any, *args: Any, **options: Any) -> Any:
        def redispatch() -> Any:
            # Found when called: one that was found before its other overloads are defined makes
            # torch abort where the process ends.
            op = getattr(getattr(getattr(torch.ops, library.ns), name), overload or "default")
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & _AFTER_AUTOGRAD, *args, **options)

        return _without_backward(redispatch, op_name, args)

    def run_plain(keyset: Any, *args: Any, **options: Any) -> Any:
        if keyset.has(DispatchKey.Python):  # a fake tensor, or a mode that watches
            return run(keyset, *args, **options)
        if not _is_recording():  # without a second way through the dispatcher
            return launch(*args, **options)
        return _without_backward(lambda: launch(*args, **options), op_name, args)

    library.impl(qualified, run, "Autograd", with_keyset=True)
    for device in ("CPU", "CUDA"):
        library.impl(qualified, run_plain, f"Autograd{device}", with_keyset=True)
    _refuse_transforms(library, qualified, f"{op_name} is inference only")


def register_with_backward(
    library: torch.library.Library,
    name: str,
    backward: Callable[..., Any],
    *,
    saves_results: int = 0,
) -> None:
    """Register the backward of a functional op, which saves all tensors that the op is given.

    Args:
        library: of the op.
        name: of the op.
        backward: takes the context, with ``saved_tensors`` and ``options``, and the gradient of
            each result, None where nothing asks for it. Returns that of each tensor, or None.
        saves_results: how many results can be differentiated, the first ones, where all are saved
            after what is given; 0 saves none, and all can be.
    """

    def save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        if saves_results:
            ctx.mark_non_differentiable(*output[saves_results:])
        ctx.save_for_backward(*inputs, *(output if saves_results else ()))
        ctx.options = keyword_only_inputs
        ctx.set_materialize_grads(False)  # a state's gradient is large, and seldom there

    op_name = f"{library.ns}::{name}"
    torch.library.register_autograd(op_name, backward, setup_context=save, lib=library)
    _refuse_transforms(library, name, f"{op_name} differentiates by backward() alone")


def check_no_tangents(name: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError for a tensor that forward-mode differentiation follows."""
    if forward_ad._current_level >= 0 and any(x is not None and _has_tangent(x) for x in tensors):
        raise NotImplementedError(f"{name} has no forward-mode derivative; use a backward")


def _refuse_transforms(library: torch.library.Library, qualified: str, why: str) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"{why}: no transform of torch.func (grad, vjp, jvp, vmap) can pass through it"
        )

    # The key that every transform sets while it runs.
    library.impl(qualified, refuse, "FuncTorchDynamicLayerFrontMode")


def define_made_of(qualified: str) -> None:
    """Define an op that copies ``result`` and stands between it and ``sources`` for autograd."""
    schema = f"{qualified}(Tensor result, Tensor[] sources) -> Tensor"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(qualified, _copy, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{qualified}", _copy, lib=_LIBRARY)
    register_without_backward(_LIBRARY, qualified, _copy)


def _copy(result: Tensor, sources: Sequence[Tensor]) -> Tensor:
    return result.clone()


def _is_recording() -> bool:
    # The level is that of forward-mode differentiation, which no_grad does not switch off.
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def _without_backward(forward: Callable[[], Any], name: str, args: Iterable[Any]) -> Any:
    if _is_recording() and (sources := asking_for_gradients(args)):
        return _WithoutBackward.apply(forward, name, *sources)  # type: ignore[no-untyped-call]
    return forward()


def asking_for_gradients(args: Iterable[Any]) -> list[Tensor]:
    """List the tensors among ``args``, and in lists among them, that autograd follows."""
    found = []
    for arg in args:
        if isinstance(arg, list | tuple):
            found += asking_for_gradients(arg)
        elif isinstance(arg, Tensor) and (arg.requires_grad or _has_tangent(arg)):
            found.append(arg)
    return found


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


class _WithoutBackward(torch.autograd.Function):
    """Stands in autograd's graph between what ``forward`` returns and ``sources``."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[], Any], name: str, *sources: Tensor) -> Any:
        ctx.name, ctx.shapes = name, [source.shape for source in sources]
        return forward()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refused = torch.ops.torch_hybrid.refuse_backward(grads[0], ctx.name)
        return None, None, *[refused.expand(shape) for shape in ctx.shapes]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        raise NotImplementedError(
            f"{ctx.name} is inference only: it has no forward-mode derivative"
        )


def _refuse_backward(grad: Tensor, op: str) -> Tensor:
    if op.endswith("_backward"):
        raise NotImplementedError(
            f"{op} has no derivative: {op.removesuffix('_backward')} can be differentiated once. "
            "Leave out create_graph=True, or detach its gradients"
        )
    raise NotImplementedError(
        f"{op} is inference only: it has no backward. Run the forward under torch.no_grad() or "
        "torch.inference_mode(), or detach what goes into it"
    )


_LIBRARY.define(
    "refuse_backward(Tensor grad, str op) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.impl("refuse_backward", _refuse_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torch_hybrid::refuse_backward", lambda grad, op: grad.new_empty(()), lib=_LIBRARY
)
