"""Prompts in every shape that callers have them, and one clear error for every other."""

import array
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_level
from torch_hybrid.serving.prompts import as_prompts, prompt_tokens

TOKENS = [3, 1, 4]
ASK = [{"role": "user", "content": "the fox"}]
MESSAGE_TOKENS = "<|user|>the fox<end>"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(CHAT_TEMPLATE)


def read(prompts, tokenizer=None):
    """What the engine makes of the argument of ``generate``."""
    return [prompt_tokens(prompt, tokenizer) for prompt in as_prompts(prompts)]


@pytest.mark.parametrize(
    "prompt",
    [
        TOKENS,
        tuple(TOKENS),
        array.array("i", TOKENS),
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
        torch.tensor([9, *TOKENS])[1:],
        np.array(TOKENS),
        np.array(TOKENS, dtype=np.uint16),
        [torch.tensor(3), np.int64(1), 4],
        {"input_ids": TOKENS},
        {"input_ids": [TOKENS]},
        {"input_ids": torch.tensor([TOKENS])},
        {"input_ids": np.array([TOKENS]), "token_type_ids": [[0, 0, 0]]},
        {"input_ids": [[0, *TOKENS]], "attention_mask": [[0, 1, 1, 1]]},
        {"input_ids": [[0, *TOKENS, 0]], "attention_mask": torch.tensor([[0, 1, 1, 1, 0]]).bool()},
        {"input_ids": [TOKENS], "length": [3], "special_tokens_mask": [[0, 0, 0]]},
        {"input_ids": [TOKENS], "pixel_values": None, "labels": None},
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_one_prompt_in_every_shape(prompt):
    assert read(prompt) == read([prompt]) == [TOKENS]
    assert all(type(token) is int for token in prompt_tokens(prompt, None))


@pytest.mark.parametrize(
    "prompts",
    [
        [TOKENS, [7, 8, 9]],
        (row for row in (TOKENS, [7, 8, 9])),
        torch.tensor([TOKENS, [7, 8, 9]]),
        np.array([TOKENS, [7, 8, 9]]),
        [torch.tensor(TOKENS), np.array([7, 8, 9])],
        [TOKENS, {"input_ids": [[7, 8, 9]]}],
        {"input_ids": [TOKENS, [7, 8, 9]]},
        {"input_ids": [torch.tensor(TOKENS), torch.tensor([7, 8, 9])]},
        {"input_ids": torch.tensor([TOKENS, [7, 8, 9]])},
    ],
)
def test_several_prompts_in_every_shape(prompts):
    assert read(prompts) == [TOKENS, [7, 8, 9]]


def test_no_prompt_at_all_and_empty_prompts():
    assert as_prompts([]) == []
    assert read([[]]) == read(torch.zeros(0, dtype=torch.int64)) == [[]]
    assert as_prompts(torch.zeros(0, 5, dtype=torch.int64)) == []


def test_texts(tokenizer):
    fox = tokenizer.encode("the fox")
    assert read("the fox", tokenizer) == [fox]
    assert read(["the fox", "", TOKENS], tokenizer) == [fox, [], TOKENS]


def test_what_a_tokenizer_returns(tokenizer):
    tokenizer.pad_token = "<end>"
    texts = ["the", "the quick fox"]
    expected = [tokenizer.encode(text) for text in texts]
    assert read(tokenizer("the")) == expected[:1]
    assert read(tokenizer(texts)) == expected
    for side in ("left", "right"):
        padded = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
        assert read(padded) == expected
    encoded = tokenizer.apply_chat_template(ASK, return_tensors="pt")
    assert read(encoded) == [tokenizer.encode(MESSAGE_TOKENS)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=4))
def test_padding_is_left_out_wherever_it_is(rows):
    longest = max(map(len, rows))
    left = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    for make in (torch.tensor, np.array, list):
        assert read({"input_ids": make(left), "attention_mask": make(mask)}) == rows


def test_a_conversation_is_written_by_the_chat_template(tokenizer):
    expected = tokenizer.encode(f"{MESSAGE_TOKENS}<|assistant|>")
    assert read(ASK, tokenizer) == [expected]
    assert read([ASK, "the", ASK], tokenizer) == [expected, tokenizer.encode("the"), expected]


def test_the_assistants_last_message_is_continued(tokenizer):
    begun = [*ASK, {"role": "assistant", "content": "quick"}]
    expected = tokenizer.encode(f"{MESSAGE_TOKENS}<|assistant|>quick")
    assert prompt_tokens(begun, tokenizer) == expected


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (None, TypeError, "got None (NoneType)"),
        (7, TypeError, "got 7 (int)"),
        (2.5, TypeError, "got 2.5 (float)"),
        (b"text", TypeError, "got b'text' (bytes)"),
        ({1, 2}, TypeError, "got {1, 2} (set)"),
        ([1, 2.0], TypeError, "a token must be an int, got 2.0 (float) at place 1"),
        ([1, True], TypeError, "a token must be an int, got True (bool) at place 1"),
        ([1, None], TypeError, "a token must be an int, got None (NoneType) at place 1"),
        ([1, "two"], TypeError, "a list of prompts, got a mix of both: [1, 'two'] (list)"),
        ([1, [2]], TypeError, "a list of prompts, got a mix of both: [1, [2]] (list)"),
        ([[1, [2]]], TypeError, "a token must be an int, got [2] (list) at place 1"),
        ([[1, torch.tensor([2])]], TypeError, "got Tensor of shape [1] and torch.int64 at place 1"),
        (torch.tensor([1.0]), TypeError, "a token must be an int, got 1.0 (float) at place 0"),
        (torch.tensor([True]), TypeError, "a token must be an int, got True (bool) at place 0"),
        (np.array([True]), TypeError, "a token must be an int, got True (bool) at place 0"),
        (np.array(["a"]), TypeError, "a token must be an int, got 'a' (str) at place 0"),
        ([torch.tensor(True)], TypeError, "got tensor(True) (Tensor) at place 0"),
        (torch.tensor(7), ValueError, "a 1-D or 2-D array, got tensor(7) (Tensor)"),
        (torch.zeros(1, 2, 3), ValueError, "got Tensor of shape [1, 2, 3] and torch.float32"),
        ([torch.tensor([[1, 2]])], ValueError, "a prompt must be a 1-D array, got Tensor of shape"),
        ([np.array([[1]])], ValueError, "must be a 1-D array, got ndarray of shape [1, 1] and int"),
        (
            "text",
            ValueError,
            "must be tokens when the engine has no tokenizer, got a text",
        ),
        (ASK, ValueError, "a conversation needs a tokenizer with a chat template, the engine has"),
        (ASK[0], TypeError, "got ['content', 'role']; a message belongs in a list"),
        ({"ids": [1]}, TypeError, """a dict as a prompt must have "input_ids", got ['ids']"""),
        ([*ASK, "text"], TypeError, "got a mix of both"),
        ([[*ASK, "text"]], TypeError, "message 1 must be a dict, got 'text' (str)"),
        (
            [{"role": "user"}],
            ValueError,
            """must have "role" and "content", got ['role']""",
        ),
        (
            [{"role": "user", "content": None}],
            ValueError,
            """must have "role" and "content", got ['role']""",
        ),
        (
            [{"role": 5, "content": "a"}],
            TypeError,
            "the role of message 0 must be a text, got 5 (int)",
        ),
        ({"input_ids": "text"}, TypeError, "input_ids must be a list or an array of integers"),
        ({"input_ids": 5}, TypeError, "input_ids must be a list or an array of integers, got 5"),
        ({"input_ids": [1, [2]]}, TypeError, "input_ids must be one row or a list of rows"),
        ({"input_ids": torch.zeros(1, 1, 1)}, ValueError, "input_ids must be a 1-D or 2-D array"),
        ({"input_ids": [[1.5]]}, TypeError, "a token must be an int, got 1.5 (float) at place 0"),
        (
            {"input_ids": [[1, 2]], "attention_mask": [[1]]},
            ValueError,
            "attention_mask must have rows of [2] entries as input_ids, got [1]",
        ),
        (
            {"input_ids": [[1]], "pixel_values": torch.zeros(1)},
            ValueError,
            "a prompt must be of tokens alone, got ['pixel_values'] beside input_ids",
        ),
        *(
            (
                {"input_ids": [[1, 2]], name: [[1, 2]]},
                ValueError,
                f"a prompt must be of tokens alone, got ['{name}'] beside input_ids",
            )
            for name in ("position_ids", "labels", "inputs_embeds", "image_grid_thw", "tomorrows")
        ),
        (
            {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]},
            ValueError,
            "attention_mask must be 1, and 0 at the ends of a row alone, got [1, 0, 1]",
        ),
        (
            {"input_ids": [[1, 2]], "attention_mask": [[1, 2]]},
            ValueError,
            "attention_mask must be 1, and 0 at the ends of a row alone, got [1, 2]",
        ),
        (
            {"input_ids": [[1, 2]], "token_type_ids": [[0, 1]]},
            ValueError,
            "token_type_ids must be 0: no model here tells segments apart",
        ),
        ([{"input_ids": [[1], [2]]}], ValueError, "must have one row of input_ids, got 2 rows"),
    ],
)
def test_everything_else_names_what_was_expected_and_what_came(prompt, error, message):
    with pytest.raises(error, match=re.escape(message)):
        read(prompt)


def test_conversations_that_cannot_be_written(tokenizer):
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        prompt_tokens(ASK, byte_level())
    with pytest.raises(ValueError, match="the chat template refuses the conversation: no tools"):
        prompt_tokens([*ASK, {"role": "tool", "content": "3"}], tokenizer)

    class Plain:
        def encode(self, text):
            return [1]

        def decode(self, token_ids, *, skip_special_tokens):
            return ""

    with pytest.raises(ValueError, match="with a chat template, got Plain"):
        prompt_tokens(ASK, Plain())
    assert prompt_tokens("text", Plain()) == [1]


def test_a_text_that_is_no_unicode_is_named(tokenizer):
    with pytest.raises(ValueError, match="a text must be valid Unicode"):
        prompt_tokens("a\ud800b", tokenizer)
    with pytest.raises(ValueError, match="a text must be valid Unicode"):
        prompt_tokens([{"role": "user", "content": "a\ud800b"}], tokenizer)


@settings(deadline=None, max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2) | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["role", "content", "input_ids"]), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_whatever_comes_is_tokens_or_a_type_or_value_error(value):
    try:
        rows = read(value)
    except (TypeError, ValueError):
        return
    assert all(type(token) is int for row in rows for token in row)
