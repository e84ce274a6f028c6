"""Additive linear recurrences: fixed decays per head, gated units, exponential gates, averages."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch

from torch_hybrid.ops.open_chunk import ADDED
from torch_hybrid.ranks import divide, divide_or_repeat
from torch_hybrid.specs.layer import Divided, layer_spec
from torch_hybrid.specs.pools import RECORDS, Pool, conv_and_state, open_chunk, records_of

MOST_GATE_SOFTCAP = 40.0  # of exponential gates: float32 holds sums of terms weighted by e^40
TOKEN_SHIFT = 2  # taps of a token shift, which mixes each token with the one before it


@layer_spec()
class LightningSpec(Divided):
    """A lightning-attention mixer: linear attention with one fixed decay for each head, gated norm.

    ``activation`` ("none" or "silu") applies to q, k and v. With ``qk_norm``, q and k are normed
    per head. The output norm's groups are ``norm_groups`` equal parts of its width.
    """

    kind: ClassVar[str] = "lightning_attention"

    num_heads: Annotated[int, divide]
    head_dim: int
    scale: float = 1.0
    activation: str = "none"
    qk_norm: bool = False
    norm_groups: Annotated[int, divide_or_repeat] = 1
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.activation not in ("none", "silu"):
            raise ValueError(f"activation must be 'none' or 'silu', got {self.activation!r}")
        if self.norm_groups < 1 or self.channels % self.norm_groups:
            raise ValueError(
                f"norm_groups must divide the {self.channels} channels, got {self.norm_groups}"
            )

    @property
    def channels(self) -> int:
        """Width of q, of k, of v and of the output gate."""
        return self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a state: heads, values, keys."""
        return self.num_heads, self.head_dim, self.head_dim

    def pools(self) -> dict[str, Pool]:
        """Declare the state, records of an open chunk, and k and v of drafts as the recurrence
        takes them."""
        return {
            "state": Pool(self.state_shape, per="slot", dtype=torch.float32),
            **open_chunk(ADDED, self.num_heads, self.state_shape),
            RECORDS: Pool((2 * self.channels,), per="draft", dtype=torch.float32),
        }


@layer_spec("rg_lru", "causal_conv1d")
class RgLruSpec(Divided):
    """A mixer of real-gated linear recurrent units (RG-LRU): convolution, recurrence, gate.

    The recurrence's gates read the channels of their own head.
    """

    kind: ClassVar[str] = "rg_lru"

    num_heads: Annotated[int, divide]
    head_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Width of the convolution, of the state and of the output gate."""
        return self.num_heads * self.head_dim

    def pools(self) -> dict[str, Pool]:
        """Declare the convolution's last inputs, a state number per channel, and draft inputs.

        Draft inputs are those of the convolution, and ``[x | gates]`` of the recurrence.
        """
        pools = conv_and_state(self.conv_width, self.channels, (self.channels,))
        return {**pools, **records_of(self.channels, 3 * self.channels)}


@layer_spec()
class MlstmSpec(Divided):
    """An mLSTM mixer: a matrix memory with exponential gates, normed per head.

    Gates are bounded by ``gate_softcap * tanh(gates / gate_softcap)`` before they act.
    """

    kind: ClassVar[str] = "mlstm"

    num_heads: Annotated[int, divide]
    head_k_dim: int
    head_v_dim: int
    gate_softcap: float
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 < self.gate_softcap <= MOST_GATE_SOFTCAP:
            raise ValueError(
                f"gate_softcap must be above 0 and at most {MOST_GATE_SOFTCAP}, "
                f"got {self.gate_softcap}"
            )

    @property
    def k_channels(self) -> int:
        """Width of q and of k."""
        return self.num_heads * self.head_k_dim

    @property
    def v_channels(self) -> int:
        """Width of v and of the output gate."""
        return self.num_heads * self.head_v_dim

    @property
    def memory_dim(self) -> int:
        """Rows of a head's memory: its values, then ones, whose memory is the normalizer.

        The ones pad the rows to a multiple of 16.
        """
        return (self.head_v_dim // 16 + 1) * 16

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a state: heads, values and ones, keys."""
        return self.num_heads, self.memory_dim, self.head_k_dim

    def pools(self) -> dict[str, Pool]:
        """Declare the memory, and ``[k | v | gates]`` of drafts."""
        width = self.k_channels + self.v_channels + 2 * self.num_heads
        return {
            "state": Pool(self.state_shape, per="slot", dtype=torch.float32),
            RECORDS: Pool((width,), per="draft"),
        }


@layer_spec("wkv", "causal_conv1d")
class TimeMixSpec(Divided):
    """RWKV's time mixing: a weighted average of past values, gated.

    Its ``dim`` inputs are mixed with those of the token before; ``channels`` have a state.
    """

    kind: ClassVar[str] = "time_mix"
    conv_width: ClassVar[int] = TOKEN_SHIFT

    dim: int
    channels: Annotated[int, divide]

    def pools(self) -> dict[str, Pool]:
        """Declare the last input, two sums and their exponent per channel, and draft inputs.

        Draft inputs are the layer's, and ``[k | v]`` of the recurrence.
        """
        pools = conv_and_state(self.conv_width, self.dim, (3, self.channels))
        return {**pools, **records_of(self.dim, 2 * self.channels)}


@layer_spec("causal_conv1d")
class ChannelMixSpec(Divided):
    """RWKV's channel mixing: a feed-forward of ``width`` units.

    Its ``dim`` inputs are mixed with those of the token before.
    """

    kind: ClassVar[str] = "channel_mix"
    conv_width: ClassVar[int] = TOKEN_SHIFT

    dim: int
    width: Annotated[int, divide]

    def pools(self) -> dict[str, Pool]:
        """Declare the last input, and those of drafts."""
        conv = Pool((self.conv_width - 1, self.dim), per="slot")
        return {"conv": conv, RECORDS: Pool((self.dim,), per="draft")}
