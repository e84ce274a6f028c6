"""Isolation from the dtypes, devices and modes that a caller set for its own code.

A default dtype or device changes the tensors that a factory call makes. Autocast changes the
result of a GEMM. Inference mode makes tensors that nobody can write outside of it. Compiled code is
guarded by each of them, so a step would be compiled again. All settings here hold for the calling
thread alone: other threads may run the caller's own code meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import Defaults

P = ParamSpec("P")
R = TypeVar("R")

_AUTOCASTS = ("cpu", "cuda")  # devices with autocast


def isolated() -> AbstractContextManager[None]:
    """Enter torch's own defaults, whatever the caller has set; restore the caller's at the end.

    Within, the default dtype is float32, and no default device, autocast or inference mode is on.
    Deterministic algorithms and gradients stay as the caller set them.

    Raises:
        UnsupportedError: a FakeTensorMode is active, so tensors would be fake.
    """
    if _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
        raise UnsupportedError(
            "torch_hybrid reads and writes real memory, and a FakeTensorMode is active: leave it "
            "before the call"
        )
    is_isolated = (
        torch.get_default_dtype() is torch.float32
        and not torch._C._len_torch_function_stack()  # a default device is a mode on that stack
        and not torch.is_inference_mode_enabled()
        and not any(map(torch.is_autocast_enabled, _AUTOCASTS))
    )
    return _NOTHING_TO_DO if is_isolated else _isolate()


def in_isolation(call: Callable[P, R]) -> Callable[P, R]:
    """Make each call of a function run in an ``isolated`` context."""

    @wraps(call)
    def isolated_call(*args: P.args, **options: P.kwargs) -> R:
        with isolated():
            return call(*args, **options)

    return isolated_call


_NOTHING_TO_DO = nullcontext()


@contextmanager
def _isolate() -> Iterator[None]:
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        for device in filter(torch.is_autocast_enabled, _AUTOCASTS):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_own_defaults())
        yield


@contextmanager
def _own_defaults() -> Iterator[None]:
    """Set aside what ``set_default_dtype``, ``set_default_device`` or ``with device`` has set.

    torch has no public way to do so.
    """
    modes = _get_current_function_mode_stack()
    kept = [mode for mode in modes if not isinstance(mode, DeviceContext | Defaults)]
    if torch.get_default_dtype() is not torch.float32:
        kept.append(Defaults(dtype=torch.float32))
    try:
        _exchange(kept)
        yield
    finally:
        _exchange(modes)


def _exchange(modes: list[torch.overrides.TorchFunctionMode]) -> None:
    """Replace all modes on this thread's stack."""
    for _ in range(torch._C._len_torch_function_stack()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
