"""Text as tokens come in, over a byte-level tokenizer that cuts characters apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import FakeRunner, alone
from torch_hybrid.detokenizer import Detokenizer
from torch_hybrid.engine import Engine
from torch_hybrid.sampling import Sampling

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE with the merges of a few words; any bytes can be written."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(["the quick brown fox", "größer über 日本"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


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
def test_the_pieces_of_a_text_add_up_to_it_in_whole_characters(tokenizer, text):
    given, detokenizer = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(given) == detokenizer.text == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in given)


@settings(deadline=None, max_examples=200)
@given(tokens=st.lists(st.integers(0, 299), max_size=25))
def test_any_tokens_give_what_decoding_them_together_gives(tokenizer, tokens):
    given, _ = pieces(tokenizer, tokens)
    assert "".join(given) == tokenizer.decode(tokens, skip_special_tokens=True)


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
