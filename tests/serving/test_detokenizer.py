"""Text as tokens come in, over tokenizers that cut characters apart or change what they wrote."""

from itertools import pairwise

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.fake_runner import FakeRunner, alone
from tests.tiny_tokenizers import (
    EVERY_KIND,
    bpe_fallback,
    byte_level,
    cleaned_bytes,
    cleaned_word_pieces,
    cleaned_words,
    metaspace,
    with_added_tokens,
)
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.detokenizer import Detokenizer
from torch_hybrid.serving.engine import Engine


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


@pytest.fixture(scope="module", params=[byte_level, metaspace])
def any_tokenizer(request):
    return request.param()


@pytest.fixture(scope="module", params=EVERY_KIND)
def every_tokenizer(request):
    return with_added_tokens(EVERY_KIND[request.param]())


@st.composite
def tokens_of(draw, tokenizer):
    """Tokens of a few kinds, so that they meet often; some the tokenizer does not know."""
    known = len(tokenizer)
    unknown = 0 if isinstance(tokenizer, transformers.ByT5Tokenizer) else 3  # it raises there
    few = draw(st.lists(st.integers(0, known + unknown - 1), min_size=1, max_size=8))
    return draw(st.lists(st.sampled_from(few), max_size=40))


def pieces(tokenizer, tokens, stop=()):
    """The pieces as they come, and the detokenizer at its end."""
    detokenizer = Detokenizer(tokenizer, stop)
    given = []
    for token in tokens:
        given.append(detokenizer.add(token))
        if detokenizer.is_stopped:
            break
    return [*given, detokenizer.finish()], detokenizer


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=30))
def test_the_pieces_of_a_text_add_up_to_it_in_whole_characters(any_tokenizer, text):
    tokens = any_tokenizer.encode(text)
    given, detokenizer = pieces(any_tokenizer, tokens)
    assert (
        "".join(given) == detokenizer.text == any_tokenizer.decode(tokens, skip_special_tokens=True)
    )
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in given)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_tokens_of_any_tokenizer_give_what_decoding_them_together_gives(every_tokenizer, data):
    tokens = data.draw(tokens_of(every_tokenizer))
    given, detokenizer = pieces(every_tokenizer, tokens)
    whole = every_tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(given) == detokenizer.text == whole


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_text_of_any_tokenizer_ends_before_a_stop_text(every_tokenizer, data):
    """The first tokens whose text has it end the request, whatever further ones would change."""
    tokens = data.draw(tokens_of(every_tokenizer))
    texts = [
        every_tokenizer.decode(tokens[:count], skip_special_tokens=True)
        for count in range(1, len(tokens) + 1)
    ]
    whole = data.draw(st.sampled_from(["x", *texts]))
    start = data.draw(st.integers(0, len(whole)))
    stop = whole[start : start + data.draw(st.integers(1, 4))].strip("\ufffd") or "x"
    given, detokenizer = pieces(every_tokenizer, tokens, [stop])
    seen = [text.rstrip("\ufffd") for text in texts[:-1]] + texts[-1:]
    first = next((text for text in seen if stop in text), None)
    expected = (texts or [""])[-1] if first is None else first[: first.index(stop)]
    assert detokenizer.is_stopped == (first is not None)
    assert "".join(given) == detokenizer.text == expected


CHANGING = {
    "bytes that one more makes unreadable": (bpe_fallback, ["<0xC3>", "<0xA9>", "<0xFF>"]),
    "a line's end before them": (metaspace, ["▁the", "<0x0A>", "<0xE2>", "<0x82>"]),
    "a sign that takes its space along": (cleaned_words, ["do", "n", "'", "t", "."]),
    "a space that comes back": (cleaned_bytes, ["x", "Ġ", "'", "Ġ", "."]),
    "two spaces": (cleaned_words, ["we", " ", "'", "ve", "?"]),
    "what continues a word": (cleaned_word_pieces, ["do", "##n", "'", "t", "we", "'", "re"]),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_text_that_a_later_token_changes_is_withheld(kind):
    make, names = CHANGING[kind]
    tokenizer = make()
    tokens = tokenizer.convert_tokens_to_ids(names)
    texts = [tokenizer.decode(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert not all(later.startswith(text) for text, later in pairwise(texts))
    given, _ = pieces(tokenizer, tokens)
    assert "".join(given) == texts[-1]


@settings(deadline=None, max_examples=200)
@given(
    text=st.text("abc ", max_size=30),
    stop=st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_stop_text_that_comes_first(tokenizer, text, stop):
    tokens = tokenizer.encode(text)
    given, detokenizer = pieces(tokenizer, tokens, stop)
    prefixes = [tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    first = next((p for p in prefixes if any(end in p for end in stop)), None)
    assert detokenizer.is_stopped == (first is not None)
    if first is not None:
        text = first[: min(first.find(end) for end in stop if end in first)]
    assert "".join(given) == detokenizer.text == text


class Wrapped:
    """A tokenizer of a caller's own, which names no tokens."""

    def __init__(self, tokenizer):
        self.encode = tokenizer.encode
        self.decode = tokenizer.decode


def test_bytes_of_a_callers_own_tokenizer_are_found_by_what_they_do():
    tokenizer = bpe_fallback()
    tokens = tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xC3>", "<0xA9>", "<0xFF>", "▁the"])
    given, _ = pieces(Wrapped(tokenizer), tokens)
    assert given == ["", "", "", "", "\ufffd" * 4 + " the", ""]
    assert "".join(given) == tokenizer.decode(tokens)


def test_text_that_may_begin_a_stop_text_is_withheld(tokenizer):
    given, _ = pieces(tokenizer, tokenizer.encode("1 END 2 ENOUGH"), ["ENDS"])
    assert "".join(given) == "1 END 2 ENOUGH"
    assert "E" not in given[2]


def test_a_piece_costs_the_same_however_long_the_text_is(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    for _ in range(50):
        for token in tokenizer.encode("the quick brown fox. "):
            detokenizer.add(token)
            assert len(detokenizer._tokens) < 8


@settings(deadline=None, max_examples=100)
@given(texts=st.lists(st.text("the fox, 日🦊é", max_size=6), max_size=5))
def test_special_tokens_neither_show_nor_take_a_space(any_tokenizer, texts):
    special = any_tokenizer.eos_token_id
    words = [any_tokenizer.encode(text) for text in texts]
    tokens = [token for word in words for token in (*word, special)]
    given, _ = pieces(any_tokenizer, tokens)
    assert "".join(given) == any_tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_special_token_can_be_a_stop_text(any_tokenizer):
    before, after = any_tokenizer.encode("the fox"), any_tokenizer.encode(" jumps")
    end = any_tokenizer.eos_token
    tokens = [*before, any_tokenizer.eos_token_id, *after]
    given, detokenizer = pieces(any_tokenizer, tokens, ["nothing", end])
    assert detokenizer.is_stopped
    assert "".join(given) == detokenizer.text == "the fox"
    assert len(given) == len(before) + 2
    _, other = pieces(any_tokenizer, tokens, ["nothing"])
    assert not other.is_stopped


def test_a_special_token_as_a_stop_text_ends_an_unfinished_character(tokenizer):
    fox = tokenizer.encode("a🦊")
    given, detokenizer = pieces(tokenizer, [*fox[:-1], tokenizer.eos_token_id], ["<end>"])
    assert detokenizer.is_stopped
    assert "".join(given) == detokenizer.text == "a\ufffd"


@pytest.mark.parametrize("kind", ["special", "half a character"])
def test_tokens_without_text_cost_the_same_however_many_come(tokenizer, kind):
    fox = tokenizer.encode("🦊")
    token = tokenizer.eos_token_id if kind == "special" else fox[0]
    detokenizer, given = Detokenizer(tokenizer), []
    for one in [*fox, *[token] * 100, *fox]:
        given.append(detokenizer.add(one))
        assert len(detokenizer._tokens) < 20
    middle = "" if kind == "special" else "\ufffd" * 100
    assert "".join([*given, detokenizer.finish()]) == f"🦊{middle}🦊"


def test_a_stop_text_that_the_last_flush_finds_ends_the_request(tokenizer):
    """A piece with an unfinished character is held back until no further token comes."""
    fox = tokenizer.encode("🦊")[:1]
    detokenizer = Detokenizer(tokenizer, ["\ufffd"])
    assert [detokenizer.add(token) for token in fox] == [""]
    assert not detokenizer.is_stopped
    assert detokenizer.finish() == ""
    assert detokenizer.is_stopped

    engine = Engine(FakeRunner(vocab_size=300), tokenizer)
    (whole,) = engine.generate(["the"], Sampling(max_new_tokens=30))
    held = next(n for n in range(1, 31) if is_held(tokenizer, whole.tokens[:n]))
    sampling = Sampling(max_new_tokens=held, stop=["\ufffd"])
    *_, last = engine.generate(["the"], sampling, stream=True)
    assert last.output.finish_reason == "stop"
    assert "\ufffd" not in last.output.text


def is_held(tokenizer, tokens):
    """Whether the text so far ends in an unfinished character, its first."""
    text = tokenizer.decode(tokens)
    return text.endswith("\ufffd") and "\ufffd" not in text[:-1]


def test_engine_serves_texts(tokenizer):
    runner = FakeRunner(vocab_size=300)
    engine = Engine(runner, tokenizer)
    sampling = Sampling(max_new_tokens=20)
    prompt = tokenizer.encode("the quick")
    tokens = alone(prompt, sampling, vocab_size=300)
    (output,) = engine.generate(["the quick"], sampling)
    assert (output.prompt, output.tokens) == (prompt, tokens)
    assert output.text == tokenizer.decode(tokens, skip_special_tokens=True)
    events = list(engine.generate(["the quick"], sampling, stream=True))
    assert "".join(event.text for event in events) == events[-1].output.text == output.text


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_gives_one_text_streamed_and_whole(every_tokenizer, seed):
    engine = Engine(FakeRunner(vocab_size=len(every_tokenizer)), every_tokenizer)
    sampling = Sampling(max_new_tokens=40, temperature=2.0, seed=seed, ignore_eos=True)
    (whole,) = engine.generate([5, 6], sampling)
    events = list(engine.generate([5, 6], sampling, stream=True))
    assert events[-1].output.tokens == whole.tokens
    assert "".join(event.text for event in events) == events[-1].output.text == whole.text


def test_engine_ends_before_a_stop_text(tokenizer):
    engine = Engine(FakeRunner(vocab_size=300), tokenizer)
    (whole,) = engine.generate(["the"], Sampling(max_new_tokens=30))
    stop = whole.text[len(whole.text) // 2 :][:3]
    events = list(engine.generate(["the"], Sampling(max_new_tokens=30, stop=[stop]), stream=True))
    output = events[-1].output
    assert output.finish_reason == "stop"
    assert output.text == whole.text[: whole.text.index(stop)]
    assert "".join(event.text for event in events) == output.text
    assert whole.tokens[: len(output.tokens)] == output.tokens
    assert len(output.tokens) < 30


def test_a_stop_token_is_not_in_the_text(tokenizer):
    engine = Engine(FakeRunner(vocab_size=300), tokenizer)
    (whole,) = engine.generate(["the"], Sampling(max_new_tokens=9))
    sampling = Sampling(max_new_tokens=9, stop_token_ids=[whole.tokens[5]])
    for stream in (False, True):
        last = list(engine.generate(["the"], sampling, stream=stream))[-1]
        output = last.output if stream else last
        first = whole.tokens.index(whole.tokens[5])
        assert output.tokens == whole.tokens[: first + 1]
        assert output.text == tokenizer.decode(whole.tokens[:first], skip_special_tokens=True)
