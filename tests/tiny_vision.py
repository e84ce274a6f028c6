"""Random multimodal models of transformers, and prompts with images of random pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE, make_model, randomize

IMAGE, VIDEO, START, END = range(VOCAB_SIZE - 4, VOCAB_SIZE)
MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
PATCH, MERGE, FRAMES = 4, 2, 2  # pixels along a patch, patches along a row's square, and in time
MOST_PATCHES = 32  # of a tile of lfm2_vl
_PATCHES = {"patch_size": PATCH, "hidden_size": 32, "num_attention_heads": 2}
_GRID = {"spatial_merge_size": MERGE, "temporal_patch_size": FRAMES}


def _qwen(name: str, family: str, **options: Any) -> Any:
    """Both parts as ``name`` has them, of a text model of ``family``."""
    vision = {**_PATCHES, **_GRID, "depth": 2, "num_heads": 2, "intermediate_size": 64}
    del vision["num_attention_heads"]
    config = getattr(tf, f"{name}Config")(
        text_config=make_model(family, **options).config.to_dict(),
        vision_config={**vision, "out_hidden_size": 64, "num_position_embeddings": 16},
        **MARKS,
    )
    return getattr(tf, f"{name}ForConditionalGeneration")(config)


def qwen3_5(**options: Any) -> Any:
    return _qwen("Qwen3_5", "qwen3_5", **options)


def qwen3_5_moe(**options: Any) -> Any:
    return _qwen("Qwen3_5Moe", "qwen3_5_moe", **options)


def qwen4_exp(**options: Any) -> Any:
    return _qwen("Qwen4Exp", "qwen4_exp", **options)


def glm5_next(**options: Any) -> Any:
    """Rows of images and of videos have one placeholder; videos stand between two tokens."""
    sizes = {**_PATCHES, **_GRID, "depth": 2, "num_heads": 2, "intermediate_size": 64}
    del sizes["num_attention_heads"]
    limits = {"swiglu_limit": 0.7, "projection_intermediate_size": 48, "out_hidden_size": 64}
    config = tf.Glm5NextConfig(
        text_config=make_model("glm5_next", **options).config.text_config.to_dict(),
        vision_config={**sizes, **limits},
        image_token_id=IMAGE,
        video_start_token_id=START,
        video_end_token_id=END,
    )
    return tf.Glm5NextForConditionalGeneration(config)


def lfm2_vl(**options: Any) -> Any:
    vision = {**_PATCHES, "num_hidden_layers": 2, "intermediate_size": 64, "num_patches": 16}
    config = tf.Lfm2VlConfig(
        text_config=make_model("lfm2", **options).config.to_dict(),
        vision_config={**vision, "model_type": "siglip2_vision_model"},
        projector_hidden_size=48,
        downsample_factor=MERGE,
        image_token_id=IMAGE,
    )
    return tf.Lfm2VlForConditionalGeneration(config)


def lfm3_vl(**options: Any) -> Any:
    vision = {**_PATCHES, **_GRID, "num_hidden_layers": 4, "num_key_value_heads": 1}
    config = tf.Lfm3VlConfig(
        text_config=make_model("lfm3", **options).config.to_dict(),
        vision_config={**vision, "intermediate_size": 64},
        projector_hidden_size=48,
        **MARKS,
    )
    return tf.Lfm3VlForConditionalGeneration(config)


BUILDERS: dict[str, Callable[..., Any]] = {
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen4_exp": qwen4_exp,
    "glm5_next": glm5_next,
    "lfm2_vl": lfm2_vl,
    "lfm3_vl": lfm3_vl,
}


def make_vision_model(family: str, *, seed: int = 0, **options: Any) -> Any:
    """A random multimodal model of one family; ``options`` go to its text config."""
    model = BUILDERS[family](**options).eval().requires_grad_(False)
    randomize(model, seed)
    return model


@dataclass(frozen=True)
class Seen:
    """A prompt, and what a processor returns beside its tokens."""

    tokens: list[int]
    inputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def encoded(self) -> dict[str, Any]:
        """As a processor returns it."""
        return {"input_ids": torch.tensor([self.tokens]), **self.inputs}

    def to(self, dtype: torch.dtype) -> Seen:
        """The same, for a model of this dtype."""
        cast = {n: x.to(dtype) if x.is_floating_point() else x for n, x in self.inputs.items()}
        return Seen(self.tokens, cast)

    def asked(self, family: str) -> dict[str, Any]:
        """As transformers' model takes it."""
        if not self.inputs or family.startswith(("lfm", "glm")):
            return self.encoded
        ids = torch.tensor([self.tokens])
        kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        return {**self.encoded, "mm_token_type_ids": kinds}


def make_seen(
    family: str, parts: Sequence[int | tuple[int, int] | tuple[int, int, int]], seed: int = 0
) -> Seen:
    """A prompt of texts by their lengths, images by (height, width) in patches, and videos by
    (frames, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    images, videos = [], []
    for part in parts:
        match part:
            case int():
                tokens += torch.randint(IMAGE, (part,), generator=generator).tolist()
            case (height, width):
                marked = [IMAGE] * (height * width // MERGE**2)
                tokens += marked if family == "glm5_next" else [START, *marked, END]
                images.append((1, height, width))
            case (frames, height, width):
                rows = height * width // MERGE**2
                if family == "glm5_next":
                    shown = [[*[IMAGE] * rows, second] for second in range(frames)]
                    tokens += [START, *chain.from_iterable(shown), END]
                else:
                    for second in range(frames):
                        tokens += [second, START, *[VIDEO] * rows, END]
                videos.append(part)
    if family == "lfm2_vl":
        return Seen(tokens, _tiles([grid[1:] for grid in images], generator) if images else {})
    inputs = {}
    for kind, name, grids in (("image", "", images), ("video", "_videos", videos)):
        if grids:
            sizes = torch.tensor(grids)
            width = 3 * FRAMES * PATCH**2
            pixels = torch.randn(int(sizes.prod(-1).sum()), width, generator=generator)
            inputs |= {f"pixel_values{name}": pixels, f"{kind}_grid_thw": sizes}
    return Seen(tokens, inputs)


def _tiles(shapes: list[tuple[int, int]], generator: torch.Generator) -> dict[str, Tensor]:
    sizes = torch.tensor(shapes)
    count = sizes.prod(-1)
    mask = (torch.arange(MOST_PATCHES) < count[:, None]).int()
    width = 3 * PATCH**2
    pixels = torch.randn(len(shapes), MOST_PATCHES, width, generator=generator)
    return {
        "pixel_values": pixels * mask[..., None],
        "spatial_shapes": sizes,
        "pixel_attention_mask": mask,
    }
