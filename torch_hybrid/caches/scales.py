"""Dequantization scales of an FP8 (e4m3) KV cache, set once by the user."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torch_hybrid.ops.core.registration import check_shapes


def write_scales(own: Mapping[int, Tensor], scales: Mapping[int, Tensor]) -> None:
    """Set the dequantization scales of all layers with an FP8 cache.

    Args:
        own: scales of a cache, by layer id. Mutated.
        scales: their new values.

    Raises:
        TypeError: the scales are no mapping.
        ValueError: layers or shapes are not those of ``own``, or a scale is not positive.
    """
    if not isinstance(scales, Mapping):
        raise TypeError(f"kv_scales must map layer ids to scales, got {scales!r}")
    if scales.keys() != own.keys():
        raise ValueError(f"kv_scales must be of the layers {sorted(own)}, got {sorted(scales)}")
    for layer_id, given in scales.items():
        check_shapes({f"kv_scales of layer {layer_id}": (given, own[layer_id].shape)})
        if not bool((given > 0).all()):
            raise ValueError(
                f"kv_scales of layer {layer_id} must be positive, got {given.tolist()}"
            )
    for layer_id, given in scales.items():
        own[layer_id].copy_(given)
