"""``Sampling`` checks every field when it is made, and reads what a checkpoint asks for."""

import dataclasses
import math

import pytest

from tests.serving.fake_runner import FakeRunner
from torch_hybrid.sampling import Sampling
from torch_hybrid.sampling.generation_config import FOLLOWED, HARMLESS, NAMED, not_followed
from torch_hybrid.serving.engine import Engine


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 0, "max_new_tokens must be at least 1, got 0"),
        ("min_new_tokens", -1, "min_new_tokens must be at least 0, got -1"),
        ("min_new_tokens", 65, "min_new_tokens must be at most max_new_tokens = 64, got 65"),
        ("temperature", -0.5, "temperature must be finite and at least 0, got -0.5"),
        ("temperature", math.nan, "temperature must be finite and at least 0, got nan"),
        ("top_k", -1, "top_k must be at least 0, got -1"),
        ("top_p", 0.0, r"top_p must be within \(0, 1\], got 0.0"),
        ("top_p", 1.5, r"top_p must be within \(0, 1\], got 1.5"),
        ("top_p", math.nan, r"top_p must be within \(0, 1\], got nan"),
        ("min_p", -0.1, r"min_p must be within \[0, 1\], got -0.1"),
        ("repetition_penalty", 0, r"repetition_penalty must be within \[1e-6, 1e6\], got 0"),
        (
            "repetition_penalty",
            1e-40,
            r"repetition_penalty must be within \[1e-6, 1e6\], got 1e-40",
        ),
        ("presence_penalty", 1e39, r"presence_penalty must be within \[-1e6, 1e6\], got 1e\+39"),
        ("frequency_penalty", math.nan, r"frequency_penalty must be within \[-1e6, 1e6\], got nan"),
        ("logit_bias", {3: math.inf}, "logit_bias must be at most 1e6 for each token, got inf"),
        ("logit_bias", {3: math.nan}, "logit_bias must be at most 1e6 for each token, got nan"),
        ("logit_bias", {-3: 1.0}, "logit_bias must be made of token ids of at least 0, got -3"),
        ("logprobs", -1, "logprobs must be at least 0, got -1"),
        ("n", 0, "n must be at least 1, got 0"),
        ("max_length", 1, "max_length must be at least 2, got 1"),
        ("min_length", -1, "min_length must be at least 0, got -1"),
        ("seed", 2**64, "seed must be a 64-bit integer, as are those of all n outputs, got 1844"),
        ("seed", -(2**63) - 1, "seed must be a 64-bit integer"),
        ("stop_token_ids", [-1], r"stop_token_ids must be at least 0 each, got \(-1,\)"),
        ("stop", "end", "stop must be a list of texts, got 'end'"),
        ("stop", ["a", ""], r"stop must be made of texts that are not empty, got \['a', ''\]"),
    ],
)
def test_refuses_values_out_of_range(field, value, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("top_k", 2.5, "top_k must be an integer, got 2.5"),
        ("max_new_tokens", "8", "max_new_tokens must be an integer, got '8'"),
        ("n", True, "n must be an integer, got True"),
        ("logprobs", 1.0, "logprobs must be an integer, got 1.0"),
        ("temperature", "warm", "temperature must be a number, got 'warm'"),
        ("temperature", None, "temperature must be a number, got None"),
        ("top_p", 1j, "top_p must be a number, got 1j"),
        ("seed", 1.5, "seed must be an integer, got 1.5"),
        ("stop", [1], "stop must be made of texts, got 1"),
        ("stop", 1, "stop must be a list, got 1"),
        ("stop_token_ids", 2, "stop_token_ids must be a list, got 2"),
        ("stop_token_ids", ["a"], "stop_token_ids must be made of token ids, got 'a'"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("logit_bias", [1, 2], r"logit_bias must be a mapping .* got \[1, 2\]"),
        ("logit_bias", {"a": 1.0}, "logit_bias must be a mapping"),
        ("logit_bias", {1: "b"}, "logit_bias must be a mapping"),
        ("logits_processor", 3, "logits_processor must be a callable or None, got 3"),
    ],
)
def test_refuses_values_of_another_type(field, value, message):
    with pytest.raises(TypeError, match=message):
        Sampling(**{field: value})


def test_no_field_takes_just_anything():
    """A new field without a check fails here."""
    for field in dataclasses.fields(Sampling):
        with pytest.raises((TypeError, ValueError), match=field.name):
            Sampling(**{field.name: object()})


def test_the_seeds_of_all_outputs_fit():
    with pytest.raises(ValueError, match="seed must be a 64-bit integer"):
        Sampling(seed=2**64 - 2, n=3)
    generators = [Sampling(seed=2**64 - 2, n=2, temperature=1.0).make_generator(i) for i in (0, 1)]
    assert generators[0].initial_seed() != generators[1].initial_seed()


class Checkpoint:
    def __init__(self, **config):
        self.generation_config = config


def test_of_reads_what_generate_would():
    chosen = Sampling.of(Checkpoint(do_sample=True, temperature=0.6, top_p=0.95, min_p=None))
    assert chosen == Sampling(temperature=0.6, top_p=0.95, top_k=50)
    assert Sampling.of(Checkpoint(do_sample=True)) == Sampling(temperature=1.0, top_k=50)
    assert Sampling.of(Checkpoint(temperature=0.6)) == Sampling()
    assert Sampling.of(Checkpoint()) == Sampling()
    changed = Sampling.of(Checkpoint(repetition_penalty=1.1), temperature=0.3, max_new_tokens=5)
    assert changed == Sampling(repetition_penalty=1.1, temperature=0.3, max_new_tokens=5)


def test_every_field_of_transformers_is_followed_or_harmless_or_named():
    """A field of a newer transformers fails here; until then it is named."""
    GenerationConfig = pytest.importorskip("transformers").GenerationConfig
    lists = (set(FOLLOWED), HARMLESS, set(NAMED))
    known = set[str]().union(*lists)
    assert len(known) == sum(map(len, lists))
    assert known - {"_commit_hash"} == set(GenerationConfig().to_dict())
    config = GenerationConfig(**GenerationConfig._get_default_generation_params())
    assert not_followed(config.to_dict()) == []


def test_of_names_what_it_does_not_follow():
    with pytest.warns(UserWarning, match="asks for num_beams=4, typical_p=0.2: ignored"):
        Sampling.of(Checkpoint(num_beams=4, typical_p=0.2, epsilon_cutoff=0.0))


@pytest.mark.parametrize("name", [*NAMED, "some_field_of_tomorrow"])
def test_of_names_each_field_that_it_does_not_follow(name):
    with pytest.warns(UserWarning, match=f"generation_config asks for {name}=0.125: ignored"):
        assert Sampling.of(Checkpoint(**{name: 0.125})) == Sampling()


@pytest.mark.parametrize("name", [*NAMED, *sorted(HARMLESS)])
def test_of_says_nothing_of_what_changes_no_token(name, recwarn):
    Sampling.of(Checkpoint(**{name: NAMED.get(name)}))
    Sampling.of(Checkpoint(**{name: None}))
    if name in HARMLESS:
        Sampling.of(Checkpoint(**{name: 17}))
    assert not recwarn.list


def test_of_follows_stop_texts_and_counts():
    assert Sampling.of(Checkpoint(stop_strings="END")).stop == ("END",)
    assert Sampling.of(Checkpoint(stop_strings=["a", "b"])).stop == ("a", "b")
    assert Sampling.of(Checkpoint(stop_strings=["a"]), stop=["c"]).stop == ("c",)
    assert Sampling.of(Checkpoint(num_return_sequences=3)).n == 3
    assert Sampling.of(Checkpoint(num_return_sequences=3), n=1).n == 1


@pytest.mark.filterwarnings("ignore:generation_config counts the prompt")
@pytest.mark.parametrize(
    ("config", "changes", "num_prompt", "least", "most"),
    [
        ({"max_length": 20}, {}, 5, 0, 15),
        ({"max_length": 20}, {}, 19, 0, 1),
        ({"max_length": 200}, {}, 5, 0, 195),
        ({"max_length": 20, "max_new_tokens": 30}, {}, 5, 0, 30),
        ({"max_length": 20}, {"max_new_tokens": 30}, 5, 0, 30),
        ({"max_length": 20}, {"max_length": 10}, 5, 0, 5),
        ({"max_new_tokens": 30}, {"max_length": 10}, 5, 0, 5),
        ({"min_length": 20, "max_new_tokens": 30}, {}, 5, 15, 30),
        ({"min_length": 20, "max_new_tokens": 30}, {}, 25, 0, 30),
        ({"min_length": 90, "max_new_tokens": 30}, {}, 5, 30, 30),
        ({"min_length": 90, "min_new_tokens": 3}, {}, 5, 3, 64),
        ({"min_length": 20, "max_length": 30}, {}, 5, 15, 25),
        ({"min_new_tokens": 90}, {}, 5, 90, 90),
        ({"min_new_tokens": 90}, {"max_new_tokens": 10}, 5, 10, 10),
        ({"min_new_tokens": 90, "max_length": 40}, {}, 5, 35, 35),
    ],
)
def test_of_follows_lengths_as_transformers_does(config, changes, num_prompt, least, most):
    sampling = Sampling.of(Checkpoint(**config), **changes).for_prompt(num_prompt)
    assert (sampling.min_new_tokens, sampling.max_new_tokens) == (least, most)


def test_of_names_lengths_that_count_the_prompt():
    expected = "generation_config counts the prompt in max_length=20, min_length=9$"
    with pytest.warns(UserWarning, match=expected):
        sampling = Sampling.of(Checkpoint(max_length=20, min_length=9))
    assert (sampling.max_length, sampling.max_new_tokens, sampling.min_length) == (20, 19, 9)
    expected = "asks for top_h=0.4: ignored; it counts the prompt in max_length=20$"
    with pytest.warns(UserWarning, match=expected):
        Sampling.of(Checkpoint(max_length=20, top_h=0.4))


def test_a_prompt_that_leaves_nothing_of_a_length_is_named():
    expected = "max_length must be more than the 20 tokens of the prompt, which it counts, got 20"
    with pytest.raises(ValueError, match=expected):
        Sampling(max_length=20).for_prompt(20)


def test_an_engine_counts_the_prompt():
    engine = Engine(FakeRunner())
    outputs = engine.generate([[1] * 5, [2] * 7], Sampling(max_length=9, ignore_eos=True))
    assert sorted(len(output.tokens) for output in outputs) == [2, 4]
    with pytest.raises(ValueError, match="prompt 1: max_length must be more than the 9 tokens"):
        engine.generate([[1], [2] * 9], Sampling(max_length=9))
    prompt, eos = [3, 4, 5], [*range(1, 50)]  # every token but one ends a request
    few = Sampling(stop_token_ids=eos, max_new_tokens=9, min_length=8)
    (output,) = engine.generate(prompt, few)
    assert output.tokens[:5] == [0] * 5
    assert output.tokens[5] != 0


@pytest.mark.filterwarnings("ignore:generation_config counts the prompt")
@pytest.mark.parametrize("field", ["max_length", "min_length", "min_new_tokens", "stop_strings"])
def test_of_names_values_of_another_type(field):
    name = field.removesuffix("_strings")
    with pytest.raises((TypeError, ValueError), match=name):
        Sampling.of(Checkpoint(**{field: 2.5}))


def test_of_refuses_values_out_of_range():
    with pytest.raises(ValueError, match=r"top_p must be within \(0, 1\], got 3.0"):
        Sampling.of(Checkpoint(top_p=3.0))
