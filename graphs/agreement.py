"""Agreement of the ranks that share a model: a check that they are about to run the same batch."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torch_hybrid.batch import Batch


class Agreement:
    """Comparison of batches between ranks before they run, so that a difference is a named error.

    Ranks that differ would otherwise wait for each other in a collective, or sum unrelated values.
    The check takes two small messages over the host's network.

    Args:
        group: the ranks; by default all of ``torch.distributed``. Every rank makes one.
        timeout_s: seconds that a rank waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 30.0) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.timeout = timedelta(seconds=timeout_s)
        ranks = None if group is None else dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, backend="gloo", timeout=self.timeout)

    def check(self, batch: Batch) -> None:
        """Compare a batch on the host with those of the other ranks.

        Raises:
            RuntimeError: on every rank, if batches differ; the message names ranks and fields. Or a
                rank did not come in time; the first rank's message names it.
        """
        own = _digests(batch)
        dist.monitored_barrier(self._group, timeout=self.timeout, wait_all_ranks=True)
        others = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(others, own, group=self._group)
        differing = [rank for rank, other in enumerate(others) if not torch.equal(other, others[0])]
        if differing:
            same = torch.stack(others).eq(others[0]).all(0).tolist()
            names = [f.name for f, is_same in zip(fields(Batch), same, strict=True) if not is_same]
            raise RuntimeError(
                f"the ranks must run the same batch: {', '.join(names)} of rank"
                f"{'s' * (len(differing) > 1)} {', '.join(map(str, differing))} "
                f"differ from those of rank 0"
            )


def _digests(batch: Batch) -> Tensor:
    """Digest each field of a batch by its shape and values: [number of fields] int64."""

    def digest(tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        content = hashlib.blake2b(digest_size=7)
        content.update(repr((tensor.shape, tensor.dtype)).encode())
        content.update(tensor.contiguous().numpy().tobytes())
        return int.from_bytes(content.digest())

    digests = [digest(getattr(batch, f.name)) for f in fields(Batch)]
    return torch.tensor(digests, dtype=torch.int64, device="cpu")
