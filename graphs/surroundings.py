"""What a caller set for its own code stays out of the runner's: dtypes, devices, modes.

A default dtype or device changes what a factory call makes, autocast changes what a product
computes, inference mode makes tensors that can never be written again outside of it; and compiled
code is guarded by each of them, so that a step would be compiled again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.utils._device as default_device
from torch.overrides import _get_current_function_mode_stack


@contextmanager
def calm(device: torch.device) -> Iterator[None]:
    """Run a block with torch's own defaults, whatever surrounds it, and put that back.

    The default dtype is float32 and no default device is set, there is no autocast on ``device``
    and no inference mode. Deterministic algorithms stay as the caller set them.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        if torch.get_default_dtype() is not torch.float32:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        while default_device.CURRENT_DEVICE is not None:  # torch has no public way to set it aside
            modes = _get_current_function_mode_stack()
            context = next(m for m in modes if isinstance(m, default_device.DeviceContext))
            stack.callback(context.__enter__)
            context.__exit__(None, None, None)
        yield
