"""Messages are read whole: what is not understood is refused by name."""

from __future__ import annotations

import re

import pytest

import torch_hybrid as th
from tests.serving.fake_runner import FakeRunner
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_level
from torch_hybrid.serving.messages import Sight, read_messages
from torch_hybrid.serving.prompts import prompt_tokens

URL = "data:image/png;base64,AAAA"
BLIND = "and the model has no tower: a multimodal checkpoint keeps its own"
# Templates of multimodal families write a placeholder for whatever is an image.
SEEING_TEMPLATE = """{%- for message in messages -%}
<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if 'image' in part or 'image_url' in part or part.type == 'image' -%}<image>
{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}<end>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
LISTS_ALONE = """{%- for message in messages -%}
<|{{ message.role }}|>{% for part in message.content %}{{ part.text }}{% endfor %}<end>
{%- endfor -%}"""


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def engine():
    return th.Engine(FakeRunner(vocab_size=300, num_pages=64), byte_level(SEEING_TEMPLATE))


def ask(content, **fields):
    return [{"role": "user", "content": content, **fields}]


UNDERSTOOD_NOWHERE = [
    ({"type": "image", "image": "x.png"}, f"is of type 'image', {BLIND}"),
    ({"type": "image"}, f"is of type 'image', {BLIND}"),
    ({"image": "x.png"}, f"is of type 'image', {BLIND}"),
    ({"type": "image_url", "image_url": {"url": URL}}, f"is of type 'image_url', {BLIND}"),
    ({"image_url": URL}, f"is of type 'image_url', {BLIND}"),
    ({"type": "input_image", "image_url": URL}, f"is of type 'input_image', {BLIND}"),
    ({"type": "video", "video": "x.mp4"}, f"is of type 'video', {BLIND}"),
    ({"type": "video_url", "video_url": {"url": "x"}}, "is of type 'video_url', and parts may be"),
    ({"type": "audio", "audio": "x.wav"}, "is of type 'audio', and parts may be text"),
    ({"type": "input_audio", "input_audio": {"data": ""}}, "is of type 'input_audio', and parts"),
    ({"type": "file", "file": {"file_id": "1"}}, "is of type 'file', and parts may be text"),
    ({"type": "input_file", "file_id": "1"}, "is of type 'input_file', and parts may be text"),
    ({"type": "refusal", "refusal": "no"}, "is of type 'refusal', and parts may be text"),
    ({"type": "thought", "text": "hm"}, "is of type 'thought', and parts may be text"),
    ({"type": ["text"], "text": "hm"}, "is of type ['text'], and parts may be text"),
    ({"type": "text", "text": "hm", "image": "x.png"}, "must have 'text' beside its type and noth"),
    ({"type": "text", "content": "hm"}, "must have 'text' beside its type and nothing else, got"),
    ({"type": "text"}, "must have 'text' beside its type and nothing else, got []"),
    ({"text": "hm", "detail": "low"}, "must have a \"type\", got ['detail', 'text']"),
    ({"url": "x.png"}, "is of type 'url', and parts may be text"),
    ({}, 'must have a "type", got []'),
]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize(("part", "message"), UNDERSTOOD_NOWHERE)
def test_a_part_that_is_not_understood_is_refused(engine, role, part, message):
    talk = [*ask("the fox"), {"role": role, "content": [{"type": "text", "text": "a"}, part]}]
    for messages in (talk, [*talk, *ask("what is this")]):
        with pytest.raises(ValueError, match=re.escape(f"part 1 of message 1 {message}")):
            engine.generate(messages)
        with pytest.raises(ValueError, match=re.escape(f"part 1 of message 1 {message}")):
            engine.submit(messages)
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        (ask([["a"]]), TypeError, "part 0 of message 0 must be a dict with a \"type\", got ['a']"),
        (
            ask(["a"]),
            TypeError,
            "part 0 of message 0 must be a dict with a \"type\", got 'a' (str)",
        ),
        (ask([{"type": "text", "text": 5}]), TypeError, "text of part 0 of message 0 must be a te"),
        (ask({"type": "text", "text": "a"}), TypeError, "content of message 0 must be a text or a"),
        (ask(5), TypeError, "the content of message 0 must be a text or a list of parts, got 5 "),
        (ask(None), ValueError, 'message 0 must have "role" and "content", got'),
        (ask([]), ValueError, 'message 0 must have "role" and "content", got'),
        (ask(None, name="a"), ValueError, 'message 0 must have "role" and "content", got'),
        (ask("a", images=["x.png"]), ValueError, "message 0 has 'images': what it shows must be"),
        (
            ask("a", audio={"id": "x"}),
            ValueError,
            "message 0 has 'audio': what it shows must be pa",
        ),
        (ask("a", video_url="x"), ValueError, "message 0 has 'video_url': what it shows must be "),
        (ask("a", files=["x"]), ValueError, "message 0 has 'files': what it shows must be parts"),
        (ask("a", tool_calls=[{}]), ValueError, "message 0 has 'tool_calls', which the chat templ"),
        (ask("a", weather="fine"), ValueError, "message 0 has 'weather', which the chat template"),
        (ask([{"type": "text", "text": "\ud800"}]), ValueError, "a text must be valid Unicode"),
    ],
)
def test_a_message_that_is_not_understood_is_refused(tokenizer, messages, error, message):
    with pytest.raises(error, match=re.escape(message)):
        prompt_tokens(messages, tokenizer)


def test_keys_that_the_template_reads_are_understood():
    template = CHAT_TEMPLATE.replace(
        "{{ message.content }}", "{{ message.content }}{{ message.mood }}"
    )
    asked = ask("the fox", mood=" quick")
    expected = byte_level().encode("<|user|>the fox quick<end><|assistant|>")
    assert prompt_tokens(asked, byte_level(template)) == expected
    several = {"default": template, "other": CHAT_TEMPLATE}
    assert read_messages(asked, several) == asked
    with pytest.raises(ValueError, match="message 0 has 'images'"):
        read_messages(ask("a", images="x"), template + "{{ message.images }}")


def test_what_clients_write_for_nothing_is_left_out(tokenizer):
    asked = ask("the fox", name="me", tool_calls=None, audio=None, annotations=[], refusal=None)
    assert prompt_tokens(asked, tokenizer) == prompt_tokens(ask("the fox"), tokenizer)
    part = {"type": "text", "text": "the fox", "image_url": None}
    assert prompt_tokens(ask([part]), tokenizer) == prompt_tokens(ask("the fox"), tokenizer)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, SEEING_TEMPLATE, LISTS_ALONE])
def test_parts_of_text_are_the_text(template):
    tokenizer = byte_level(template)
    content = [
        {"type": "text", "text": "the "},
        {"type": "input_text", "text": "quick"},
        {"type": "output_text", "text": " fox"},
        {"text": "!"},
    ]
    text = tokenizer.decode(prompt_tokens(ask(content), tokenizer))
    assert text.removesuffix("<|assistant|>") == "<|user|>the quick fox!<end>"


def test_a_message_whose_role_the_template_leaves_out_is_refused(tokenizer):
    talk = [{"role": "developer", "content": "be brief"}, *ask("the fox")]
    text = tokenizer.decode(prompt_tokens(talk, tokenizer))
    assert text.startswith("<|developer|>be brief<end>")
    users_alone = CHAT_TEMPLATE.replace(
        "{%- for message in messages -%}",
        "{%- for message in messages if message.role in ('system', 'user') -%}",
    )
    with pytest.raises(ValueError, match="leaves out message 0, of the role 'developer'"):
        prompt_tokens(talk, byte_level(users_alone))
    with pytest.raises(ValueError, match="leaves out message 0, of the role 'developer'"):
        prompt_tokens(
            [{**talk[0], "content": [{"text": "be brief"}]}, talk[1]], byte_level(users_alone)
        )


SEES = Sight(kinds=("image", "video"), otherwise="the model's tower takes images and videos")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image", "path": "x.png"}, {"type": "image", "image": "x.png"}),
        ({"type": "image", "url": URL, "image": None}, {"type": "image", "image": URL}),
        ({"image": "x.png"}, {"type": "image", "image": "x.png"}),
        ({"type": "image_url", "image_url": {"url": URL}}, {"type": "image", "image": URL}),
        ({"type": "image_url", "image_url": URL}, {"type": "image", "image": URL}),
        ({"image_url": {"url": URL, "detail": "auto"}}, {"type": "image", "image": URL}),
        ({"type": "input_image", "image_url": URL}, {"type": "image", "image": URL}),
        ({"type": "video", "url": "x.mp4"}, {"type": "video", "video": "x.mp4"}),
    ],
)
def test_images_are_written_as_processors_take_them(part, expected):
    (message,) = read_messages(ask([part]), "", SEES)
    assert message == {"role": "user", "content": [expected]}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, "must have 'image' or 'url' or 'path' or 'base64' beside its type"),
        ({"type": "image", "image": "x", "url": "y"}, "must have 'image' or 'url' or 'path' or"),
        ({"type": "image", "image": "x", "min_pixels": 4}, "must have 'image' or 'url' or 'path'"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, "must have the detail"),
        ({"type": "input_image", "image_url": URL, "detail": "high"}, "must have the detail 'aut"),
        ({"type": "input_image", "file_id": "1"}, "must have 'url' beside its type and nothing"),
        ({"type": "image_url", "image_url": {"url": URL, "mime": "a"}}, "must have 'url' beside"),
        ({"type": "image_url"}, "must have 'url' beside its type and nothing else"),
        ({"type": "audio", "audio": "x"}, "of type 'audio', and parts may be text or image or vid"),
    ],
)
def test_images_that_are_not_understood_are_refused(part, message):
    with pytest.raises((TypeError, ValueError), match=message):
        read_messages(ask([part]), "", SEES)


def test_a_tower_without_videos_refuses_them():
    images = Sight(kinds=("image",), otherwise="the model's tower takes images")
    with pytest.raises(ValueError, match="is of type 'video', and the model's tower takes images"):
        read_messages(ask([{"type": "video", "video": "x.mp4"}]), "", images)
