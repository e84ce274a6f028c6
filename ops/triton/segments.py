"""Overlap of two launches on two streams, of which one walks what the other has prepared."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch

# Launches a kernel for the blocks from the first on, up to and without the last.
Launch = Callable[[int, int], None]


def side_by_side(
    prepare: Launch, walk: Launch, num_blocks: int, num_segments: int, device: torch.device
) -> None:
    """Prepare the segments of blocks in turn, and walk each while the next one is prepared.

    A walk of few sequences mostly waits and leaves most SMs idle, which prepare the next segment.
    Both are done when the current stream goes on.
    """
    segments = pairwise(num_blocks * i // num_segments for i in range(num_segments + 1))
    if num_segments == 1 or device.type != "cuda":
        for first, last in segments:
            prepare(first, last)
            walk(first, last)
        return
    main = torch.cuda.current_stream(device)
    side = _side_stream(device, main.cuda_stream)
    for first, last in segments:
        prepare(first, last)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            walk(first, last)
    main.wait_stream(side)


@cache
def _side_stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    """Make the side stream of the caller's stream at address ``beside``.

    Its priority is high, since torch takes such streams from another pool: it is never the
    caller's.
    """
    return torch.cuda.Stream(device, priority=-1)
