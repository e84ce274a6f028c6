"""Tiny models before and after ``make_trainable``, and batches as callers send them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

import torch_hybrid as th
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, make_model

FAMILIES = (
    "qwen3_next_dense",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "lara_mini",
    "qwen4_exp",
    "glm5_next",
    "olmo_hybrid",
    "kimi_linear",
    "bailing_hybrid",
    "mamba",
    "falcon_mamba",
    "jamba",
    "zamba",
    "falcon_h1",
    "falcon_h1_norm",
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "zamba2",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "recurrent_gemma",
    "minimax",
    "inkling",
    "inkling2",
    "inkling2_loop",
    "xlstm",
    "rwkv",
    "zaya",
    "jet_nemotron",
    "kimi_k3",
    "ring_2_5",
)
FAMILIES = tuple(family for family in FAMILIES if family in BUILDERS)
# So many heads of indexers that no score is 0: of equal ones transformers picks any.
INDEX_HEADS = {"qwen4_exp": {"indexer_n_heads": 32}, "glm5_next": {"index_n_heads": 32}}
LENGTHS = [70, 1, 3, 33]


def make_pair(family: str = "qwen3_next_dense", **options: Any) -> tuple[Any, Any]:
    """Make a model as transformers has it, and a copy that trains."""
    sizes = {**FEWEST_LAYERS[family], **INDEX_HEADS.get(family, {}), **options}
    theirs = make_model(family, **sizes).requires_grad_().train()
    return theirs, th.make_trainable(copy.deepcopy(theirs))


def make_twin(family: str = "qwen3_next_dense", **options: Any) -> Any:
    return make_pair(family, **options)[1]


def make_rows(lengths: list[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Draw tokens [1, length] of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 190, (1, n), generator=generator) for n in lengths]


def flattened(rows: list[Tensor]) -> dict[str, Any]:
    """Collate rows as transformers does for packed training: all that it can send."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return collate([{"input_ids": row[0].tolist()} for row in rows])


def grads(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Compute the gradients of a loss."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def furthest(these: dict[str, Tensor], those: dict[str, Tensor]) -> float:
    """Compute the largest difference of named tensors, as a share of the tensor's largest value."""
    assert these.keys() == those.keys()
    assert all(each.isfinite().all() for each in those.values())
    shares = (
        (these[name] - that).abs().max() / that.abs().max().clamp(min=1e-6)
        for name, that in those.items()
    )
    return float(max(shares))
