"""Delta rules: recurrences that write the part of a value that the state does not predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch_hybrid.ops.open_chunk import CORRECTED, CORRECTED_BY_CHANNEL
from torch_hybrid.ranks import divide, divide_or_repeat
from torch_hybrid.specs.layer import Divided, layer_spec
from torch_hybrid.specs.pools import RECORDS, Pool, conv_and_state, open_chunk, records_of


@layer_spec()
class DeltaRuleSpec(Divided):
    """A gated-delta-rule mixer: causal convolution, recurrence, gated norm.

    ``beta_scale`` is 2 if negative eigenvalues are allowed, else 1. ``gate`` is the activation of
    the output gate after the norm, "silu" or "sigmoid".
    """

    kind: ClassVar[str] = "gated_delta_rule"

    num_k_heads: Annotated[int, divide_or_repeat]
    num_v_heads: Annotated[int, divide]
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    activation: str = "silu"
    norm_eps: float = 1e-6
    beta_scale: float = 1.0
    gate: str = "silu"

    def __post_init__(self) -> None:
        if self.gate not in ("silu", "sigmoid"):
            raise ValueError(f"gate must be 'silu' or 'sigmoid', got {self.gate!r}")
        if self.num_k_heads < 1 or self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_k_heads, "
                f"got {self.num_v_heads} and {self.num_k_heads}"
            )

    @property
    def k_channels(self) -> int:
        """Width of q and of k: heads times head dim."""
        return self.num_k_heads * self.head_k_dim

    @property
    def v_channels(self) -> int:
        """Width of v and of the output gate."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_channels(self) -> int:
        """Width of ``[q | k | v]``, the convolution's input."""
        return 2 * self.k_channels + self.v_channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a state: heads, values, keys."""
        return self.num_v_heads, self.head_v_dim, self.head_k_dim

    def pools(self) -> dict[str, Pool]:
        """Declare the convolution's last inputs, the state, and ``[q | k | v | b | a]`` of drafts.

        And records of an open chunk. Each has its own storage.
        """
        width = self.conv_channels + 2 * self.num_v_heads
        return {
            **conv_and_state(self.conv_width, self.conv_channels, self.state_shape),
            **open_chunk(CORRECTED, self.num_k_heads, self.state_shape),
            RECORDS: Pool((width,), per="draft"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _EqualHeadsSpec(Divided):
    """Facts of a delta rule's mixer that has as many heads of keys as of values."""

    num_heads: Annotated[int, divide]
    head_k_dim: int
    head_v_dim: int
    conv_width: int

    @property
    def k_channels(self) -> int:
        """Width of q and of k."""
        return self.num_heads * self.head_k_dim

    @property
    def v_channels(self) -> int:
        """Width of v and of the output gate."""
        return self.num_heads * self.head_v_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a state: heads, values, keys."""
        return self.num_heads, self.head_v_dim, self.head_k_dim


@layer_spec()
class KimiDeltaSpec(_EqualHeadsSpec):
    """A Kimi-delta-attention mixer: convolution, delta rule with a decay per channel, gated norm.

    ``gate_lower_bound`` is the least log decay of a token in the bounded form (Ling-3). None is the
    softplus form, which has no bound.
    """

    kind: ClassVar[str] = "kimi_delta_attention"

    activation: str = "silu"
    norm_eps: float = 1e-6
    gate_lower_bound: float | None = None

    @property
    def conv_channels(self) -> int:
        """Width of ``[q | k | v]``, the convolution's input."""
        return 2 * self.k_channels + self.v_channels

    def pools(self) -> dict[str, Pool]:
        """Declare the convolution's last inputs, the state, and ``[q | k | v | b | f]`` of drafts.

        And records of an open chunk. Each has its own storage.
        """
        width = self.conv_channels + self.num_heads + self.k_channels
        return {
            **conv_and_state(self.conv_width, self.conv_channels, self.state_shape),
            **open_chunk(CORRECTED_BY_CHANNEL, self.num_heads, self.state_shape),
            RECORDS: Pool((width,), per="draft"),
        }


@layer_spec()
class JetBlockSpec(_EqualHeadsSpec):
    """A Jet-Nemotron mixer: convolution of values by each token's own filters, recurrence, gated
    norm.

    Filters are made of ``filter_rank`` numbers of a token.
    """

    kind: ClassVar[str] = "jet_block"

    filter_rank: int
    norm_eps: float = 1e-5

    def pools(self) -> dict[str, Pool]:
        """Declare the convolution's last inputs, the state, and v and ``[k | v | b | a]`` of
        drafts."""
        width = self.k_channels + self.v_channels + 2 * self.num_heads
        pools = conv_and_state(self.conv_width, self.v_channels, self.state_shape)
        return {**pools, **records_of(self.v_channels, width)}
