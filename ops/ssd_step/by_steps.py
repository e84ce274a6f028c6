"""A step that verifies drafts, by a decode step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.verify import verify_by_steps


def verify_by_ssd_steps(
    step: Callable[..., Tensor],
    xBC: Tensor,
    z: Tensor | None,
    dt: Tensor,
    *parameters_and_pools: Tensor | None,
    **options: Any,
) -> Tensor:
    """As ``ssd_verify``, by a launcher of the decode step: records are [xBC | dt]."""
    *parameters, conv_state, state, cu_seqlens, initial, slots, records, accepted = (
        parameters_and_pools
    )
    assert conv_state is not None
    assert state is not None
    widths = [xBC.shape[1], dt.shape[1]]

    def advance(
        rows: Tensor, token: Tensor | None, pools: Sequence[Tensor], offsets: Tensor, own: Tensor
    ) -> Tensor:
        own_xBC, own_dt = rows.split(widths, 1)
        own_z = None
        if z is not None:
            own_z = z.new_zeros(len(rows), z.shape[1]) if token is None else z[token]
        return step(own_xBC, own_z, own_dt, *parameters, *pools, offsets, own, own, **options)

    return verify_by_steps(
        advance,
        torch.cat([xBC, dt], 1),
        xBC.new_zeros(xBC.shape[0], state.shape[1] * state.shape[2]),
        [conv_state, state],
        records,  # type: ignore[arg-type]
        accepted,  # type: ignore[arg-type]
        cu_seqlens,  # type: ignore[arg-type]
        initial,  # type: ignore[arg-type]
        slots,  # type: ignore[arg-type]
    )
