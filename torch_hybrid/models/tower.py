"""The tower of a multimodal model: transformers' own modules, which make rows of images.

A prompt has a placeholder for each row that its images come to; the rows stand in the place of the
placeholders' embeddings. Nothing of a tower is compiled: it runs beside the steps. On a GPU its
convolutions of float32 are of TF32 where torch lets cuDNN have that, which is the default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Tensor]  # of a tower, by the names that a processor gives them


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """How images, or videos, come from a processor and go to a tower.

    Attributes:
        name: of one of them, for messages.
        inputs: names of what the processor returns, as the tower takes them: pixels, the sizes of
            each image in patches, and what else there is for each.
        num_sizes: numbers in the sizes of an image.
        is_packed: pixels of all images lie one after the other, a patch in each row; else each
            image has an entry, padded to the size of the largest.
        placeholder: the config's field of the token that stands for a row.
        span: its fields of the tokens that begin and end one, where placeholders of several kinds
            are one token: those within such a span are of this kind, and of no other.
        features: the method of transformers' module that makes the rows.
        merge: of a config, how many patches come to a row, along each side.
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
    """What the processors of Qwen's models return of one kind, "image" or "video"."""
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
    """Makes rows of the images of a prompt.

    Args:
        module: of transformers, without its language model.
        modalities: that the model takes.
        has_positions: whether tokens have 3-D positions, which images move.
    """

    def __init__(self, module: Any, modalities: Sequence[Modality], *, has_positions: bool) -> None:
        super().__init__()
        self.module = module
        self.modalities = tuple(modalities)
        self.has_positions = has_positions

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @property
    def input_names(self) -> tuple[str, ...]:
        """Of all that the tower takes."""
        return tuple(name for modality in self.modalities for name in modality.inputs)

    def check(self, tokens: Sequence[int], inputs: Inputs) -> None:
        """Raise ValueError unless inputs are whole and come to as many rows as there are
        placeholders among the tokens of the prompt."""
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
        """Which tokens of a prompt are placeholders of what it has, ascending."""
        return sorted(place for _, own in self._places_of_each(tokens, inputs) for place in own)

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], inputs: Inputs) -> Tensor:
        """[K, dim] a row for each of the ``places`` of a prompt, on the model's device."""
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
        """[3, tokens] rotary positions of a prompt, as transformers counts them, and by how much
        those of later tokens are more than their number."""
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
        """Of each kind, the places of a prompt, and its images in order: a digest of their content,
        and their rows."""
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
        """What is given of a prompt, and where its placeholders are."""
        return [
            (modality, [place for place, own in enumerate(self._are_of(modality, tokens)) if own])
            for modality in self.modalities
            if modality.inputs[0] in inputs
        ]

    def _are_of(self, modality: Modality, tokens: Sequence[int]) -> list[bool]:
        """Which tokens are placeholders of this kind."""
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
        """Rows of each image."""
        merged = modality.merge(self.module.config) ** 2
        counts: list[int] = (inputs[modality.inputs[1]].prod(-1) // merged).tolist()
        return counts

    def _frames(self, modality: Modality, inputs: Inputs) -> list[int]:
        """Rows of each frame: an image is one, between those of a video stand their times."""
        frames = inputs[modality.inputs[1]][:, 0].tolist()
        rows = self._num_rows(modality, inputs)
        return [n // count for n, count in zip(rows, frames, strict=True) for _ in range(count)]

    def _entries(self, modality: Modality, inputs: Inputs) -> list[int]:
        """Rows of the pixels that each image has."""
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
