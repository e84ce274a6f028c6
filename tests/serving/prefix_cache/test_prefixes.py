"""What an engine starts from, what it keeps, and what it gives up."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import torch_hybrid as th
from tests.errors import error_text
from tests.tiny_models import VOCAB_SIZE, make_model
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_level
from torch_hybrid.serving.prefix_cache import file
from torch_hybrid.serving.prompts import message_tokens, prompt_tokens

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SIZES = {"max_seqs": 6, "max_tokens": 128, "kv_tokens": 2048, "page_size": 8, "compile": False}
GREEDY = th.Sampling(max_new_tokens=6, temperature=0.0)
LEAST = 16
OPTIONS = th.PrefixCache(min_tokens=LEAST)


def make_runner(family: str = "qwen3_next_dense", **options: object) -> th.Runner:
    model = make_model(family, **(TWO_LAYERS if family == "qwen3_next_dense" else {}))
    return th.Runner(th.adapt(model), **{**SIZES, "max_snapshots": 12, **options})


def make_engine(runner: th.Runner | None = None, **options: object) -> th.Engine:
    return th.Engine(runner or make_runner(), prefix_cache=OPTIONS, **options)


def tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(count)]


def serve(
    engine: th.Engine, prompts: Sequence[object], sampling: th.Sampling = GREEDY
) -> list[th.Output]:
    outputs = engine.generate(prompts, sampling)
    return sorted(outputs, key=lambda output: (output.index, output.sample))


def cached(engine: th.Engine, *prompts: object) -> list[int]:
    """How many tokens of each prompt were kept; what comes out is what comes without a cache."""
    outputs = serve(engine, prompts)
    expected = serve(th.Engine(engine.runner, engine.tokenizer), prompts)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    "family", ["qwen3_next_dense", "qwen3_5", "bailing_hybrid", "jamba", "qwen3"]
)
@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_requests_that_come_together_run_what_they_share_once(family: str, run_ahead: str):
    engine = make_engine(make_runner(family), run_ahead=run_ahead)
    shared = tokens(201)
    assert cached(engine, *[shared + tokens(9, seed=n) for n in range(5)]) == [0] + [201] * 4


def test_the_second_turn_starts_where_the_first_ended():
    engine = make_engine()
    prompt = tokens(150)
    (first,) = serve(engine, [prompt], th.Sampling(max_new_tokens=30, temperature=0.0))
    turn = [*prompt, *first.tokens, *tokens(20, seed=1)]
    assert cached(engine, turn) == [179]  # the last token of an answer is never run
    assert engine.stats().prefix_cache.num_hit_tokens == 179


def test_a_shift_loses_no_more_than_to_the_snapshot_before():
    engine = make_engine()
    prompt = tokens(150)
    serve(engine, [prompt])
    changed = [*prompt[:140], (prompt[140] + 1) % VOCAB_SIZE, *prompt[141:]]
    assert cached(engine, changed) == [0]  # they part where nothing was kept: now something is
    assert cached(engine, [*prompt[:140], *tokens(9, seed=3)]) == [140]
    often = th.Engine(make_runner(), prefix_cache=th.PrefixCache(min_tokens=16, every=32))
    serve(often, [prompt])
    assert cached(often, changed) == [128]


def test_models_without_states_start_wherever_prompts_part():
    engine = make_engine(make_runner("qwen3", max_snapshots=0))
    prompt = tokens(150)
    serve(engine, [prompt])
    assert cached(engine, [*prompt[:77], *tokens(5, seed=2)], prompt) == [77, 149]


def test_a_prompt_that_was_seen_runs_its_last_token_alone():
    engine = make_engine()
    prompt = tokens(100)
    sampling = th.Sampling(n=4, max_new_tokens=5, temperature=0.9, seed=3)
    outputs = serve(engine, [prompt], sampling)
    assert [output.num_cached_tokens for output in outputs] == [0, 99, 99, 99]
    plain = serve(th.Engine(engine.runner), [prompt], sampling)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]


def test_short_prompts_are_not_kept():
    engine = make_engine()
    assert cached(engine, *[tokens(LEAST - 8)] * 3) == [0, 0, 0]
    assert engine.stats().prefix_cache.num_snapshots == 0


def test_log_probabilities_of_a_prompt_are_of_all_its_tokens():
    engine = make_engine()
    prompt = tokens(60)
    serve(engine, [prompt])
    sampling = th.Sampling(max_new_tokens=2, temperature=0.0, prompt_logprobs=1)
    (output,) = serve(engine, [prompt], sampling)
    assert (output.num_cached_tokens, len(output.prompt_logprobs)) == (0, 59)


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_what_had_nan_is_never_kept(run_ahead: str):
    runner = make_runner()
    bad = 5
    with torch.no_grad():
        embedding = runner.model.hf_model.get_input_embeddings()
        embedding.weight[bad] = float("nan")
    engine = make_engine(runner, run_ahead=run_ahead)
    clean = [token for token in tokens(90) if token != bad]
    outputs = serve(engine, [[*clean[:60], bad, *clean[60:]], [*clean[:60], bad, 7, 8, 9]])
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert engine.stats().prefix_cache.num_snapshots == 0
    assert not runner.cache.snapshots._kept


def test_a_preempted_request_goes_on_from_what_it_held():
    """Pages for less than two answers: one request is preempted, and its prompt can be kept."""
    runner = make_runner(kv_tokens=272)
    engine = make_engine(runner)
    prompts = [tokens(100), tokens(100, seed=1)]
    sampling = th.Sampling(max_new_tokens=40, temperature=0.0)
    outputs = serve(engine, prompts, sampling)
    expected = serve(th.Engine(make_runner()), prompts, sampling)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    stats = engine.stats().prefix_cache
    assert stats.num_starts > 2
    assert stats.num_hits > 0
    assert [output.num_cached_tokens for output in outputs] == [0, 0]  # of what others ran


def test_pages_are_given_back_when_sequences_need_them():
    runner = make_runner(kv_tokens=240)
    engine = make_engine(runner)
    for seed in range(4):
        assert cached(engine, tokens(100, seed=seed)) == [0]
    assert runner.free_pages == 30
    assert runner.cache.pages.num_free < 30
    (seq,) = runner.new_sequences(1)  # by hand, all of them
    for _ in range(2):
        runner.extend([seq], [tokens(120)])
    assert engine.stats().prefix_cache.num_snapshots == 0
    runner.free([seq])


def test_the_snapshot_that_saves_least_goes_first():
    engine = make_engine(make_runner(max_snapshots=2))
    long, short = tokens(180), tokens(30, seed=1)
    once = th.Sampling(max_new_tokens=1, temperature=0.0)
    serve(engine, [long], once)
    serve(engine, [short], once)
    serve(engine, [tokens(40, seed=2)], once)
    assert engine.stats().prefix_cache.num_evictions == 1
    assert cached(engine, [*short, 1]) == [0]
    assert cached(engine, [*long, 1]) == [180]


def test_snapshots_made_by_hand_are_not_given_up():
    runner = make_runner(max_snapshots=1)
    (seq,) = runner.new_sequences(1)
    runner.extend([seq], [tokens(5)])
    handle = runner.snapshot(seq)
    runner.free([seq])
    engine = make_engine(runner)
    prompt = tokens(100)
    assert cached(engine, prompt, prompt) == [0, 0]  # there is no room to keep anything
    runner.release(handle)
    assert cached(engine, prompt, prompt) == [0, 99]


def test_two_engines_on_one_runner_keep_their_own():
    runner = make_runner(max_snapshots=1, kv_tokens=240)
    first, second = make_engine(runner), make_engine(runner)
    prompt = tokens(100)
    assert cached(first, prompt, prompt) == [0, 99]
    assert cached(second, prompt, prompt) == [0, 99]  # the slot was the first's
    assert first.stats().prefix_cache.num_snapshots == 0
    first.close()
    second.close()
    assert runner.cache.pages.num_free == 30
    assert runner.cache.snapshots.reclaimers == []


def test_a_conversation_is_kept_where_its_last_message_ends():
    """What asks for an answer is not what stands before one in the next turn."""
    tokenizer = byte_level(CHAT_TEMPLATE.replace("<|assistant|>{%", "<|assistant|><end>{%"))
    messages = [{"role": "user", "content": "the quick brown fox " * 8}]
    asked = prompt_tokens(messages, tokenizer)
    end = message_tokens(messages, asked, tokenizer)
    assert len(asked) - end == 2
    assert (
        message_tokens([*messages, {"role": "assistant", "content": "a"}], asked, tokenizer) is None
    )
    assert message_tokens("the fox", asked, tokenizer) is None
    model = make_model("qwen3_next_dense", **TWO_LAYERS, vocab_size=300)
    runner = th.Runner(th.adapt(model), **SIZES, max_snapshots=4)
    engine = th.Engine(runner, tokenizer, prefix_cache=OPTIONS)
    assert cached(engine, messages) == [0]
    turn = [*messages, {"role": "assistant", "content": "fox"}, {"role": "user", "content": "the"}]
    assert cached(engine, turn) == [end]


@pytest.mark.parametrize("family", ["qwen3_next_dense", "kimi_linear", "qwen3"])
def test_what_made_room_comes_back_from_the_host(family: str):
    runner = make_runner(family, max_snapshots=1, kv_tokens=160)
    options = th.PrefixCache(min_tokens=LEAST, host_bytes=1 << 20)
    engine = th.Engine(runner, prefix_cache=options)
    once = th.Sampling(max_new_tokens=1, temperature=0.0)
    prompts = [tokens(101), tokens(103, seed=1)]
    for prompt in prompts:
        serve(engine, [prompt], once)
    pair = [[*prompt, 1] for prompt in prompts]
    plain = serve(th.Engine(make_runner(family)), pair)
    for turn, right, kept in zip(pair, plain, (101, 103), strict=True):
        (output,) = serve(engine, [turn])
        assert (output.tokens, output.num_cached_tokens) == (right.tokens, kept)
    stats = engine.stats().prefix_cache
    assert stats.num_returned >= 1
    assert 0 < stats.num_host_bytes <= options.host_bytes
    engine.close()
    assert engine.stats().prefix_cache.num_host_bytes == 0


def test_the_host_keeps_within_its_bytes_what_saves_most():
    engine = th.Engine(
        make_runner(max_snapshots=1),
        prefix_cache=th.PrefixCache(min_tokens=LEAST, host_bytes=150_000),
    )
    once = th.Sampling(max_new_tokens=1, temperature=0.0)
    long = tokens(180)
    serve(engine, [long], once)
    for seed in range(1, 6):
        serve(engine, [tokens(40, seed=seed)], once)
        assert engine.stats().prefix_cache.num_host_bytes <= 150_000
    assert cached(engine, [*long, 1]) == [180]


@pytest.mark.parametrize("family", ["qwen3_next_dense", "qwen3"])
def test_prefixes_outlive_their_process(family: str, tmp_path: Path):
    path, options = tmp_path / "prefixes", th.PrefixCache(min_tokens=LEAST, host_bytes=1 << 20)
    prompt = tokens(101)
    with th.Engine(make_runner(family), prefix_cache=options) as engine:
        serve(engine, [prompt])
        assert engine.save_prefixes(path) == 1
    with th.Engine(make_runner(family), prefix_cache=options) as engine:
        assert engine.load_prefixes(path) == 1
        turn = [*prompt, 1] if family == "qwen3_next_dense" else [*prompt[:60], 1, 2]
        assert cached(engine, turn) == [101 if family == "qwen3_next_dense" else 60]
        assert engine.load_prefixes(path) == 0  # it is there
    with th.Engine(make_runner(family), prefix_cache=OPTIONS) as engine:
        assert engine.load_prefixes(path) == 0  # there is no room on the host


def test_files_that_are_foreign_or_damaged_are_refused(tmp_path: Path):
    path = tmp_path / "prefixes"
    engine = make_engine()
    serve(engine, [tokens(101)])
    engine.save_prefixes(path)
    assert [file.name for file in tmp_path.iterdir()] == ["prefixes"]
    whole = path.read_bytes()

    def refused(runner: th.Runner, content: bytes = whole) -> str:
        path.write_bytes(content)
        other = make_engine(runner)
        text = message(other.load_prefixes, path)
        assert other.stats().prefix_cache.num_host_bytes == 0
        return text.replace(str(path), "FILE")

    assert refused(make_runner(page_size=16)) == "FILE has prefixes of another page_size"
    stranger = make_runner()
    with torch.no_grad():
        stranger.model.hf_model.get_input_embeddings().weight += 1
    assert refused(stranger) == "FILE has prefixes of another model"
    assert refused(make_runner("qwen3")) == "FILE has prefixes of another model"
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    damaged = "FILE is damaged: its contents are not those that were written"
    assert refused(make_runner(), bytes(flipped)) == damaged
    for content in (whole[: len(whole) // 2], b"", b"no file of safetensors"):
        assert refused(make_runner(), content).startswith("FILE is damaged, or has no prefixes: ")
    with pytest.raises(OSError, match="absent"):
        engine.load_prefixes(tmp_path / "absent")
    with pytest.raises(ValueError, match="save_prefixes needs an engine with a prefix_cache"):
        th.Engine(engine.runner).save_prefixes(path)


class Always:
    """A drafter that has as many drafts as are asked for, most of them wrong."""

    def propose(self, requests: Sequence[th.Request], counts: Sequence[int]) -> list[list[int]]:
        return [[1] * count for count in counts]

    def forget(self, request: th.Request) -> None:
        pass


def test_what_is_kept_at_a_step_with_drafts_is_of_its_certain_tokens(tmp_path: Path):
    """The last token of a known prompt runs with drafts, and the only slot is somebody else's."""
    runner = make_runner(max_snapshots=1, max_drafts=3, max_seqs=4)
    plain, path = th.Engine(make_runner()), tmp_path / "prefixes"
    options = th.PrefixCache(min_tokens=8, host_bytes=1 << 20)
    speculate = th.Speculation(Always(), num_drafts=3, adapts=False)
    engine = th.Engine(runner, prefix_cache=options, speculate=speculate)
    known = [tokens(30), tokens(40, seed=1)]
    for seed in range(8):
        prompts = [known[0], tokens(9 + seed, seed=2 + seed), known[1]][: 2 + seed % 2]
        sampling = th.Sampling(max_new_tokens=1 + seed % 4, temperature=0.0)
        expected = [output.tokens for output in serve(plain, prompts, sampling)]
        assert [output.tokens for output in serve(engine, prompts, sampling)] == expected
        engine.save_prefixes(path)
        with th.Engine(make_runner(), prefix_cache=options) as other:
            assert other.load_prefixes(path) > 0
            turns = [[*prompt, 1] for prompt in known]
            assert [o.tokens for o in serve(other, turns)] == [
                o.tokens for o in serve(plain, turns)
            ]
    assert engine.stats().drafts.drafted > 10


def test_what_is_kept_says_how_many_tokens_it_is_of(tmp_path: Path):
    engine, path = make_engine(), tmp_path / "prefixes"
    serve(engine, [tokens(101)])
    [node] = [node for node in engine._prefixes._kept._nodes if node.depth == 101]
    snapshot, other = node.snapshot, engine._prefixes._tree.insert(array("q", [1, 2]))[0]
    assert message(other.keep, snapshot) == "a place of 2 tokens cannot keep 101"
    copy, facts = engine.runner.cache.snapshots.to_host(snapshot), engine._prefixes._facts()
    assert message(other.keep_on_host, copy) == "a place of 2 tokens cannot keep 101"
    file.save(path, [(tokens(100), copy)], facts)
    text = message(engine.load_prefixes, path).replace(str(path), "FILE")
    assert text == "FILE is damaged: prefix 0 has 100 tokens, and keeps 101"


def test_stats():
    engine = make_engine()
    serve(engine, [tokens(100)] * 2)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_tokens) == (0, 0, 12)
    assert stats.num_tokens / stats.seconds == stats.tokens_per_s
    assert stats.free_pages == engine.runner.free_pages == 256
    kept = stats.prefix_cache
    assert (kept.num_starts, kept.num_hits, kept.num_hit_tokens) == (2, 1, 99)
    assert kept.num_start_tokens == 200
    assert kept.num_bytes > 0
    assert th.Engine(engine.runner).stats().prefix_cache is None


def message(call: object, *args: object, **options: object) -> str:
    return error_text(ValueError, call, *args, **options)


def test_errors():
    assert_expected_inline(
        message(make_engine, make_runner(max_snapshots=0)),
        """\
a prefix cache of states needs room: the runner's max_snapshots must be at least 1, got 0""",
    )
    with pytest.raises(TypeError, match="prefix_cache must be True, False or a"):
        th.Engine(make_runner(), prefix_cache="yes")
    assert_expected_inline(
        message(th.PrefixCache, min_tokens=0), """min_tokens must be at least 1, got 0"""
    )
    assert_expected_inline(
        message(th.PrefixCache, every=32), """every must be at least min_tokens, now 64, got 32"""
    )
    assert_expected_inline(
        message(th.PrefixCache, host_bytes=-1), """host_bytes must not be negative, got -1"""
    )
