"""The state slots of one linear-attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hybrid.caches.sizes import PoolCost, PoolSizes
from torch_hybrid.specs import DeltaRuleSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """Two pools of separate storage, mutated in place by slot. Slot 0 is null.

    ``conv``: [slots, conv_width - 1, channels], the last inputs of the convolution, oldest first,
    in the model's dtype. ``state``: [slots, num_v_heads, head_v_dim, head_k_dim] float32.
    """

    conv: Tensor
    state: Tensor


pytree.register_dataclass(RecurrentState)


def make_recurrent_state(spec: DeltaRuleSpec, sizes: PoolSizes) -> RecurrentState:
    """Zeroed pools of ``sizes.num_slots`` slots beside the null one."""
    conv = (sizes.num_slots + 1, spec.conv_width - 1, spec.conv_channels)
    state = (sizes.num_slots + 1, spec.num_v_heads, spec.head_v_dim, spec.head_k_dim)
    return RecurrentState(
        conv=torch.zeros(conv, dtype=sizes.dtype, device=sizes.device),
        state=torch.zeros(state, dtype=torch.float32, device=sizes.device),
    )


def recurrent_state_cost(spec: DeltaRuleSpec, sizes: PoolSizes) -> PoolCost:
    """One slot of each pool, whatever the length of the sequence."""
    conv = (spec.conv_width - 1) * spec.conv_channels * sizes.dtype.itemsize
    return PoolCost(per_sequence=conv + spec.num_v_heads * spec.head_v_dim * spec.head_k_dim * 4)
