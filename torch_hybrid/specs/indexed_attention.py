"""Attention to the blocks of past tokens that an indexer selects."""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch_hybrid.ranks import divide, divide_or_repeat
from torch_hybrid.specs.grouped_heads import check_groups
from torch_hybrid.specs.layer import Divided, LayerFamily, layer_spec
from torch_hybrid.specs.pools import RECORDS, Pool


@layer_spec()
class IndexedAttentionSpec(Divided):
    """Softmax attention over the blocks of past tokens that an indexer selects for each query.

    A block is ``block_size`` tokens. A query sees ``top_k`` blocks, and the tokens after the last
    complete block. A block's index key, ``index_dim`` wide, is the normed mean of its tokens' keys.
    Its first ``rope_dim`` dims are rotated by the position of the block's first token.
    """

    kind: ClassVar[str] = "indexed_attention"
    family: ClassVar[LayerFamily] = "full"

    num_q_heads: Annotated[int, divide]
    num_kv_heads: Annotated[int, divide_or_repeat]
    head_dim: int
    scale: float
    num_index_heads: int
    index_dim: int
    rope_dim: int
    block_size: int
    top_k: int

    def __post_init__(self) -> None:
        check_groups(self.num_q_heads, self.num_kv_heads)

    @property
    def conv_width(self) -> int:
        """Width of the convolution that takes the mean over a block."""
        return self.block_size

    @property
    def conv_channels(self) -> int:
        """Width of a token's ``[index key | cosines | sines]``."""
        return self.index_dim + self.rope_dim

    def pools(self) -> dict[str, Pool]:
        """Declare keys and values, block keys, and inputs of block keys.

        The inputs are those of the last tokens, whose block is incomplete, and of drafts.
        """
        return {
            "kv": Pool((self.num_kv_heads, self.head_dim), per="page", planes=2),
            "block_keys": Pool((self.index_dim,), per="page", tokens=self.block_size),
            "conv": Pool((self.block_size - 1, self.conv_channels), per="slot"),
            RECORDS: Pool((self.conv_channels,), per="draft"),
        }


@layer_spec()
class IndexedLatentSpec(Divided):
    """MLA without rotation, over the blocks of past tokens that an indexer selects for each query.

    A row holds ``latent_rank`` normed latents. A block is ``block_size`` tokens. A query sees
    ``top_k`` blocks, and the tokens after the last complete block. A block's index key,
    ``index_dim`` wide, is a mean of its tokens' keys, weighted by gates.
    """

    kind: ClassVar[str] = "indexed_latent_attention"
    family: ClassVar[LayerFamily] = "full"

    num_heads: Annotated[int, divide]
    latent_rank: int
    nope_dim: int
    v_dim: int
    scale: float
    num_index_heads: int
    index_dim: int
    block_size: int
    top_k: int

    @property
    def head_dim(self) -> int:
        """Width of the keys that absorbed queries meet: a latent."""
        return self.latent_rank

    def pools(self) -> dict[str, Pool]:
        """Declare latents, block keys, and the index keys and gates that block keys are made of.

        The latter are those of the last tokens, whose block is incomplete, and of drafts.
        """
        return {
            "latents": Pool((self.latent_rank,), per="page"),
            "block_keys": Pool((self.index_dim,), per="page", tokens=self.block_size),
            "unpooled": Pool((self.block_size - 1, 2, self.index_dim), per="slot"),
            RECORDS: Pool((2 * self.index_dim,), per="draft"),
        }
