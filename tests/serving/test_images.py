"""Images through the engine: the tokens of transformers' generate, however they come there."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.serving.prefix_cache.test_prefixes import Always
from tests.tiny_models import FEWEST_LAYERS, make_hybrid
from tests.tiny_tokenizers import image_processor
from tests.tiny_vision import IMAGE, PATCH, Seen, make_seen, make_vision_model
from torch_hybrid.serving.images import Images

SIZES = {"max_seqs": 4, "max_tokens": 32, "kv_tokens": 320, "page_size": 8, "compile": False}
NEW = 8
GREEDY = th.Sampling(max_new_tokens=NEW, ignore_eos=True)
# The first image is cut by the first chunk.
PARTS = [[28, (4, 6), 5, (2, 2), 30], [(4, 4), 12], [40], [21, (2, 8)], [3, (4, 4), (4, 4), 2]]


def small(family: str = "qwen3_5", **options: Any) -> Any:
    text = {"lfm2_vl": "lfm2", "lfm3_vl": "lfm3"}.get(family, family)
    return make_vision_model(family, **{**FEWEST_LAYERS[text], **options})


def prompts_of(family: str) -> list[Seen]:
    return [make_seen(family, parts, seed) for seed, parts in enumerate(PARTS)]


def by_transformers(hf_model: Any, family: str, prompts: Sequence[Seen]) -> list[list[int]]:
    return [
        hf_model.generate(
            **prompt.asked(family), max_new_tokens=NEW, do_sample=False, eos_token_id=-1
        )[0, len(prompt.tokens) :].tolist()
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def qwen() -> tuple[Any, list[Seen], list[list[int]]]:
    hf_model, prompts = small(), prompts_of("qwen3_5")
    expected = by_transformers(hf_model, "qwen3_5", prompts)
    return th.adapt(hf_model, vision=True), prompts, expected


def tokens_of(engine: th.Engine, prompts: Sequence[Any], sampling: Any = GREEDY) -> list[list[int]]:
    asked = [prompt.encoded if isinstance(prompt, Seen) else prompt for prompt in prompts]
    outputs = sorted(engine.generate(asked, sampling), key=lambda out: (out.index, out.sample))
    return [output.tokens for output in outputs]


def count_towers(engine: th.Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Placeholders of each prompt that the tower has seen from now on."""
    seen: list[int] = []
    tower = engine.runner.model.vision
    rows = tower.rows

    def counted(tokens: Sequence[int], inputs: Any) -> Any:
        seen.append(len(tower.places(tokens, inputs)))
        return rows(tokens, inputs)

    monkeypatch.setattr(tower, "rows", counted)
    return seen


@pytest.mark.parametrize("family", ["glm5_next", "lfm2_vl", "lfm3_vl"])
def test_tokens_of_transformers(family: str):
    """Prompts of texts and images together, in chunks that cut images."""
    hf_model, prompts = small(family), prompts_of(family)
    expected = by_transformers(hf_model, family, prompts)
    runner = th.Runner(th.adapt(hf_model, vision=True), **SIZES)
    assert tokens_of(th.Engine(runner), prompts) == expected
    assert (runner.free_slots, runner.free_pages) == (4, 40)


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_prompts_that_are_preempted_are_seen_again(qwen, run_ahead: str, monkeypatch):
    model, prompts, expected = qwen
    runner = th.Runner(model, **{**SIZES, "kv_tokens": 88})
    engine = th.Engine(runner, run_ahead=run_ahead)
    seen = count_towers(engine, monkeypatch)
    assert tokens_of(engine, prompts) == expected
    assert len(seen) >= sum(bool(prompt.inputs) for prompt in prompts)
    assert (runner.free_slots, runner.free_pages) == (4, 11)


def test_images_are_seen_once_for_all_samples(qwen, monkeypatch):
    model, prompts, expected = qwen
    engine = th.Engine(th.Runner(model, **SIZES))
    seen = count_towers(engine, monkeypatch)
    sampling = th.Sampling(max_new_tokens=NEW, ignore_eos=True, n=3)
    assert tokens_of(engine, prompts[:1], sampling) == expected[:1] * 3
    assert seen == [7]


def test_rows_are_given_up_when_the_prompt_has_passed_them(qwen):
    model, prompts, _ = qwen
    images = Images(model.vision, prompts[0].tokens, prompts[0].inputs, 2)
    images.load()
    images.passed(0, 70)
    images.passed(1, 40)
    assert images.rows(29, 3)[0].shape == (3, 64)
    images.passed(1, 43)
    with pytest.raises(AssertionError, match="not loaded"):
        images.rows(29, 3)


@pytest.mark.parametrize("keeps", [False, True])
def test_an_image_that_ends_a_prompt_is_seen_by_a_step_of_its_last_token(qwen, keeps: bool):
    """Alone, after a chunk or a kept prefix, that token is no draft's: its embedding is a row."""
    model, _, _ = qwen
    seen = make_seen("qwen3_5", [28 if keeps else 26, (4, 6)])
    prompt = Seen(seen.tokens[:-1], seen.inputs)  # its last token is the image's last
    assert (len(prompt.tokens) == 33) != keeps
    plain = th.Engine(th.Runner(model, **SIZES))
    speculation = th.Speculation(Always(), num_drafts=3, adapts=False)
    runner = th.Runner(model, **SIZES, max_drafts=3, max_snapshots=8)
    options = {"prefix_cache": th.PrefixCache(min_tokens=4)} if keeps else {}
    engine = th.Engine(runner, speculate=speculation, **options)
    for _ in range(3):
        sampling = th.Sampling(max_new_tokens=NEW, ignore_eos=True, n=2)
        assert tokens_of(engine, [prompt], sampling) == tokens_of(plain, [prompt], sampling)
    assert engine.stats().drafts.drafted > 0


def test_rows_are_given_up_by_a_step_with_drafts_too(qwen):
    """The last token of a prompt may be the first that is run with drafts."""
    model, _, _ = qwen
    seen = make_seen("qwen3_5", [23, (4, 6), 2])
    assert len(seen.tokens) == 33
    runner = th.Runner(model, **SIZES, max_drafts=3)
    engine = th.Engine(runner, speculate=th.Speculation(Always(), num_drafts=3, adapts=False))
    request = engine.submit(seen.encoded, GREEDY)
    while not request.tokens:
        engine.step()
    assert request.images._rows is None
    assert engine.stats().drafts.drafted > 0
    engine.close()


def test_drafts_go_on_from_where_images_moved_the_positions(qwen):
    model, prompts, expected = qwen
    runner = th.Runner(model, **SIZES, max_drafts=3)
    speculation = th.Speculation(th.Ngram(shortest=1), num_drafts=3, adapts=False)
    engine = th.Engine(runner, speculate=speculation)
    assert tokens_of(engine, prompts) == expected
    assert engine.stats().drafts.drafted > 0


def test_a_kept_prefix_is_of_the_images_that_it_shows(qwen, monkeypatch):
    """The same placeholders of other pixels, or of another shape, are another prefix."""
    model, prompts, expected = qwen
    runner = th.Runner(model, **SIZES, max_snapshots=16)
    options = th.PrefixCache(min_tokens=4)
    engine = th.Engine(runner, prefix_cache=options)
    first = prompts[0]
    later = Seen([*first.tokens, *expected[0], 5, 6, 7], first.inputs)
    assert tokens_of(engine, [first]) == expected[:1]
    seen = count_towers(engine, monkeypatch)
    (output,) = engine.generate([later.encoded], GREEDY)
    assert output.num_cached_tokens == len(first.tokens) + NEW - 1
    assert seen == []  # what is kept needs no tower
    assert [output.tokens] == tokens_of(th.Engine(runner), [later])
    changed = first.inputs["pixel_values"].clone()
    changed[-1, -1] += 1.0  # of the second image alone
    turned = torch.tensor([[1, 6, 4], [1, 2, 2]])
    for change, in_common in (({"pixel_values": changed}, 42), ({"image_grid_thw": turned}, 29)):
        other = Seen(first.tokens, {**first.inputs, **change})
        seen.clear()
        (output,) = engine.generate([other.encoded], GREEDY)
        assert seen == [7]
        assert output.num_cached_tokens <= in_common
        assert [output.tokens] == tokens_of(th.Engine(runner), [other])
    engine.close()


def test_prefixes_of_images_outlive_the_process(qwen, tmp_path):
    model, prompts, expected = qwen
    later = Seen([*prompts[0].tokens, *expected[0], 5, 6, 7], prompts[0].inputs)
    runner = th.Runner(model, **SIZES, max_snapshots=16)
    options = th.PrefixCache(min_tokens=4, host_bytes=1 << 24)
    with th.Engine(runner, prefix_cache=options) as engine:
        tokens_of(engine, prompts[:1])
        assert engine.save_prefixes(tmp_path / "prefixes") > 0
    with th.Engine(runner, prefix_cache=options) as engine:
        assert engine.load_prefixes(tmp_path / "prefixes") > 0
        (output,) = engine.generate([later.encoded], GREEDY)
        assert output.num_cached_tokens == len(prompts[0].tokens) + NEW - 1
    assert [output.tokens] == tokens_of(th.Engine(runner), [later])


def test_what_a_tower_raises_ends_its_request_alone(qwen, monkeypatch):
    model, prompts, expected = qwen
    runner = th.Runner(model, **SIZES)
    rows = model.vision.rows

    def failing(tokens: Sequence[int], inputs: Any) -> Any:
        if tokens == prompts[1].tokens:
            raise torch.OutOfMemoryError("no room for this image")
        return rows(tokens, inputs)

    monkeypatch.setattr(model.vision, "rows", failing)
    for run_ahead in ("off", "on"):
        engine = th.Engine(runner, run_ahead=run_ahead)
        outputs = {out.index: out for out in engine.generate([p.encoded for p in prompts], GREEDY)}
        assert outputs[1].finish_reason == "error"
        assert outputs[1].error == "the tower raised OutOfMemoryError: no room for this image"
        for index in (0, 2, 3, 4):
            assert outputs[index].tokens == expected[index]
        assert (runner.free_slots, runner.free_pages) == (4, 40)


def without(prompt: Seen, name: str) -> dict[str, Any]:
    return {key: value for key, value in prompt.encoded.items() if key != name}


def test_prompts_that_cannot_be(qwen):
    model, prompts, expected = qwen
    runner = th.Runner(model, **SIZES)
    engine = th.Engine(runner)
    prompt = prompts[0]
    fewer = Seen([t for at, t in enumerate(prompt.tokens) if at != 31], prompt.inputs)
    moved = Seen([*prompt.tokens], prompt.inputs)
    moved.tokens[34], moved.tokens[43] = prompt.tokens[43], IMAGE
    narrow = {**prompt.encoded, "pixel_values": prompt.inputs["pixel_values"][1:]}
    flat = {**prompt.encoded, "image_grid_thw": torch.tensor([1, 4, 6])}
    empty = {**prompt.encoded, "image_grid_thw": torch.tensor([[0, 4, 6], [1, 2, 2]])}
    several = {**prompt.encoded, "input_ids": torch.tensor([prompt.tokens] * 2)}
    talk = [{"role": "user", "content": [{"type": "image", "path": "there.png"}]}]
    for wrong, message in [
        (fewer.encoded, r"has 6 placeholders \(token 195\) for 2 image\(s\) whose features are 7"),
        (moved.encoded, r"placeholders of images must stand apart, in runs of \[6, 1\], got runs"),
        (without(prompt, "image_grid_thw"), r"\['pixel_values'\] of a prompt need \['image_grid_"),
        (
            without(prompt, "pixel_values"),
            r"\['image_grid_thw'\] of a prompt need \['pixel_values'",
        ),
        ({**prompt.encoded, "input_features": torch.zeros(1)}, r"takes \[.*got \['input_features'"),
        (narrow, "pixel_values must have 28 rows by image_grid_thw, got 27"),
        (flat, r"image_grid_thw must be integers of shape \[images, 3\], got \[3\] in torch.int64"),
        (empty, r"image_grid_thw must be at least 1, got \[\[0, 4, 6\], \[1, 2, 2\]\]"),
        (several, "images belong to one prompt, got 2 rows of input_ids"),
        ({**prompt.encoded, "pixel_values": "none"}, "pixel_values of a prompt must be numbers"),
        (talk, "images in a conversation need the checkpoint's processor"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.generate([prompts[2].tokens, wrong])
    assert tokens_of(engine, prompts) == expected
    assert tokens_of(engine, [prompt.tokens])  # placeholders alone are tokens as any
    assert (runner.free_slots, runner.free_pages) == (4, 40)


def test_images_for_a_model_without_its_tower(qwen):
    _, prompts, _ = qwen
    blind = th.Engine(th.Runner(make_hybrid(), **SIZES))
    with pytest.raises(ValueError, match="has images, and the model has no tower: a mul"):
        blind.generate([prompts[0].encoded])
    talk = [{"role": "user", "content": [{"type": "image", "image": None}]}]
    with pytest.raises(ValueError, match="of type 'image', and the model has no tower"):
        blind.submit(talk)


def pictures(*sizes: tuple[int, int]) -> list[Any]:
    """Images of random colours, (width, height)."""
    from PIL import Image

    generator = torch.Generator().manual_seed(sum(map(sum, sizes)))
    made = []
    for width, height in sizes:
        pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
        made.append(Image.fromarray(pixels.numpy()))
    return made


def talk_of(text: str, *images: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def test_conversations(tmp_path, monkeypatch):
    """Images of Pillow and paths, several and none; a second turn goes on from the first."""
    processor = image_processor(PATCH)
    ids = processor.tokenizer.convert_tokens_to_ids
    hf_model = small(vocab_size=len(processor.tokenizer))
    hf_model.model.config.image_token_id = ids("<|image_pad|>")
    hf_model.model.config.video_token_id = ids("<|video_pad|>")
    first, second, third = pictures((20, 16), (33, 21), (9, 40))
    third.save(tmp_path / "third.png")
    talks = [
        talk_of("the quick", first),
        talk_of("brown fox", second, str(tmp_path / "third.png")),
        talk_of("the"),
        [{"role": "user", "content": "fox"}],
    ]
    expected = []
    for talk in talks:
        inputs = processor.apply_chat_template(
            talk, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        out = hf_model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
        expected.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    runner = th.Runner(th.adapt(hf_model, vision=True), **SIZES, max_snapshots=16)
    options = th.PrefixCache(min_tokens=4)
    engine = th.Engine(runner, processor=processor, prefix_cache=options)
    assert tokens_of(engine, talks) == expected
    answered = [*talks[0], {"role": "assistant", "content": "brown"}, *talk_of("the", second)]
    (turn,) = engine.generate(answered, GREEDY)
    # Up to where the first message ends; the tokenizer writes the answer in its own way.
    assert turn.num_cached_tokens == len(processor.apply_chat_template(talks[0], tokenize=True)[0])
    (plain,) = th.Engine(runner, processor=processor).generate(answered, GREEDY)
    assert (turn.tokens, turn.text) == (plain.tokens, plain.text)
    buffer = io.BytesIO()
    first.save(buffer, "PNG")
    coded = base64.b64encode(buffer.getvalue()).decode()
    url = f"data:image/png;base64,{coded}"
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url, "file_id": None},
        {"type": "image", "base64": coded},
        {"image": first},
    ):
        talk = [{"role": "user", "content": [part, {"type": "input_text", "text": "the quick"}]}]
        assert tokens_of(engine, [talk]) == expected[:1]
    for part, message in (
        ({"type": "video_url", "video_url": {"url": "x.mp4"}}, "and parts may be text or image"),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA"}},
            "of type 'input_audio', and part",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([{"role": "user", "content": [part]}])
    for gone in (str(tmp_path / "not_there.png"), "http://127.0.0.1:1/not_there.png"):
        with pytest.raises(ValueError, match="the processor refuses the conversation: "):
            engine.generate(talk_of("what", gone))
    blind = {"input_ids": [[1, 2]]}
    monkeypatch.setattr(type(processor), "apply_chat_template", lambda *_, **__: blind)
    with pytest.raises(ValueError, match="the processor made no pixels of the images"):
        engine.generate(talks[0])
    engine.close()
