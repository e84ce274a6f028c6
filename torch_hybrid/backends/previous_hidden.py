"""The hidden state of the token before each one, which a head that drafts reads.

    decode, verify    every token's hidden state is kept, and the head does not run
    extend            the head reads the new tokens; those before them it has read, unless the step
                      verifies drafts: then it reads all of them again
    draft             it reads the tokens that were kept since, and drafts

So a head costs a step as little as the copy of a row, and a token is read beside others, when there
is something to draft. What is kept of drafts that were not accepted is written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.backends.mode import ONLY_FORM, LayerForm, Mode
from torch_hybrid.backends.select import Backends, Choice, impls_of, select
from torch_hybrid.backends.statics import Statics
from torch_hybrid.batch import KEPT, Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.previous_rows import op
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import LayerEntry

_OP = "previous_rows"
_READS = "reads"  # the form of steps whose tokens the head reads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousHiddenPlan:
    """Where the N sequences of a step keep hidden states; see ``previous_rows``."""

    cu_seqlens: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    initial_indices: Tensor  # [N]
    state_indices: Tensor  # [N]
    statics: Statics

    @property
    def is_read(self) -> bool:
        """Whether the head reads the tokens of the step."""
        return self.statics.form == _READS


register_value(PreviousHiddenPlan)


class PreviousHiddenBackend:
    """Plans what a model's head finds beside its tokens."""

    chunk_size = 0

    def __init__(
        self,
        entries: tuple[LayerEntry, ...],
        sizes: PoolSizes,
        backends: Backends,
        modes: Sequence[Mode],
    ) -> None:
        """Choose an implementation for all of ``modes``."""
        need = Need(device=sizes.device, dtype=sizes.dtype)
        self.choices: dict[Mode, tuple[Choice, ...]] = {
            mode: (select(_OP, op.IMPLEMENTATIONS, need, backends.named(_OP, "auto", mode)),)
            for mode in modes
        }
        forms = {mode: "" for mode in modes}
        if sizes.num_drafts:  # else the head never runs
            forms |= {mode: _READS for mode in modes if mode.tokens_per_seq is None}
        self._statics = {
            mode: Statics(impls_of(chosen), form=forms[mode])
            for mode, chosen in self.choices.items()
        }

    def forms(self, mode: Mode) -> tuple[LayerForm, ...]:
        """Steps of a mode all run in one form."""
        return (ONLY_FORM,)

    def form_of(self, batches: Sequence[Batch], mode: Mode) -> LayerForm:
        """As ``forms`` says."""
        return ONLY_FORM

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> PreviousHiddenPlan:
        """The plan of one step. Pure: the batch's own tensors."""
        return PreviousHiddenPlan(
            cu_seqlens=batch.cu_seqlens,
            seq_lens=batch.seq_lens,
            initial_indices=batch.initial_indices,
            state_indices=batch.state_indices,
            statics=self._statics[mode],
        )


def previous_hidden(
    hidden: Tensor, tokens: Tensor, plan: PreviousHiddenPlan, cache: LayerCache
) -> Tensor:
    """The rows before those of ``hidden`` [T, dim]; keeps the last ones for steps to come."""
    return op.previous_rows(
        hidden,
        tokens,
        cache["hidden"],
        cache["tokens"],
        plan.cu_seqlens,
        plan.seq_lens,
        plan.initial_indices,
        plan.state_indices,
        impl=plan.statics.impl(_OP),
    )


def kept_hidden(
    tokens: Tensor, plan: PreviousHiddenPlan, cache: LayerCache
) -> tuple[Tensor, Tensor]:
    """What was kept beside tokens that the model ran, or is about to run.

    Args:
        tokens: [T] int64, the last ones of each sequence; ``KEPT`` for those that were kept.
        plan: of them.
        cache: what was kept.

    Returns:
        The tokens, and the rows before them, [T, dim].
    """
    hidden, kept_tokens = cache["hidden"], cache["tokens"]
    cu_seqlens, num_kept = plan.cu_seqlens, hidden.shape[1]
    count = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
    seq = torch.searchsorted(cu_seqlens[1:], count, right=True)
    own = seq.clamp(max=plan.seq_lens.shape[0] - 1)  # of padding, the last
    position = plan.seq_lens[own] - cu_seqlens[own + 1] + count
    slot = plan.initial_indices[own]
    before = hidden[slot, (position - 1).clamp(min=0) % num_kept]
    before = before.masked_fill(((slot == 0) | (position == 0))[:, None], 0.0)
    kept = kept_tokens[slot, position % num_kept]
    return torch.where(tokens == KEPT, kept, tokens), before
