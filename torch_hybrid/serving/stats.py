"""Counts of the work that an engine has done, and of what it still has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_hybrid.host.shown import Shown
from torch_hybrid.serving.prefix_cache.stats import PrefixStats
from torch_hybrid.serving.speculation import DraftCounts


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineStats(Shown):
    """Counts since the engine was made; requests, slots and pages are counted as of now."""

    num_running: int  # requests that hold a sequence
    num_waiting: int
    num_steps: int
    num_tokens: int  # generated
    num_preemptions: int
    seconds: float  # spent in steps; steps that raised are not counted
    free_slots: int  # of the runner
    num_pages: int  # of the runner
    free_pages: int  # of the runner, with those that a prefix cache gives back when needed
    prefix_cache: PrefixStats | None  # None without a prefix cache
    drafts: DraftCounts  # zeros without speculation

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second of steps; 0 before the first."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def facts(self) -> Mapping[str, str]:
        """Choose the counts that ``repr`` shows."""
        facts = {
            "requests": f"{self.num_running} running and {self.num_waiting} waiting",
            "tokens": f"{self.num_tokens} in {self.num_steps} steps, {self.tokens_per_s:.1f}/s",
            "free": f"{self.free_slots} slots and {self.free_pages} pages",
        }
        if (kept := self.prefix_cache) is not None:
            facts["prefixes"] = f"{kept.num_hits} hits of {kept.num_starts} starts"
        if self.drafts.steps:
            facts["drafts"] = f"{self.drafts.accepted} of {self.drafts.drafted} accepted"
        return facts
