"""The draw: what each filter keeps, what each row draws, and what bad logits do."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid.sampling import (
    NOT_FINITE,
    Draw,
    DrawKind,
    RandomNumbers,
    Sampling,
    candidates,
    draw_tokens,
    sample,
    settings_of,
)


def draws_of(samplings, place=0):
    numbers = [RandomNumbers.of(sampling) for sampling in samplings]
    return [
        Draw(sampling) if own is None else Draw(sampling, own[place])
        for sampling, own in zip(samplings, numbers, strict=True)
    ]


def draw(logits, sampling, *, times=1):
    numbers = RandomNumbers.of(sampling)
    return [sample(logits, [Draw(sampling, numbers[place])])[0] for place in range(times)]


def kept_tokens(logits, sampling):
    weights, ids = candidates(logits, [sampling])
    return set(ids[weights > 0].tolist())


def test_greedy_takes_the_likeliest_token_of_each_row():
    logits = torch.randn(7, 50)
    assert sample(logits, draws_of([Sampling()] * 7)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_is_reported_and_leaves_the_others_alone(bad, temperature):
    logits = torch.randn(3, 50)
    samplings = [Sampling(temperature=temperature, seed=row) for row in range(3)]
    expected = sample(logits, draws_of(samplings))
    logits[1, 20] = bad
    got = sample(logits, draws_of(samplings))
    assert got == [expected[0], NOT_FINITE, expected[2]]


def test_a_step_that_draws_for_no_row_draws_nothing_on_any_device():
    assert sample(torch.empty(0, 7, device="cpu"), []) == []
    assert sample(torch.empty(0, 7, device="meta"), []) == []


def test_a_row_barred_as_a_whole_is_not_finite():
    assert sample(torch.full((1, 9), -math.inf), draws_of([Sampling()])) == [NOT_FINITE]


def test_barred_tokens_are_never_drawn():
    logits = torch.zeros(1, 8)
    logits[0, ::2] = -math.inf
    assert set(draw(logits, Sampling(temperature=3.0, seed=0), times=200)) == {1, 3, 5, 7}


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.7, 1.0, 4.0]),
        "top_k": st.sampled_from([0, 1, 5, 40, 10_000]),
        "top_p": st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    }
)


def warped_by_transformers(logits, sampling):
    from transformers.generation import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores


@settings(deadline=None, max_examples=150)
@given(options=filters, vocab=st.sampled_from([10, 300, 3000]), seed=st.integers(0, 99))
def test_draws_from_what_transformers_draws_from(options, vocab, seed):
    pytest.importorskip("transformers")
    sampling = Sampling(**options)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    expected = warped_by_transformers(logits.double(), sampling).softmax(-1)
    weights, ids = candidates(logits, [sampling])
    got = torch.zeros_like(expected).scatter(-1, ids, weights.double() / weights.double().sum())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(got > 1e-30, expected > 1e-30)  # single precision has nothing below


def test_tokens_that_tie_with_the_last_kept_are_kept():
    logits = torch.zeros(1, 1000)
    logits[0, 7] = 1.0
    assert len(kept_tokens(logits, Sampling(temperature=1.0, top_k=2))) == 1000
    logits[0, 500:] = -1.0
    assert len(kept_tokens(logits, Sampling(temperature=1.0, top_k=300))) == 500


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens = draw(probs.log().unsqueeze(0), Sampling(temperature=1.0, seed=3), times=4000)
    counts = torch.bincount(torch.tensor(tokens), minlength=4) / 4000
    assert (counts - probs).abs().max() < 0.03  # about four standard deviations


def test_a_seed_repeats_and_no_seed_follows_the_global_generator():
    logits = torch.zeros(1, 100)
    seeded = Sampling(temperature=1.0, seed=5)
    assert draw(logits, seeded, times=9) == draw(logits, seeded, times=9)
    free = Sampling(temperature=1.0)
    assert draw(logits, free, times=9) != draw(logits, free, times=9)
    torch.manual_seed(1)
    first = draw(logits, free, times=9)
    torch.manual_seed(1)
    assert draw(logits, free, times=9) == first


@settings(deadline=None, max_examples=40)
@given(options=st.lists(filters, min_size=1, max_size=9), seed=st.integers(0, 99))
def test_a_row_draws_the_same_in_any_company(options, seed):
    samplings = [Sampling(seed=row, **chosen) for row, chosen in enumerate(options)]
    logits = torch.randn(len(options), 700, generator=torch.Generator().manual_seed(seed))
    logits = (logits * 4).round() / 4  # many ties
    together = sample(logits, draws_of(samplings))
    alone = [draw(logits[row : row + 1], s)[0] for row, s in enumerate(samplings)]
    assert together == alone


@settings(deadline=None, max_examples=80)
@given(
    options=st.lists(filters | st.just({}), min_size=1, max_size=6),
    vocab=st.sampled_from([10, 300, 3000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_device_draws_what_the_host_draws(options, vocab, dtype, seed):
    """However many tokens tie, and beside rows that are not finite or barred."""
    samplings = [Sampling(seed=row + seed, **chosen) for row, chosen in enumerate(options)]
    logits = torch.randn(len(options), vocab, generator=torch.Generator().manual_seed(seed)) * 3
    logits = (logits.round() if seed % 4 == 0 else logits).to(dtype)
    logits[seed % len(options), seed % vocab] = (math.nan, math.inf, -math.inf)[seed % 3]
    if seed % 5 == 0:
        logits[-1] = -math.inf
    draws = draws_of(samplings)
    num_rows = len(draws) + seed % 3  # padding
    padded = torch.cat([logits, logits.new_zeros(seed % 3, vocab)])
    drawn = draw_tokens(padded, settings_of(draws, num_rows), DrawKind.of(draws))
    assert drawn[: len(draws)].tolist() == sample(logits, draws)


def test_sums_that_no_double_holds():
    """A fraction of such a sum is rounded, and must not come out above it."""
    logits = torch.zeros(3, 40_001)
    logits[:, 7] = -25.0  # counts 15, beside 40,000 * 2**40: doubles there are 8 apart
    samplings = [Sampling(temperature=1.0, seed=row) for row in range(2)]
    samplings.append(Sampling(temperature=1.0, top_p=1 - 1e-16 * 2))
    draws = [Draw(sampling, 1 - 2**-53) for sampling in samplings]
    drawn = draw_tokens(logits, settings_of(draws, 3), DrawKind.of(draws))
    assert drawn.tolist() == sample(logits, draws) == [40_000] * 3


def test_numbers_are_those_of_single_draws():
    sampling = Sampling(temperature=1.0, seed=3)
    numbers, generator = RandomNumbers.of(sampling), sampling.make_generator()
    singly = [float(torch.rand((), dtype=torch.float64, generator=generator)) for _ in range(70)]
    assert [numbers[place] for place in (69, *range(70))] == [singly[69], *singly]
    assert RandomNumbers.of(Sampling()) is None


def test_low_precision_logits_are_drawn_in_single_precision():
    logits = torch.randn(1, 50).bfloat16()
    for options in ({}, {"top_p": 0.9}, {"top_k": 20}):
        sampling = Sampling(temperature=0.8, **options)
        weights, _ = candidates(logits, [sampling])
        assert torch.equal(weights, candidates(logits.float(), [sampling])[0])
        assert weights.dtype == torch.float32
