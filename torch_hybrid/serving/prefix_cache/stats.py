"""What an engine's prefix cache has done and holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """Counts since the engine was made, but for what is kept now.

    A request that was preempted starts again, and counts again.
    """

    num_starts: int  # of requests
    num_hits: int  # starts from something that was kept
    num_hit_tokens: int  # that were not run again
    num_start_tokens: int  # of all starts, those of hits included
    num_snapshots: int  # that are kept now
    num_bytes: int  # of states and pages that nobody but the cache holds now
    num_evictions: int
    num_host_bytes: int  # of what was evicted and is on the host now
    num_returned: int  # starts from something that was there
