"""Rules on the logits, held to transformers' processors where it has one."""

import math

import pytest
import torch

from torch_hybrid.sampling import LogitsRules, Sampling, logprobs_of


def rules(num_prompt=0, end_token_ids=(), **options):
    return LogitsRules.of(
        Sampling(**options), num_prompt=num_prompt, end_token_ids=frozenset(end_token_ids)
    )


def test_most_requests_have_none():
    assert rules(temperature=1.0, top_k=4, logprobs=3, stop_token_ids=[3]) is None


def test_repetition_is_as_in_transformers():
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    logits, tokens = torch.randn(50), [3, 7, 7, 40]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits[None].clone())
    mine = rules(num_prompt=2, repetition_penalty=1.3).apply(logits, tokens)
    torch.testing.assert_close(mine, expected[0], rtol=0, atol=0)


def test_presence_and_frequency_count_the_output_alone():
    """Token by token, as an engine calls it."""
    logits = torch.randn(20)
    mine = rules(num_prompt=3, presence_penalty=0.5, frequency_penalty=0.25)
    prompt, output = [1, 1, 2], [4, 4, 9, 4, 1]
    for end in range(len(output) + 1):
        got = mine.apply(logits, prompt + output[:end])
        expected = logits.clone()
        for token in set(output[:end]):
            expected[token] -= 0.5 + 0.25 * output[:end].count(token)
        torch.testing.assert_close(got, expected)


def test_bias_is_added_and_bars():
    logits = torch.zeros(6)
    got = rules(logit_bias={2: 1.5, 4: -math.inf}).apply(logits, [])
    assert got.tolist() == [0, 0, 1.5, 0, -math.inf, 0]
    assert logits.tolist() == [0] * 6


def test_ends_are_barred_until_there_are_enough():
    mine = rules(num_prompt=2, end_token_ids=[1, 3], min_new_tokens=2)
    for num_tokens, barred in ((2, True), (3, True), (4, False)):
        got = mine.apply(torch.zeros(5), [0] * num_tokens)
        assert [bool(value) for value in got.isinf()] == [False, barred, False, barred, False]


def test_a_processor_sees_the_rules_before_it_and_its_own_copy_of_the_tokens():
    seen = []

    def processor(tokens, logits):
        seen.append((list(tokens), logits.tolist()))
        tokens.clear()
        return logits + 1

    history = [5, 6]
    got = rules(logit_bias={0: 2.0}, logits_processor=processor).apply(torch.zeros(3), history)
    assert got.tolist() == [3, 1, 1]
    assert seen == [([5, 6], [2, 0, 0])]
    assert history == [5, 6]


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, r"must return a float tensor of shape \[4\], got <class 'NoneType'>"),
        (torch.zeros(4, dtype=torch.int64), TypeError, "got torch.int64"),
        (torch.zeros(1, 4), ValueError, r"must return a float tensor of shape \[4\], got \[1, 4\]"),
    ],
)
def test_a_processor_that_returns_something_else_is_named(returned, error, message):
    with pytest.raises(error, match=message):
        rules(logits_processor=lambda tokens, logits: returned).apply(torch.zeros(4), [])


def test_logprobs_are_those_of_a_softmax():
    logits = torch.randn(2, 30).bfloat16()
    first, second = logprobs_of(logits, [4, 9], 3)
    expected = torch.log_softmax(logits.float(), -1)
    assert first.logprob == pytest.approx(float(expected[0, 4]))
    assert second.logprob == pytest.approx(float(expected[1, 9]))
    best = expected[1].topk(3)
    assert [token for token, _ in second.top] == best.indices.tolist()
    assert [logprob for _, logprob in second.top] == pytest.approx(best.values.tolist())
    assert logprobs_of(logits[:1], [2], 0)[0].top == ()
    assert logprobs_of(logits[:0], [], 5) == []
