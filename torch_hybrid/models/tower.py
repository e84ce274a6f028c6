"""The tower of a multimodal model: transformers' own modules, which embed images and videos.

A prompt has a placeholder token for each row of an image's embeddings; that row replaces the
placeholder's own embedding. A tower is not compiled: it runs beside the steps. On a GPU its
float32 convolutions use TF32 where torch allows cuDNN to, which is the default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Tensor]  # a tower's inputs, by the names that a processor gives them


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """One kind of a tower's inputs, images or videos: names of their tensors and tokens.

    Attributes:
        name: name of the kind, for messages.
        inputs: names of the processor's outputs, in the order in which the tower takes them:
            pixels, the sizes of each image in patches, and other tensors with a row for each.
        num_sizes: count of numbers in the sizes of an image.
        is_packed: True where each row of the pixels is a patch, image after image; else each
            image has a row, padded to the size of the largest.
        placeholder: config field of the placeholder token.
        span: config fields of the tokens that begin and end a video, where images and videos have
            the same placeholder; placeholders within a span are of this kind alone.
        features: method of transformers' module that computes the embeddings.
        merge: function of a config: patches that become one row, along each side.
    """

    name: str
    inputs: tuple[str, ...]
    num_sizes: int = 3
    is_packed: bool = True
    placeholder: str
    features: str
    merge: Callable[[Any], int]
    span: tuple[str, str] | None = None


def grids_of_patches(kind: str, pixels: str) -> Modality:
    """Describe the outputs of Qwen's processors for one kind, "image" or "video"."""
    return Modality(
        name=kind,
        inputs=(pixels, f"{kind}_grid_thw"),
        placeholder=f"{kind}_token_id",
        features=f"get_{kind}_features",
        merge=lambda config: int(config.vision_config.spatial_merge_size),
    )


IMAGES_AND_VIDEOS = (
    grids_of_patches("image", "pixel_values"),
    grids_of_patches("video", "pixel_values_videos"),
)
# A frame of a video has the placeholders of an image; two tokens say where a video is.
IMAGES_AND_VIDEOS_OF_IMAGES = (
    IMAGES_AND_VIDEOS[0],
    replace(
        IMAGES_AND_VIDEOS[1],
        placeholder="image_token_id",
        span=("video_start_token_id", "video_end_token_id"),
    ),
)
TILES = (
    Modality(
        name="image",
        inputs=("pixel_values", "spatial_shapes", "pixel_attention_mask"),
        num_sizes=2,
        is_packed=False,
        placeholder="image_token_id",
        features="get_image_features",
        merge=lambda config: int(config.downsample_factor),
    ),
)


class Tower(nn.Module):
    """The tower of a model, which embeds the images and videos of a prompt.

    Args:
        module: multimodal model of transformers, without its language model.
        modalities: kinds of inputs that the model takes.
        has_positions: True where tokens have 3-D positions, which depend on images.
    """

    def __init__(self, module: Any, modalities: Sequence[Modality], *, has_positions: bool) -> None:
        super().__init__()
        self.module = module
        self.modalities = tuple(modalities)
        self.has_positions = has_positions

    @property
    def device(self) -> torch.device:
        """Device of the tower's weights."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of all inputs that the tower takes."""
        return tuple(name for modality in self.modalities for name in modality.inputs)

    def check(self, tokens: Sequence[int], inputs: Inputs) -> None:
        """Raise ValueError unless inputs are complete and give a row to each placeholder token."""
        for modality in self.modalities:
            given = [name for name in modality.inputs if name in inputs]
            if not given:
                continue
            if missing := [name for name in modality.inputs if name not in inputs]:
                raise ValueError(f"{given} of a prompt need {missing} beside them")
            _check_sizes(modality.inputs[1], inputs[modality.inputs[1]], modality.num_sizes)
            counts = self._num_rows(modality, inputs)
            pixels, expected = inputs[modality.inputs[0]], self._entries(modality, inputs)
            num_pixels = pixels.shape[0] if pixels.ndim else 0
            if num_pixels != sum(expected):
                raise ValueError(
                    f"{modality.inputs[0]} must have {sum(expected)} rows by "
                    f"{modality.inputs[1]}, got {num_pixels}"
                )
            is_own = self._are_of(modality, tokens)
            runs = [len(list(run)) for own, run in groupby(is_own) if own]
            if sum(runs) != sum(counts):
                token = self._token(modality.placeholder)
                raise ValueError(
                    f"the prompt has {sum(runs)} placeholders (token {token}) for "
                    f"{len(counts)} {modality.name}(s) whose features are {sum(counts)} rows"
                )
            if self.has_positions and runs != self._frames(modality, inputs):
                raise ValueError(
                    f"placeholders of {modality.name}s must stand apart, in runs of "
                    f"{self._frames(modality, inputs)}, got runs of {runs}"
                )

    def places(self, tokens: Sequence[int], inputs: Inputs) -> list[int]:
        """Find the placeholders of a prompt's images and videos: indices of tokens, ascending."""
        return sorted(place for _, own in self._places_of_each(tokens, inputs) for place in own)

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], inputs: Inputs) -> Tensor:
        """Compute the embeddings [K, dim] of the ``places`` of a prompt, on the model's device."""
        places: list[int] = []
        found: list[Tensor] = []
        for modality, own in self._places_of_each(tokens, inputs):
            taken = [self._moved(inputs[name]) for name in modality.inputs]
            features = getattr(self.module, modality.features)(*taken, return_dict=True)
            places += own
            found.append(torch.cat(list(features.pooler_output)))
        if len(found) == 1:
            return found[0]
        in_order = torch.tensor(places, dtype=torch.int64, device="cpu").argsort()
        return torch.cat(found)[in_order.to(found[0].device)]

    def positions(self, tokens: Sequence[int], inputs: Inputs) -> tuple[Tensor, int]:
        """Compute the rotary positions [3, tokens] of a prompt, as transformers counts them.

        Returns:
            The positions, and the difference of later tokens' positions from their indices."""
        ids = torch.tensor([[*tokens]], dtype=torch.int64, device="cpu")
        kinds = torch.zeros_like(ids)
        sizes = {}
        for modality, own in self._places_of_each(tokens, inputs):
            kinds[0, own] = 1 + self.modalities.index(modality)
            sizes[modality.inputs[1]] = inputs[modality.inputs[1]].cpu()
        found, deltas = self.module.get_rope_index(ids, mm_token_type_ids=kinds, **sizes)
        return found[:, 0], int(deltas)

    def digests(
        self, tokens: Sequence[int], inputs: Inputs
    ) -> list[tuple[list[int], list[tuple[bytes, int]]]]:
        """Hash the images and videos of a prompt.

        Returns:
            For each kind, its placeholders' places, and its images in order: a digest of each
            image's content, and the number of its rows."""
        found = []
        for modality, places in self._places_of_each(tokens, inputs):
            counts = self._num_rows(modality, inputs)
            pixels, *others = (inputs[name].cpu() for name in modality.inputs)
            parts = [pixels.split(self._entries(modality, inputs)), *others]
            contents = [_digest(modality.name, *each) for each in zip(*parts, strict=True)]
            found.append((places, list(zip(contents, counts, strict=True))))
        return found

    def _places_of_each(
        self, tokens: Sequence[int], inputs: Inputs
    ) -> list[tuple[Modality, list[int]]]:
        """Find the kinds that a prompt has, each with the places of its placeholders."""
        return [
            (modality, [place for place, own in enumerate(self._are_of(modality, tokens)) if own])
            for modality in self.modalities
            if modality.inputs[0] in inputs
        ]

    def _are_of(self, modality: Modality, tokens: Sequence[int]) -> list[bool]:
        """Mark the tokens that are placeholders of this kind."""
        placeholder = self._token(modality.placeholder)
        is_own = [token == placeholder for token in tokens]
        for other in self.modalities:
            if other.span is not None and other.placeholder == modality.placeholder:
                begin, end = map(self._token, other.span)
                steps = ((token == begin) - (token == end) for token in tokens)
                within = (count > 0 for count in accumulate(steps))
                is_wanted = other is modality
                is_own = [
                    own and inside == is_wanted for own, inside in zip(is_own, within, strict=True)
                ]
        return is_own

    def _token(self, field: str) -> int:
        return int(getattr(self.module.config, field))

    def _num_rows(self, modality: Modality, inputs: Inputs) -> list[int]:
        """Count the rows of embeddings of each image."""
        merged = modality.merge(self.module.config) ** 2
        counts: list[int] = (inputs[modality.inputs[1]].prod(-1) // merged).tolist()
        return counts

    def _frames(self, modality: Modality, inputs: Inputs) -> list[int]:
        """Count the rows of each frame, which are a run of placeholders.

        An image is one frame; timestamps separate the frames of a video."""
        frames = inputs[modality.inputs[1]][:, 0].tolist()
        rows = self._num_rows(modality, inputs)
        return [n // count for n, count in zip(rows, frames, strict=True) for _ in range(count)]

    def _entries(self, modality: Modality, inputs: Inputs) -> list[int]:
        """Count the rows of each image in the pixels."""
        sizes = inputs[modality.inputs[1]]
        counts: list[int] = sizes.prod(-1).tolist() if modality.is_packed else [1] * len(sizes)
        return counts

    def _moved(self, x: Tensor) -> Tensor:
        dtype = next(self.module.parameters()).dtype
        return x.to(self.device, dtype if x.is_floating_point() else x.dtype)


def _check_sizes(name: str, sizes: Tensor, count: int) -> None:
    if sizes.ndim != 2 or sizes.shape[1] != count or sizes.is_floating_point():
        raise ValueError(
            f"{name} must be integers of shape [images, {count}], got {[*sizes.shape]} in "
            f"{sizes.dtype}"
        )
    if bool((sizes < 1).any()):
        raise ValueError(f"{name} must be at least 1, got {sizes.tolist()}")


def _digest(name: str, *parts: Tensor) -> bytes:
    content = hashlib.blake2b(name.encode(), digest_size=32)
    for part in parts:
        content.update(repr((part.shape, part.dtype)).encode())
        content.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.digest()
