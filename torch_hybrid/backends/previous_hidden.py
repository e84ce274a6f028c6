"""Hidden states of each token's predecessor, which a head that makes drafts reads.

    decode, verify    keep every token's hidden state; the head does not run
    extend            the head reads the new tokens; in a step that verifies drafts, they count as
                      unread all the same
    draft             the head reads the kept tokens that it has not read, and makes drafts

A step thus pays no more for the head than the copy of a row. The head reads several tokens at once,
when drafts are due. Rows of drafts that were not accepted are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.backends.mode import LayerForm, Mode, OneForm
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
_READS = "reads"  # form of steps whose tokens the head reads in the step itself


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousHiddenPlan:
    """Plan of a step: where its N sequences keep hidden states; see ``previous_rows``."""

    cu_seqlens: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    initial_indices: Tensor  # [N]
    state_indices: Tensor  # [N]
    statics: Statics

    @property
    def is_read(self) -> bool:
        """True if the head reads the tokens of the step."""
        return self.statics.form == _READS


register_value(PreviousHiddenPlan)


class PreviousHiddenBackend(OneForm):
    """Planner of the hidden states that a model's head reads beside tokens."""

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

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> PreviousHiddenPlan:
        """Plan one step. Pure: the plan has the batch's tensors."""
        return PreviousHiddenPlan(
            **batch.tensors_for(PreviousHiddenPlan),
            statics=self._statics[mode],
        )


def previous_hidden(
    hidden: Tensor, tokens: Tensor, plan: PreviousHiddenPlan, cache: LayerCache
) -> Tensor:
    """Find the row before each row of ``hidden`` [T, dim]; keep the last rows for later steps."""
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
    """Read kept tokens and hidden states for a step of the model's head.

    Args:
        tokens: [T] int64, the last tokens of each sequence; ``KEPT`` stands for a kept token.
        plan: plan of the step.
        cache: pools of kept tokens and hidden states.

    Returns:
        The tokens [T], and the hidden state before each [T, dim].
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
