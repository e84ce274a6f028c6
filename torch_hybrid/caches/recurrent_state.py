"""The state slots of one linear-attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.caches.sizes import PoolCost, PoolSizes
from torch_hybrid.host import zeros
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import DeltaRuleSpec, KimiDeltaSpec, LightningSpec, Mamba2Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """Two pools of separate storage, mutated in place by slot. Slot 0 is null.

    ``conv``: [slots, conv_width - 1, channels], the last inputs of the convolution, oldest first,
    in the model's dtype. ``state``: [slots, heads, values, keys] float32.
    """

    conv: Tensor
    state: Tensor


register_value(RecurrentState)

ConvolvedSpec = DeltaRuleSpec | KimiDeltaSpec | Mamba2Spec


def make_recurrent_state(spec: ConvolvedSpec, sizes: PoolSizes) -> RecurrentState:
    """Zeroed pools of ``sizes.num_slots`` slots beside the null one."""
    conv = (sizes.num_slots + 1, spec.conv_width - 1, spec.conv_channels)
    return RecurrentState(
        conv=zeros(conv, dtype=sizes.dtype, device=sizes.device),
        state=_zero_states(spec, sizes),
    )


def recurrent_state_cost(spec: ConvolvedSpec, sizes: PoolSizes) -> PoolCost:
    """One slot of each pool, whatever the length of the sequence."""
    conv = (spec.conv_width - 1) * spec.conv_channels * sizes.dtype.itemsize
    return PoolCost(per_sequence=conv + _state_bytes(spec))


def make_lightning_state(spec: LightningSpec, sizes: PoolSizes) -> Tensor:
    """A zeroed pool [slots, heads, values, keys] float32; there is no convolution to keep."""
    return _zero_states(spec, sizes)


def lightning_state_cost(spec: LightningSpec, sizes: PoolSizes) -> PoolCost:
    """One slot, whatever the length of the sequence."""
    return PoolCost(per_sequence=_state_bytes(spec))


def _zero_states(spec: ConvolvedSpec | LightningSpec, sizes: PoolSizes) -> Tensor:
    shape = (sizes.num_slots + 1, *spec.state_shape)
    return zeros(shape, dtype=torch.float32, device=sizes.device)


def _state_bytes(spec: ConvolvedSpec | LightningSpec) -> int:
    heads, values, keys = spec.state_shape
    return heads * values * keys * 4
