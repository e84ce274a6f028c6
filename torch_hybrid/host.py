"""The host: memory of weights and pools, settings that a server wants, numbers for its steps."""

from __future__ import annotations

import ctypes
import math
import mmap
import platform
import weakref
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from struct import error as StructError
from struct import pack
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.errors import CapacityError

_M_TRIM_THRESHOLD = -1  # glibc's <malloc.h>
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30
_MANY_INTS = 64  # from so many on, two copies cost less than a look at the type of each


def tune_allocator() -> bool:
    """Let malloc keep large temporaries instead of giving them back to the kernel.

    By default glibc maps every allocation over some 100 kB to 32 MB afresh and unmaps it when it
    is freed, so that each activation of a step is paged in and zeroed again by the kernel. With
    both thresholds at 1 GiB, freed memory is reused. The process then stays as large as its
    largest step was. For the whole process, from now on; call it before the model is loaded.

    Returns:
        Whether it took effect: on Linux with glibc only.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        mallopt(setting, _KEPT_BYTES) == 1 for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)
    )


def trim() -> None:
    """Give memory that is free back to the kernel: what loading or compiling took and left.

    Malloc keeps it otherwise, all the more where ``tune_allocator`` was called. Nothing happens
    without glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def int_tensor(values: Iterable[int], dtype: torch.dtype) -> Tensor:
    """As ``torch.tensor`` for int32 and int64, in a third of its time: it looks for their type."""
    kind = "i" if dtype is torch.int32 else "q"
    if isinstance(values, array) and values.typecode == kind:
        packed = values
    elif isinstance(values, list):
        packed = packed_ints(values, kind)
    else:
        packed = array(kind, values)
    if not packed:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(packed, dtype=dtype)


def packed_ints(values: Sequence[int], kind: str) -> array[int]:
    """``array(kind, values)``, of many in half of its time.

    Raises:
        TypeError: one is no integer.
        OverflowError: one is too large.
    """
    if len(values) < _MANY_INTS:
        return array(kind, values)
    try:
        return array(kind, pack(f"{len(values)}{kind}", *values))
    except StructError:  # which does not say what is wrong
        return array(kind, values)


def plain_ints(values: list[Any]) -> array[int] | None:
    """``array("q", values)`` of ints; None where some are something else (bools too) or too large.

    Of many ints, in half of the time of a look at the type of each: a sum is an int only of ints
    and of bools.
    """
    try:
        packed = packed_ints(values, "q")
        is_plain = type(sum(values)) is int and not has_bools(values, packed)
    except (TypeError, OverflowError):
        return None
    return packed if is_plain else None


def has_bools(values: Sequence[Any], packed: array[int]) -> bool:
    """Whether there are some among values, which an array of them takes for 0 and 1."""
    if len(values) < _MANY_INTS:
        return bool in map(type, values)
    ints = int_tensor(packed, torch.int64)
    if ints.min() > 1:
        return False
    return any(type(values[place]) is bool for place in (ints <= 1).nonzero().flatten().tolist())


def joined(rows: Sequence[Sequence[int]]) -> Tensor:
    """The rows of ints one after another, [T] int64; of one array of type "q", its memory.

    Raises:
        OverflowError: one has more than 64 bits.
    """
    if len(rows) == 1:
        return int_tensor(rows[0], torch.int64)
    if sum(map(len, rows)) < 4 * len(rows):  # one by one: to add an array takes longer
        return int_tensor(chain.from_iterable(rows), torch.int64)
    packed = array("q")
    for row in rows:
        packed.extend(row)
    return int_tensor(packed, torch.int64)


_HUGE_PAGE = 2 << 20  # bytes; on x86-64, and on Arm with pages of 4 KiB
_ALIGNMENT = 64  # bytes; a cache line
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class _HugePages:
    """Zeroed memory of this process alone, in huge pages where the kernel has them.

    A step streams all weights and many states: in pages of 4 KiB, it waits for translations of
    addresses too. Tensors that are cut from it keep it.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=flags)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._used = -start % _HUGE_PAGE

    def pin(self) -> None:
        """Let GPUs read it in place. (Torch's own pinned memory is a power of two in size.)

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
        """A tensor with a storage of its own, at the start of a cache line."""
        count, first = math.prod(shape), self._used
        self._used += _padded(count * dtype.itemsize)
        if count == 0:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=first).view(shape)


def _padded(nbytes: int) -> int:
    """Whole cache lines."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _has_huge_pages(device: torch.device) -> bool:
    return device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.zeros``, in huge pages where the host has them and the tensor fills one."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE_PAGE or not _has_huge_pages(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    return _HugePages(nbytes).take(shape, dtype)


def weight_memory(
    sizes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device
) -> list[Tensor]:
    """Tensors of these shapes and dtypes, to be filled; on the host in one stretch of huge pages.

    Each has a storage of its own.
    """
    if not sizes or not _has_huge_pages(device):
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]
    memory = _huge_pages_for(sizes)
    return [memory.take(shape, dtype) for shape, dtype in sizes]


def pinned_memory(sizes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """As ``weight_memory`` on the host, for GPUs to read in place.

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
    """Move the parameters of ``module`` that are on the host to memory of its own, in huge pages.

    Weights that a loader mapped from a file are copied; the file can then be unmapped. Each
    original is freed as soon as its copy is made, unless somebody else keeps it.
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
    """Put plain copies in the place of weights and buffers that were made in inference mode.

    Outside of that mode nobody can write such tensors, cut them in place or trace them. A tensor
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
