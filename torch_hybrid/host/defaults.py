"""Default device and dtype of new tensors, for one thread.

``torch.set_default_dtype`` holds for the whole process, and so does the device of
``with torch.device``, where compiled code looks it up. A function mode on the thread's own stack
leaves other threads alone, however it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

_CASTS = (Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type)
_SELECTIONS = (torch.where, Tensor.where)  # their tensor chooses between two numbers


class Defaults(TorchFunctionMode):
    """Default device and dtype of the tensors that this thread makes within the mode.

    Args:
        device: device of tensors that are made without one; None changes nothing.
        dtype: dtype of floats that are made without one, and of floats that torch computes from
            integers alone; None changes nothing.
    """

    def __init__(
        self, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._device, self._dtype = device, dtype

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with the default device and dtype where it is given none."""
        given = dict(kwargs or {})
        is_factory = func in _device_constructors()
        if self._device is not None and is_factory and given.get("device") is None:
            given["device"] = self._device
        result = func(*args, **given)
        if self._dtype is None or not _is_by_default(func, result, args, given):
            return result
        if result.dtype is self._dtype:
            return result
        if is_factory:
            return func(*args, **{**given, "dtype": self._dtype})
        as_float = self._number_as_float if func in _SELECTIONS else self._tensor_as_float
        return func(*pytree.tree_map(as_float, args), **pytree.tree_map(as_float, given))

    def _tensor_as_float(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) else value

    def _number_as_float(self, value: Any) -> Any:
        is_number = isinstance(value, float)
        return torch.tensor(value, dtype=self._dtype, device="cpu") if is_number else value


def on_meta() -> Defaults:
    """Make tensors on the meta device, without memory, where no device is named."""
    return Defaults(device=torch.device("meta"))


def _is_by_default(func: Any, result: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """Tell whether a result has the process's default dtype because no argument has another."""
    if not isinstance(result, Tensor) or result.dtype is not torch.get_default_dtype():
        return False
    if func in _CASTS or isinstance(func, OpOverload | OpOverloadPacket):
        return False
    leaves = pytree.tree_leaves((args, given))
    return not any(isinstance(x, torch.dtype) or _is_float(x) for x in leaves)


def _is_float(value: Any) -> bool:
    """Tell whether a value carries a float dtype: a tensor of floats, or any NumPy value."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return type(value).__module__ == "numpy"
