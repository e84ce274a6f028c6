"""Tensors at fixed addresses that a captured or compiled step reads, refreshed at every step.

All leaves of the step's value live in one buffer, which holds the largest bucket. Each bucket packs
its leaves at the buffer's head. So a refresh is one copy to the device, of no more bytes than the
step has. It writes all that the step reads, so that nothing of another step is left over. A leaf
that stays on the host (``pytrees.OnHost``) has its storage there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hybrid.pytrees import OnHost, tensors_of

_ALIGNMENT = 64  # bytes; vector loads of generated code may assume it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Views of a bucket: host views to write its leaves to, and the value that the step reads."""

    host: list[Tensor]
    value: Any
    num_bytes: int


class StaticInputs:
    """Static storage for values of one pytree structure, of tensors and None.

    Args:
        largest: a value whose leaves have their largest possible sizes. Leaves that are the same
            tensor stay one tensor.
        device: device on which the step runs.
    """

    @torch.inference_mode(mode=False)
    def __init__(self, largest: Any, device: torch.device) -> None:
        leaves, self._structure = tensors_of(largest)
        first: dict[int, int] = {}
        self._source = [first.setdefault(id(leaf), i) for i, leaf in enumerate(leaves)]
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._on_host = _leaves_on_host(self._structure)
        self._capacity = {i: leaves[i].nbytes for i in first.values()}
        self._host = torch.zeros(
            sum(map(_aligned, self._capacity.values())),
            dtype=torch.uint8,
            device="cpu",
            pin_memory=device.type == "cuda",
        )
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Size of the packed buffer on the device."""
        return self._device.nbytes

    @property
    def num_buckets(self) -> int:
        """Number of buckets so far."""
        return len(self._layouts)

    def refresh(self, value: Any) -> Any:
        """Copy a value in, and return the same value made of views of the static storage.

        Args:
            value: host tensors, in the structure of ``largest``, no leaf larger than there.

        Raises:
            ValueError: another structure, a leaf that does not fit, or two leaves that are not
                the same tensor although they were in ``largest``.
        """
        leaves, structure = tensors_of(value)
        if structure != self._structure:
            raise ValueError(f"expected a value of structure {self._structure}, got {structure}")
        for i, source in enumerate(self._source):
            if leaves[i] is not leaves[source]:
                raise ValueError(f"leaf {i} must be the same tensor as leaf {source}")
        unique = [leaves[i] for i in self._capacity]
        layout = self._layouts.get(key := tuple((leaf.shape, leaf.dtype) for leaf in unique))
        if layout is None:
            layout = self._layouts[key] = self._lay_out(value, leaves)
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the host's side
        torch._foreach_copy_(layout.host, unique)
        if self._copied is not None:
            self._device[: layout.num_bytes].copy_(
                self._host[: layout.num_bytes], non_blocking=True
            )
            self._copied.record(torch.cuda.current_stream(self._device.device))
        return layout.value

    def host_values(self, value: Any) -> tuple[tuple[int, ...], ...]:
        """List the values of leaves that stay on the host; a captured graph is only for these."""
        if not self._on_host:
            return ()
        leaves, _ = tensors_of(value)
        return tuple(tuple(leaves[i].tolist()) for i in self._on_host)

    def _lay_out(self, value: Any, leaves: list[Tensor]) -> _Layout:
        """Make the views for a value with leaves of these shapes; called once for each bucket."""
        offsets, end = {}, 0
        for i, capacity in self._capacity.items():
            leaf = leaves[i]
            if leaf.nbytes > capacity or leaf.dtype != self._dtypes[i]:
                raise ValueError(
                    f"leaf {i} must be {self._dtypes[i]} of at most {capacity} bytes, "
                    f"got {leaf.dtype} of {leaf.nbytes}"
                )
            offsets[i] = end
            end += _aligned(leaf.nbytes)

        def views(buffer: Tensor) -> dict[int, Tensor]:
            return {i: _view(buffer, offset, leaves[i]) for i, offset in offsets.items()}

        on_host, on_device = views(self._host), views(self._device)
        on_device |= {i: on_host[i] for i in self._on_host}
        in_order = iter([on_device[i] for i in self._source])
        return _Layout(
            host=list(on_host.values()),
            value=pytree.tree_map_only(Tensor, lambda _: next(in_order), value),
            num_bytes=end,
        )


def _aligned(num_bytes: int) -> int:
    """Round a size up to the place where the next leaf may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _leaves_on_host(structure: Sequence[object]) -> tuple[int, ...]:
    """Find the leaves, counted in order, that stand in an ``OnHost``."""
    held = [holder is OnHost for holder, node in pairwise([None, *structure]) if node is Tensor]
    return tuple(i for i, is_on_host in enumerate(held) if is_on_host)


def _view(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
