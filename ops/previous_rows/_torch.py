"""Implementation "torch": gathers and scatters whose shapes do not depend on lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.previous_rows.bounds import check_indices


def previous_rows(
    x: Tensor,
    last: Tensor,
    records: Tensor | None,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    accepted: Tensor | None,
) -> Tensor:
    """Launcher of ``torch_hybrid::previous_rows``."""
    if x.device.type == "cpu":
        check_indices(last, records, cu_seqlens, initial_indices, state_indices, accepted, len(x))
    num_tokens, num_seqs = x.shape[0], state_indices.shape[0]
    before = last[initial_indices]
    if records is not None and accepted is not None and records.shape[1]:
        record = records[initial_indices, (accepted - 1).clamp(min=0)]
        before = torch.where((accepted > 0)[:, None], record, before)
    before = before.masked_fill((initial_indices == 0)[:, None], 0.0)

    count = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
    seq = torch.searchsorted(cu_seqlens[1:], count, right=True)
    own = seq.clamp(max=max(num_seqs - 1, 0))
    out = x[(count - 1).clamp(min=0)]
    if num_seqs:
        out = torch.where((count == cu_seqlens[own])[:, None], before[own], out)
    out = out.masked_fill((seq == num_seqs)[:, None], 0.0)
    if num_seqs:
        rows = x if num_tokens else x.new_zeros(1, x.shape[1])  # none of which anybody is given
        _store(rows, before, last, records, cu_seqlens, state_indices, accepted)
    return out


def _store(
    x: Tensor,
    before: Tensor,
    last: Tensor,
    records: Tensor | None,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    accepted: Tensor | None,
) -> None:
    """Leave what the next step reads; slot 0 keeps what it has."""
    first, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    most = len(x) - 1
    at = first if accepted is not None else cu_seqlens[1:] - 1
    row = torch.where((lengths > 0)[:, None], x[at.clamp(0, most)], before)
    has_any = lengths > 0 if accepted is None else (lengths > 0) | (accepted > 0)
    is_stored = ((state_indices > 0) & has_any)[:, None]
    last[state_indices] = torch.where(is_stored, row, last[state_indices])
    if accepted is None or records is None:
        return
    place = torch.arange(records.shape[1], dtype=torch.int32, device=x.device)
    is_draft = (place < lengths[:, None] - 1) & (state_indices > 0)[:, None]
    rows = x[(first[:, None] + 1 + place).clamp(0, most)]
    records[state_indices] = torch.where(is_draft[..., None], rows, records[state_indices])
