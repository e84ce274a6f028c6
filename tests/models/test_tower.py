"""Images in prompts: the logits of transformers' own multimodal models, however steps are cut."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.models.oracle import (
    Oracle,
    Step,
    assert_equal_logits,
    assert_rounds_like,
    chunked,
    decoded,
    mixed,
    whole,
)
from tests.tiny_models import FEWEST_LAYERS, block_gaps, make_model, router_gaps
from tests.tiny_vision import BUILDERS, END, IMAGE, START, Seen, make_seen, make_vision_model
from torch_hybrid.serving.images import Images

# Several images, one that ends a prompt, one at the start, and texts alone.
PARTS = {
    "several": [9, (4, 6), 5, (2, 2), 30, (6, 4), 17],
    "first": [(4, 4), 40],
    "last": [21, (2, 8)],
    "text": [50],
}
SEEDS = {"qwen3_5_moe": 3, "qwen4_exp": 3}  # of models without near ties
SMALL = {"max_seqs": 5, "max_tokens": 512, "kv_tokens": 640, "compile": False}
VIDEOS = [7, (3, 4, 2), 5, (4, 4), 6, (2, 2, 2), 12]


def prompts_of(family: str) -> list[Seen]:
    parts = list(PARTS.values())
    if family != "lfm2_vl":
        parts.append(VIDEOS)
    return [make_seen(family, own, seed) for seed, own in enumerate(parts)]


@torch.no_grad()
def ask(hf_model: Any, family: str, prompts: Iterable[Seen]) -> Oracle:
    """One forward of transformers for each prompt."""
    hf_model.set_experts_implementation("eager")
    texts, logits = [], []
    with router_gaps(hf_model) as gaps, block_gaps(hf_model) as between_blocks:
        for prompt in prompts:
            texts.append(prompt.tokens)
            logits.append(hf_model(**prompt.asked(family), use_cache=False).logits[0])
    assert min(gaps, default=1.0) > 3e-5, "routers have a near tie: take another seed"
    assert min(between_blocks, default=1.0) > 3e-6, "indexers have a near tie: take another seed"
    return Oracle(texts, logits)


def serve(runner: th.Runner, prompts: list[Seen], steps: Iterable[Step]) -> list[Tensor]:
    """The logits of each prompt's tokens, appended step by step, images cut where steps are."""
    tower = runner.model.vision
    images = [Images(tower, p.tokens, p.inputs, 1) if p.inputs else None for p in prompts]
    for own in filter(None, images):
        own.load()
    seqs = runner.new_sequences(len(prompts))
    done = [0] * len(prompts)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        rows, places, positions, start = [], [], [], 0
        for row, count in step.items():
            own, first = images[row], done[row]
            found = None if own is None else own.positions(first, count)
            counted = torch.arange(first, first + count).expand(3, -1)
            positions.append(counted if found is None else found)
            if own is not None and own.are_needed(first, count):
                given, at = own.rows(first, count)
                rows.append(given)
                places += [start + place for place in at]
            start += count
        out = runner.extend(
            [seqs[row] for row in step],
            [prompts[row].tokens[done[row] :][:count] for row, count in step.items()],
            logits="all",
            positions=torch.cat(positions, 1) if tower.has_positions else None,
            embeds=th.Embeds(rows=torch.cat(rows), places=places) if rows else None,
        )
        for row, logits in zip(step, out.split(list(step.values())), strict=True):
            parts[row].append(logits.clone())
            done[row] += step[row]
    runner.free(seqs)
    return [torch.cat(logits) for logits in parts]


@pytest.fixture(scope="module", params=BUILDERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    family = request.param
    hf_model = make_vision_model(family, seed=SEEDS.get(family, 2))
    prompts = prompts_of(family)
    oracle = ask(hf_model, family, prompts)
    path = tmp_path_factory.mktemp("checkpoint")
    hf_model.save_pretrained(path)
    model = th.from_pretrained(path, vision=True)
    return th.Runner(model, **SMALL), oracle, prompts


@pytest.mark.parametrize("cut", ["whole", "chunked", "decoded", "mixed"])
def test_logits(served: tuple[th.Runner, Oracle, list[Seen]], cut: str):
    runner, oracle, prompts = served
    lengths = [len(prompt.tokens) for prompt in prompts]
    steps = {
        "whole": lambda: whole(lengths),
        "chunked": lambda: chunked(lengths, 7),  # which ends within images
        "decoded": lambda: decoded(lengths, 5),  # some of them placeholders
        "mixed": lambda: mixed(lengths, 0),
    }
    assert_equal_logits(serve(runner, prompts, steps[cut]()), oracle)


def test_images_matter(served: tuple[th.Runner, Oracle, list[Seen]]):
    runner, oracle, prompts = served
    lengths = [len(prompt.tokens) for prompt in prompts]
    others = [
        Seen(p.tokens, {n: x.flip(0) if "pixel_values" in n else x for n, x in p.inputs.items()})
        for p in prompts
    ]
    with pytest.raises(AssertionError, match="of the largest logit"):
        assert_equal_logits(serve(runner, others, whole(lengths)), oracle)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_vl", "lfm3_vl"])
def test_bf16(family: str, tmp_path: Path):
    hf_model = make_vision_model(family, seed=2).bfloat16()
    prompts = prompts_of(family)
    twice = copy.deepcopy(hf_model).double()
    exact = ask(twice, family, [prompt.to(torch.float64) for prompt in prompts])
    theirs = ask(hf_model, family, [prompt.to(torch.bfloat16) for prompt in prompts])
    hf_model.save_pretrained(tmp_path)
    model = th.from_pretrained(tmp_path, vision=True)
    assert {weight.dtype for weight in model.vision.parameters()} == {torch.bfloat16}
    runner = th.Runner(model, **SMALL)
    lengths = [len(prompt.tokens) for prompt in prompts]
    ours = serve(runner, prompts, decoded(lengths, 3))
    assert_rounds_like(ours, theirs, exact, torch.bfloat16)


def test_images_and_videos_of_one_placeholder():
    """Those between the tokens of a video are its own, for each row and for its content."""
    model = th.adapt(make_vision_model("glm5_next", **FEWEST_LAYERS["glm5_next"]), vision=True)
    tower, prompt = model.vision, make_seen("glm5_next", VIDEOS)
    inputs = prompt.inputs
    begins, ends = ([i for i, t in enumerate(prompt.tokens) if t == mark] for mark in (START, END))
    spans = [range(*span) for span in zip(begins, ends, strict=True)]
    of_videos = {at for span in spans for at in span if prompt.tokens[at] == IMAGE}
    of_images = {at for at, token in enumerate(prompt.tokens) if token == IMAGE} - of_videos
    assert len(of_videos) == 8
    assert len(of_images) == 4
    for name, places in (("pixel_values_videos", of_videos), ("pixel_values", of_images)):
        changed = {**inputs, name: inputs[name] + 1}
        before, after = (Images(tower, prompt.tokens, x, 1).path for x in (inputs, changed))
        differ = [at for at, key in enumerate(before) if key != after[at]]
        assert differ == sorted(places)
        alone = {n: x for n, x in inputs.items() if ("video" in n) == ("video" in name)}
        assert tower.places(prompt.tokens, alone) == sorted(places)
    shorter = {**inputs, "video_grid_thw": torch.tensor([[3, 4, 2], [2, 2, 4]])}
    shorter["pixel_values_videos"] = torch.randn(40, inputs["pixel_values"].shape[1])
    with pytest.raises(ValueError, match=r"has 8 placeholders \(token 195\) for 2 video\(s\)"):
        Images(tower, prompt.tokens, shorter, 1)


def test_adapt_keeps_the_tower():
    hf_model = make_vision_model("lfm2_vl")
    prompt = make_seen("lfm2_vl", PARTS["several"])
    oracle = ask(hf_model, "lfm2_vl", [prompt])
    runner = th.Runner(th.adapt(hf_model, vision=True), **SMALL)
    assert_equal_logits(serve(runner, [prompt], whole([len(prompt.tokens)])), oracle)
    with pytest.raises(ValueError, match="hf_model was adapted before"):
        th.adapt(hf_model, vision=True)


def test_integers_leave_the_tower_as_it_is(tmp_path: Path):
    hf_model = make_vision_model("qwen3_5")
    hf_model.save_pretrained(tmp_path)
    model = th.from_pretrained(tmp_path, vision=True, weights="int8")
    assert {weight.dtype for weight in model.vision.parameters()} == {torch.float32}
    assert any(weight.dtype is torch.int8 for weight in model.parameters())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next_dense"])
def test_a_model_of_text_alone_has_no_tower(family: str, tmp_path: Path):
    hf_model = make_model(family)
    hf_model.save_pretrained(tmp_path)
    for load in (
        lambda: th.adapt(hf_model, vision=True),
        lambda: th.from_pretrained(tmp_path, vision=True),
    ):
        with pytest.raises(th.UnsupportedError, match="has no tower that is served: vision=True"):
            load()


def test_a_missing_weight_of_the_tower_is_named(tmp_path: Path):
    hf_model = make_vision_model("qwen3_5")
    del hf_model.model.visual.merger.norm
    hf_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"missing keys: \['model.visual.merger.norm.bias'"):
        th.from_pretrained(tmp_path, vision=True)


def test_positions_are_those_of_transformers():
    """Images of a prompt move what comes after them, on every axis."""
    hf_model = make_vision_model("qwen3_5")
    prompt = make_seen("qwen3_5", VIDEOS)
    asked = prompt.asked("qwen3_5")
    expected, delta = hf_model.model.get_rope_index(
        asked["input_ids"],
        asked["mm_token_type_ids"],
        image_grid_thw=asked["image_grid_thw"],
        video_grid_thw=asked["video_grid_thw"],
    )
    tower = th.adapt(hf_model, vision=True).vision
    images = Images(tower, prompt.tokens, prompt.inputs, 1)
    length = len(prompt.tokens)
    after = (torch.arange(length, length + 4) + int(delta)).expand(3, -1)
    whole_positions = torch.cat([expected[:, 0], after], dim=1)
    assert int(delta) < 0
    for first, count in ((0, length + 4), (3, 20), (length - 2, 4), (length + 1, 2)):
        found = images.positions(first, count)
        assert torch.equal(found, whole_positions[:, first : first + count])
