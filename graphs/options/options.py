"""What a runner is asked for, as a value, and the runners that are made to measure "auto"."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from torch_hybrid.backends.select import Backends
from torch_hybrid.batch import Batch
from torch_hybrid.caches.sequence import Sequence as HeldSequence
from torch_hybrid.graphs.capturing.capture_policy import CudaGraphs
from torch_hybrid.graphs.options.check_options import KvDtype, KvTokens
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.stepping.background import Compile
from torch_hybrid.graphs.two_batch import OverlapPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of ``Runner``, beside its model, which says what they are."""

    max_seqs: int
    max_tokens: int
    kv_tokens: KvTokens
    page_size: int
    max_snapshots: int
    kv_dtype: KvDtype
    kv_scales: Mapping[int, Tensor] | None
    compile: Compile
    cuda_graphs: CudaGraphs
    two_batch_overlap: Literal["off", "on", "auto"] | OverlapPolicy
    backends: Backends | None
    prefill: bool
    max_drafts: int
    takes_embeds: bool | None
    batch_invariant: bool
    check_batch: Callable[[Batch], None] | None
    passes: Sequence[Pass]
    artefact: str | os.PathLike[str] | None


class TrialRunner(Protocol):
    """What is asked of a runner whose steps are measured."""

    max_seqs: int
    max_tokens: int
    prefill: bool

    def new_sequences(self, count: int) -> list[HeldSequence]: ...

    def free(self, seqs: list[HeldSequence]) -> None: ...

    def extend(self, seqs: list[HeldSequence], tokens: list[list[int]]) -> Tensor: ...


MakeTrial = Callable[..., TrialRunner]  # of a model and some of its options, as ``Runner``
