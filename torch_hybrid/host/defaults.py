"""Device and dtype of tensors whose maker names neither, for one thread.

``torch.set_default_dtype`` is of the whole process, and ``with torch.device`` notes its device for
the whole process too, where compiled code looks it up. A mode on the thread's own stack leaves
other threads alone, whichever way it ends.
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
_SELECTIONS = (torch.where, Tensor.where)  # whose tensor says which of two numbers is taken


class Defaults(TorchFunctionMode):
    """Default device and dtype of what this thread makes within it.

    Args:
        device: of tensors whose maker names none; None leaves it as it is.
        dtype: of floats whose maker names none, and of what torch computes of integers alone; None
            leaves it as it is.
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
        """Call ``func`` with what it is not given."""
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
    """Make tensors without memory, where no device is named."""
    return Defaults(device=torch.device("meta"))


def _is_by_default(func: Any, result: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """Whether a result has the process's default dtype because nothing says another."""
    if not isinstance(result, Tensor) or result.dtype is not torch.get_default_dtype():
        return False
    if func in _CASTS or isinstance(func, OpOverload | OpOverloadPacket):
        return False
    leaves = pytree.tree_leaves((args, given))
    return not any(isinstance(x, torch.dtype) or _is_float(x) for x in leaves)


def _is_float(value: Any) -> bool:
    """Whether a value brings a dtype of floats of its own: a tensor, or an array of numpy."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return type(value).__module__ == "numpy"
