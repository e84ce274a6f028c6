"""State spaces: a decay for each head (Mamba2), or for each channel and state (Mamba)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Self

from torch_hybrid.ops.open_chunk import ADDED
from torch_hybrid.ranks import divide, divide_or_repeat
from torch_hybrid.specs.layer import Divided, layer_spec
from torch_hybrid.specs.pools import RECORDS, Pool, conv_and_state, open_chunk, records_of


@layer_spec()
class Mamba2Spec(Divided):
    """A Mamba2 mixer: convolution, scalar-decay recurrence, gate with or without a norm.

    ``dt_min`` and ``dt_max`` bound the step size after its softplus. ``gate`` is the place of the
    gate: "before_norm", "after_norm" or "no_norm". The norm's groups are ``norm_groups`` equal
    parts of the inner width.
    """

    kind: ClassVar[str] = "mamba2"

    num_heads: Annotated[int, divide]
    head_dim: int
    state_dim: int
    num_groups: Annotated[int, divide_or_repeat]
    conv_width: int
    activation: str = "silu"
    dt_min: float = 0.0
    dt_max: float = float("inf")
    gate: str = "before_norm"
    norm_groups: Annotated[int, divide_or_repeat] = 1
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads must be a multiple of num_groups, "
                f"got {self.num_heads} and {self.num_groups}"
            )
        if self.gate not in ("before_norm", "after_norm", "no_norm"):
            raise ValueError(
                f"gate must be 'before_norm', 'after_norm' or 'no_norm', got {self.gate!r}"
            )

    @property
    def inner_dim(self) -> int:
        """Width of x and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Width of ``[x | B | C]``, the convolution's input."""
        return self.inner_dim + 2 * self.num_groups * self.state_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a state: heads, values, keys."""
        return self.num_heads, self.head_dim, self.state_dim

    def pools(self) -> dict[str, Pool]:
        """Declare the convolution's last inputs, the state, and ``[x | B | C | dt]`` of drafts.

        And records of an open chunk. Each has its own storage.
        """
        width = self.conv_channels + self.num_heads
        return {
            **conv_and_state(self.conv_width, self.conv_channels, self.state_shape),
            **open_chunk(ADDED, self.num_groups, self.state_shape),
            RECORDS: Pool((width,), per="draft"),
        }


@layer_spec()
class MambaSpec(Divided):
    """A Mamba-1 mixer: convolution, selective scan, gate.

    ``dt_rank`` is the width of the low-rank input of step sizes. That input, B and C are normed if
    ``norm_eps`` is set. Each of ``num_heads`` equal parts of the channels has its own step-size
    input, B and C.
    """

    kind: ClassVar[str] = "mamba"

    channels: int
    state_dim: int
    dt_rank: int
    conv_width: int
    activation: str = "silu"
    norm_eps: float | None = None
    num_heads: int = 1

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.channels % self.num_heads:
            raise ValueError(
                f"channels must be a multiple of num_heads, got {self.channels} and "
                f"{self.num_heads}"
            )

    def pools(self) -> dict[str, Pool]:
        """Declare the convolution's last inputs, the state, and draft inputs.

        Draft inputs are those of the convolution, and ``[x | dt | B]`` of the scan. Each has its
        own storage.
        """
        pools = conv_and_state(self.conv_width, self.channels, (self.channels, self.state_dim))
        width = 2 * self.channels + self.num_heads * self.state_dim
        return {**pools, **records_of(self.channels, width)}

    def divided(self, num_ranks: int) -> Self:
        """Divide the heads, or the channels of a single head, among ranks; see ``LayerSpec``."""
        heads = self.num_heads
        return replace(
            self,
            num_heads=heads if heads == 1 else divide("num_heads", heads, num_ranks),
            channels=divide("channels", self.channels, num_ranks),
        )
