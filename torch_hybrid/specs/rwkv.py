"""RWKV's mixers of tokens and of channels, which see the token before each."""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch_hybrid.ranks import divide
from torch_hybrid.specs.layer import Divided, layer_spec
from torch_hybrid.specs.pools import RECORDS, Pool, conv_and_state, records_of

TOKEN_SHIFT = 2  # taps of a token shift, which mixes each token with the one before it


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
