"""Convolutions over the last tokens, without a recurrence."""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch_hybrid.ranks import divide, divide_or_repeat
from torch_hybrid.specs.grouped_heads import check_groups
from torch_hybrid.specs.layer import Divided, layer_spec
from torch_hybrid.specs.pools import RECORDS, Pool


@layer_spec("causal_conv1d")
class ShortConvolutionSpec(Divided):
    """A gated short convolution: a mixer that keeps its last inputs, and has no recurrence."""

    kind: ClassVar[str] = "short_convolution"

    channels: Annotated[int, divide]
    conv_width: int

    def pools(self) -> dict[str, Pool]:
        """Declare the convolution's last inputs, after their gates, and those of drafts."""
        conv = Pool((self.conv_width - 1, self.channels), per="slot")
        return {"conv": conv, RECORDS: Pool((self.channels,), per="draft")}


@layer_spec("causal_conv1d")
class ConvolvedProjectionSpec(Divided):
    """Queries and keys that are convolved twice, and values that are partly delayed.

    Half of the value channels are those of the token before. The first convolution,
    ``channel_width`` wide, is depthwise. The second, ``head_width`` wide, mixes the channels of a
    head. Inputs of the first are kept once for each token whose output the second reads.
    """

    kind: ClassVar[str] = "convolved_projection"

    num_q_heads: Annotated[int, divide]
    num_kv_heads: Annotated[int, divide_or_repeat]
    head_dim: int
    channel_width: int
    head_width: int

    def __post_init__(self) -> None:
        check_groups(self.num_q_heads, self.num_kv_heads)

    @property
    def num_heads(self) -> int:
        """Number of query and key heads together."""
        return self.num_q_heads + self.num_kv_heads

    @property
    def conv_width(self) -> int:
        """Number of tokens that both convolutions, or the delay of values, span."""
        return max(self.channel_width + self.head_width - 1, 2)

    @property
    def conv_channels(self) -> int:
        """Width of ``[inputs of the second convolution of each head | v]``."""
        return (self.num_heads * self.head_width + self.num_kv_heads) * self.head_dim

    def pools(self) -> dict[str, Pool]:
        """Declare the last inputs of the convolutions and of the delay, and those of drafts."""
        conv = Pool((self.conv_width - 1, self.conv_channels), per="slot")
        return {"conv": conv, RECORDS: Pool((self.conv_channels,), per="draft")}


@layer_spec("causal_conv1d")
class BranchConvolutionSpec(Divided):
    """Causal convolutions of a layer's keys and values, and of its two residual branches.

    The branches are the outputs of attention and feed-forward, ``channels`` wide, before they are
    added to the residual stream.
    """

    kind: ClassVar[str] = "branch_convolution"

    num_kv_heads: Annotated[int, divide_or_repeat]
    head_dim: int
    channels: int
    conv_width: int

    def pools(self) -> dict[str, Pool]:
        """Declare each convolution's last inputs, and those of drafts; keys and values share
        one."""
        widths = {
            "kv": 2 * self.num_kv_heads * self.head_dim,
            "attention": self.channels,
            "feed_forward": self.channels,
        }
        pools = {}
        for name, width in widths.items():
            pools[name] = Pool((self.conv_width - 1, width), per="slot")
            pools[f"{name}_{RECORDS}"] = Pool((width,), per="draft")
        return pools
