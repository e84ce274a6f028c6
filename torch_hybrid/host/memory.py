"""Memory of weights and pools on the host: huge pages, pinned pages, plain tensors."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_hybrid.errors import CapacityError

_HUGE_PAGE = 2 << 20  # bytes; on x86-64, and on Arm with pages of 4 KiB
_ALIGNMENT = 64  # bytes; a cache line
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class _HugePages:
    """Zeroed memory of this process alone, in huge pages where the kernel has them.

    A step streams all weights and many states. In pages of 4 KiB it also waits for TLB misses.
    Tensors that are cut from this memory keep it alive.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=flags)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._used = -start % _HUGE_PAGE

    def pin(self) -> None:
        """Pin the memory, so that GPUs read it in place.

        Torch's own pinned memory is not used: it rounds each size up to a power of two.

        Raises:
            CapacityError: the driver pins no more.
        """
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        runtime, num_bytes = torch.cuda.cudart(), len(self._memory)
        if error := int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)):
            raise CapacityError(f"CUDA cannot pin {num_bytes:,} bytes of the host: error {error}")
        unpin = weakref.finalize(self._memory, runtime.cudaHostUnregister, address)
        unpin.atexit = False  # the driver may be gone by then

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Cut off a tensor with a storage of its own, at the start of a cache line."""
        count, first = math.prod(shape), self._used
        self._used += _padded(count * dtype.itemsize)
        if count == 0:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=first).view(shape)


def _padded(nbytes: int) -> int:
    """Round a size up to whole cache lines."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _has_huge_pages(device: torch.device) -> bool:
    return device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of zeros, in huge pages if the host has them and the tensor fills one."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE_PAGE or not _has_huge_pages(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    return _HugePages(nbytes).take(shape, dtype)


def weight_memory(
    sizes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device
) -> list[Tensor]:
    """Allocate uninitialised tensors of these shapes and dtypes, each with its own storage.

    On the host they share one stretch of huge pages.
    """
    if not sizes or not _has_huge_pages(device):
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]
    memory = _huge_pages_for(sizes)
    return [memory.take(shape, dtype) for shape, dtype in sizes]


def pinned_memory(sizes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Allocate host tensors like ``weight_memory``, pinned for GPUs to read in place.

    Raises:
        CapacityError: the driver pins no more.
    """
    if not sizes or not _has_huge_pages(torch.device("cpu")):
        return [
            torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True) for shape, dtype in sizes
        ]
    memory = _huge_pages_for(sizes)
    memory.pin()
    return [memory.take(shape, dtype) for shape, dtype in sizes]


def _huge_pages_for(sizes: Sequence[tuple[Sequence[int], torch.dtype]]) -> _HugePages:
    return _HugePages(sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in sizes))


def keep_weights(module: nn.Module) -> None:
    """Move a module's parameters on the host to huge pages of its own.

    Weights that a loader mapped from a file are copied; the file can then be unmapped. Each
    original is freed as soon as it is copied, unless something else refers to it.
    """
    host = torch.device("cpu")
    weights = [weight for weight in module.parameters() if weight.device == host]
    if not _has_huge_pages(host):
        return
    memory = weight_memory([(weight.shape, weight.dtype) for weight in weights], host)
    for weight, own in zip(weights, memory, strict=True):
        own.copy_(weight.detach())
        weight.data = own


def replace_inference_tensors(module: nn.Module) -> None:
    """Replace weights and buffers that were made in inference mode by plain copies.

    Outside of that mode nobody can write such tensors, split them in place or trace them. A tensor
    that modules share stays shared.
    """
    copies: dict[Tensor, Tensor] = {}
    with torch.inference_mode(mode=False):
        for owner in module.modules():
            weights = owner.named_parameters(recurse=False, remove_duplicate=False)
            buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in (*weights, *buffers):
                if not tensor.is_inference():
                    continue
                if tensor not in copies:
                    copies[tensor] = _plain_copy(tensor)
                setattr(owner, name, copies[tensor])


def _plain_copy(tensor: Tensor) -> Tensor:
    copy = tensor.clone().detach()
    is_weight = isinstance(tensor, nn.Parameter)
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if is_weight else copy
