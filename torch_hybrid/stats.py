"""What an engine has done and has to do."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid.prefix_cache.stats import PrefixStats
from torch_hybrid.speculation import DraftCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made; of requests, slots and pages, those of now."""

    num_running: int  # requests that hold a sequence
    num_waiting: int
    num_steps: int
    num_tokens: int  # generated
    seconds: float  # in steps, those that raised left out
    free_slots: int  # of the runner
    free_pages: int  # of the runner, those included that a prefix cache gives back when needed
    prefix_cache: PrefixStats | None  # None where none is kept
    drafts: DraftCounts  # zeros where nothing is drafted

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated in a second of steps; 0 before the first."""
        return self.num_tokens / self.seconds if self.seconds else 0.0
