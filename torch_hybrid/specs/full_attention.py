"""Attention to all past tokens, or to a window of them: by keys and values, or by latents."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch

from torch_hybrid.ranks import divide, divide_or_repeat
from torch_hybrid.specs.grouped_heads import check_groups
from torch_hybrid.specs.layer import Divided, LayerFamily, layer_spec
from torch_hybrid.specs.pools import Pool, scales_of


@layer_spec()
class AttentionSpec(Divided):
    """Full softmax attention over a paged KV pool.

    Attributes:
        window: number of visible keys, the query's own included; 0: all.
        softcap: bounds logits by ``softcap * tanh(logits / softcap)``; 0: no bound.
        reach: number of distances, from 0 on, with a bias per query and head on the key's logit; 0:
            none.
        sinks: whether a query has one more logit, of no key; it needs the log-sum-exp of the
            others.
        kv_dtype: dtype of cached keys and values; None: the model's.
    """

    kind: ClassVar[str] = "paged_attention"
    family: ClassVar[LayerFamily] = "full"

    num_q_heads: Annotated[int, divide]
    num_kv_heads: Annotated[int, divide_or_repeat]
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    reach: int = 0
    sinks: bool = False
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_groups(self.num_q_heads, self.num_kv_heads)

    def pools(self) -> dict[str, Pool]:
        """Declare keys and values in one tensor: an op may mutate one argument per storage."""
        heads = (self.num_kv_heads, self.head_dim)
        kv = Pool(heads, per="page", dtype=self.kv_dtype, planes=2)
        return {"kv": kv, **scales_of(self.kv_dtype, (2, self.num_kv_heads))}


@layer_spec()
class LatentSpec(Divided):
    """Multi-head latent attention (MLA): keys and values of all heads from one latent row.

    A row holds ``latent_rank`` normed latents and ``rope_dim`` shared key dims, rotated or not.
    ``kv_dtype`` is the dtype of cached rows (None: the model's).
    """

    kind: ClassVar[str] = "latent_attention"
    family: ClassVar[LayerFamily] = "full"

    num_heads: Annotated[int, divide]
    latent_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    kv_dtype: torch.dtype | None = None

    @property
    def row_dim(self) -> int:
        """Width of a cached row."""
        return self.latent_rank + self.rope_dim

    @property
    def qk_dim(self) -> int:
        """Width of an expanded query and key head."""
        return self.nope_dim + self.rope_dim

    def pools(self) -> dict[str, Pool]:
        """Declare rows ``[latent | shared key]``."""
        latents = Pool((self.row_dim,), per="page", dtype=self.kv_dtype)
        return {"latents": latents, **scales_of(self.kv_dtype, (1,))}
