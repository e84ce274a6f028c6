"""Ranks that load together: what fails on one fails on all, and none waits for it."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist


class Together:
    """Runs its body on every rank of a group; all leave it together, or all with an error.

    Args:
        group: the ranks; None for a process by itself.

    Raises:
        ValueError: the body failed on another rank; the message names it and says why.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._group is None:
            return
        own = None if kind is None else f"{kind.__name__}: {error}"
        told: list[str | None] = [None] * self._group.size()
        try:
            dist.all_gather_object(told, own, group=self._group)
        except RuntimeError:  # a rank is gone
            if error is None:
                raise
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if error is None and failed:
            raise ValueError(f"the model was not loaded on every rank; {'; '.join(failed)}")
