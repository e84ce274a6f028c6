"""Scales of the FP8 caches of a model, measured on prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.graphs.runner import Runner
from torch_hybrid.graphs.step import Model
from torch_hybrid.host.surroundings import in_isolation
from torch_hybrid.ops.formats.fp8_kv import LARGEST
from torch_hybrid.specs import AttentionSpec, LatentSpec

_MAX_TOKENS = 2048


@in_isolation
def kv_scales(
    model: Model, prompts: Sequence[Sequence[int]], *, headroom: float = 2.0
) -> dict[int, Tensor]:
    """Measure scales for ``Runner(kv_dtype="fp8", kv_scales=...)``.

    The prompts run uncompiled, with keys and values in the model's dtype. A scale is for one head
    of keys or of values, or for the latents of a layer. It is the least power of two that can hold
    ``headroom`` times the largest value seen. Powers of two add no rounding of their own.

    Args:
        model: from ``from_pretrained`` or ``adapt``; if ranks share it, each makes this call.
        prompts: token ids, a few thousand in all, like those that will come.
        headroom: factor by which values may exceed those of the prompts.

    Returns:
        By layer id: scales of keys and values [2, key heads], or of latents [1].

    Raises:
        ValueError: there is no prompt, or a value is NaN or infinite.
    """
    if not prompts:
        raise ValueError("prompts must have at least one prompt, got none")
    longest = max(map(len, prompts))
    runner = Runner(model, max_seqs=1, max_tokens=_MAX_TOKENS, kv_tokens=longest, compile=False)
    largest: dict[int, Tensor] = {}
    for prompt in prompts:
        (seq,) = runner.new_sequences(1)
        for start in range(0, len(prompt), _MAX_TOKENS):
            runner.extend([seq], [prompt[start : start + _MAX_TOKENS]])
        runner.free([seq])
        for layer_id, seen in _largest_values(runner).items():
            largest[layer_id] = torch.maximum(largest.get(layer_id, seen), seen)
    for layer_id, seen in largest.items():
        if not seen.isfinite().all():
            raise ValueError(f"layer {layer_id} keeps NaN or infinite values")
    return {layer_id: _least_power(headroom * seen / LARGEST) for layer_id, seen in largest.items()}


def _largest_values(runner: Runner) -> dict[int, Tensor]:
    """Find the largest absolute value of each head, or of all latents, by layer id."""
    cache, found = runner.cache, {}
    for layer_id, layer in enumerate(cache.table.layers):
        for entry in layer:
            pools = cache.pools[entry.kind][entry.index]
            match entry.spec:
                case AttentionSpec():
                    found[layer_id] = pools["kv"].abs().amax((1, 2, 4)).float()
                case LatentSpec():
                    found[layer_id] = pools["latents"].abs().amax().float()[None]
    return found


def _least_power(scales: Tensor) -> Tensor:
    """Round scales up to powers of two; a scale of 0, for which no value was seen, becomes 1."""
    return torch.where(scales > 0, scales.log2().ceil().exp2(), 1.0)
