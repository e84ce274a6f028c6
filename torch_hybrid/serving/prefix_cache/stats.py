"""Counts of an engine's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """Counts since the engine was made; snapshots and bytes are counted as of now.

    A preempted request starts again, and counts again.
    """

    num_starts: int  # of requests
    num_hits: int  # starts from a kept prefix
    num_hit_tokens: int  # tokens that hits did not run again
    num_start_tokens: int  # history tokens of all starts, hits included
    num_snapshots: int  # on the device now
    num_bytes: int  # of states and pages that only the cache holds now
    num_evictions: int
    num_host_bytes: int  # of copies on the host now
    num_returned: int  # snapshots that came back from the host
