"""What a caller set for its own code stays out of the runner's: dtypes, devices, modes.

A default dtype or device changes what a factory call makes, autocast changes what a product
computes, inference mode makes tensors that can never be written again outside of it; and compiled
code is guarded by each of them, so that a step would be compiled again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.utils._device as default_device
from torch.overrides import _pop_mode, _push_mode


def calm(device: torch.device) -> AbstractContextManager[None]:
    """A context with torch's own defaults, whatever surrounds it, which is then put back.

    The default dtype is float32 and no default device is set, there is no autocast on ``device``
    and no inference mode. Deterministic algorithms stay as the caller set them.
    """
    is_calm = (
        torch.get_default_dtype() is torch.float32
        and not torch._C._len_torch_function_stack()  # a default device is a mode on that stack
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled(device.type)
    )
    return _NOTHING_TO_DO if is_calm else _calmed(device)


_NOTHING_TO_DO = nullcontext()


@contextmanager
def _calmed(device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(_without_default_device())
        yield


@contextmanager
def _without_default_device() -> Iterator[None]:
    """Set aside what ``set_default_device`` or ``with device`` put there.

    torch has no public way to do so.
    """
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    kept = [mode for mode in modes if not isinstance(mode, default_device.DeviceContext)]
    current, default_device.CURRENT_DEVICE = default_device.CURRENT_DEVICE, None
    for mode in reversed(kept):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)
        default_device.CURRENT_DEVICE = current
