"""What a batch-invariant runner's engine serves has the same bits however it is served."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.serving.speculation.drafters import Knowing
from tests.tiny_models import FEWEST_LAYERS, VOCAB_SIZE, make_model
from torch_hybrid.graphs.options import assembly

SIZES = {"max_seqs": 4, "max_tokens": 96, "kv_tokens": 640, "page_size": 8, "compile": False}
GREEDY = th.Sampling(max_new_tokens=12, ignore_eos=True, logprobs=0)
# Prompts that begin alike, and one that does not.
PROMPTS = [
    *([(7 * i) % VOCAB_SIZE for i in range(70)] + [own] * (5 + own) for own in range(3)),
    [(5 * i) % VOCAB_SIZE for i in range(83)],
]
Served = list[tuple[list[int], list[float]]]


def make_runner(model: th.HybridModel, **options: object) -> th.Runner:
    return th.Runner(model, **{**SIZES, "batch_invariant": True, **options})


def serve(engine: th.Engine, prompts: Sequence[list[int]], sampling: th.Sampling) -> Served:
    outputs = sorted(engine.generate(prompts, sampling), key=lambda output: output.index)
    return [(x.tokens, [each.logprob for each in x.logprobs or ()]) for x in outputs]


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "bailing_hybrid"])
def test_any_way_of_serving_gives_the_same_bits(family: str):
    model = th.adapt(make_model(family, **FEWEST_LAYERS[family]))
    runner = make_runner(model, max_snapshots=4, max_drafts=3)
    plain = th.Engine(runner)
    alone = [each for prompt in PROMPTS for each in serve(plain, [prompt], GREEDY)]
    assert len({tuple(tokens) for tokens, _ in alone}) > 1

    assert serve(plain, PROMPTS, GREEDY) == alone
    with th.Engine(runner, prefix_cache=th.PrefixCache(min_tokens=8)) as keeping:
        assert serve(keeping, PROMPTS, GREEDY) == alone
        assert serve(keeping, PROMPTS, GREEDY) == alone
        assert keeping.stats().prefix_cache.num_hits > 3

    drafter = Knowing(lambda request: alone[request.index][0], vocab_size=VOCAB_SIZE)
    speculation = th.Speculation(drafter, num_drafts=3, adapts=False)
    drafting = th.Engine(runner, speculate=speculation)
    assert serve(drafting, PROMPTS, GREEDY) == alone
    assert drafting.stats().drafts.accepted > 3

    short_of_pages = th.Engine(make_runner(model, kv_tokens=208))
    assert serve(short_of_pages, PROMPTS, GREEDY) == alone
    in_halves = th.Engine(make_runner(model, two_batch_overlap="on"))
    assert serve(in_halves, PROMPTS, GREEDY) == alone
    padded = th.Engine(make_runner(model, cuda_graphs="on", max_tokens=64))
    assert serve(padded, PROMPTS, GREEDY) == alone

    tokens = [each for each, _ in alone]
    ahead = serve(
        th.Engine(runner, run_ahead="on"), PROMPTS, th.Sampling(max_new_tokens=12, ignore_eos=True)
    )
    assert [each for each, _ in ahead] == tokens


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "minimax", "jamba"])
def test_drafts_in_steps_of_one_graph(family: str, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, where a prompt, a decode step and one that verifies drafts are of one."""
    monkeypatch.setattr(assembly, "runs_one_mode", lambda device: True)
    runner = make_runner(th.adapt(make_model(family, **FEWEST_LAYERS[family])), max_drafts=3)
    check_drafts(runner)


@needs_cuda
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2"])
def test_drafts_on_a_gpu(family: str):
    model = th.adapt(make_model(family, **FEWEST_LAYERS[family]).to("cuda", torch.bfloat16))
    check_drafts(make_runner(model, max_drafts=3, compile=True))


@needs_cuda
def test_steps_in_halves_on_a_gpu():
    model = th.adapt(make_model("qwen3_next", **FEWEST_LAYERS["qwen3_next"]).to("cuda").bfloat16())
    plain = th.Engine(make_runner(model, compile=True))
    alone = [each for prompt in PROMPTS for each in serve(plain, [prompt], GREEDY)]
    in_halves = make_runner(model, compile=True, two_batch_overlap="on", max_snapshots=4)
    assert serve(th.Engine(in_halves), PROMPTS, GREEDY) == alone
    with th.Engine(in_halves, prefix_cache=th.PrefixCache(min_tokens=8)) as keeping:
        assert serve(keeping, PROMPTS, GREEDY) == alone
        assert serve(keeping, PROMPTS, GREEDY) == alone


def check_drafts(runner: th.Runner) -> None:
    """Drafts, some of them right, give the tokens and logprobs of plain decoding, by one graph."""
    plain = th.Engine(runner)
    alone = [each for prompt in PROMPTS for each in serve(plain, [prompt], GREEDY)]
    drafter = Knowing(lambda request: alone[request.index][0], vocab_size=VOCAB_SIZE)
    speculation = th.Speculation(drafter, num_drafts=3, adapts=False)
    drafting = th.Engine(runner, speculate=speculation)
    assert serve(drafting, PROMPTS, GREEDY) == alone
    assert drafting.stats().drafts.accepted > 3
    names: list[str] = []
    runner.warm_up(names.append)
    assert names == ["extend"]


def test_logprobs_of_what_was_sampled_are_those_of_a_prefill_of_it():
    """As a trainer asks for them: of the whole text, in one prompt."""
    runner = make_runner(th.adapt(make_model("qwen3_next", **FEWEST_LAYERS["qwen3_next"])))
    engine = th.Engine(runner)
    drawn = th.Sampling(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=3, logprobs=0)
    sampled = serve(engine, PROMPTS, drawn)
    texts = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, sampled, strict=True)]
    outputs = engine.generate(texts, th.Sampling(max_new_tokens=1, prompt_logprobs=0))
    for output in outputs:
        scored = [each.logprob for each in output.prompt_logprobs or ()]
        assert scored[-12:] == sampled[output.index][1]
