"""Runners and engines in several threads; and made in one surrounding, used in another."""

import threading

import pytest
import torch

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.host.test_surroundings import SURROUNDINGS
from tests.tiny_models import COMPILED_SIZES, VOCAB_SIZE, make_hybrid, make_model
from torch_hybrid.caches.hybrid import HybridCache

SIZES = {"max_seqs": 6, "max_tokens": 64, "kv_tokens": 1024, "page_size": 8}
NEW = 6


@pytest.fixture(scope="module")
def model():
    kinds = ["linear_attention", "full_attention"]
    tiny = make_model("qwen3_next", num_hidden_layers=2, hidden_size=32, layer_types=kinds)
    return th.adapt(tiny)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in (3, 40, 9, 70)]


def tokens_of(model, prompts):
    engine = th.Engine(th.Runner(model, **SIZES, compile=False))
    return [next(iter(engine.generate(p, th.Sampling(max_new_tokens=NEW)))).tokens for p in prompts]


@pytest.fixture(scope="module")
def expected(model, prompts):
    return tokens_of(model, prompts)


def in_threads(functions):
    """Run all at once; raise what one of them raised."""
    barrier, raised = threading.Barrier(len(functions)), []

    def run(function):
        barrier.wait()
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def serve(engine, prompts, expected, rounds=4):
    for _ in range(rounds):
        outputs = list(engine.generate(prompts, th.Sampling(max_new_tokens=NEW)))
        assert [o.tokens for o in sorted(outputs, key=lambda o: o.index)] == expected


def assert_all_returned(runner):
    assert runner.free_slots == SIZES["max_seqs"]
    assert runner.free_pages == SIZES["kv_tokens"] // SIZES["page_size"]


def test_two_engines_of_two_threads_share_a_runner(model, prompts, expected):
    runner = th.Runner(model, **SIZES | {"max_seqs": 2 * len(prompts)}, compile=False)
    engines = [th.Engine(runner), th.Engine(runner)]
    in_threads([lambda e=engine: serve(e, prompts, expected) for engine in engines])
    assert runner.free_slots == 2 * len(prompts)


def test_two_threads_share_an_engine(model, prompts, expected):
    engine = th.Engine(th.Runner(model, **SIZES, compile=False))
    in_threads([lambda: serve(engine, prompts, expected) for _ in range(2)])
    assert_all_returned(engine.runner)


@pytest.mark.slow
def test_two_runners_of_two_threads_share_a_model(prompts):
    """Both compile the same code at the same time; one layer, which keeps a state, shows it."""
    kinds = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    model = th.adapt(make_model("qwen3_next_dense", hidden_size=32, **kinds))
    runners = [th.Runner(model, **SIZES) for _ in range(2)]
    eager = th.Runner(model, **SIZES, compile=False)
    (expected,) = eager.extend(eager.new_sequences(1), prompts[:1])

    def check(runner):
        for _ in range(5):
            seqs = runner.new_sequences(1)
            torch.testing.assert_close(runner.extend(seqs, prompts[:1])[0], expected)
            runner.free(seqs)

    in_threads([lambda r=runner: check(r) for runner in runners])
    for runner in runners:
        assert_all_returned(runner)
        assert runner.report().recompiles == 0
    assert not torch._dynamo.config.specialize_float


@pytest.mark.slow
def test_a_model_that_is_traced_is_not_run_in_part(prompts):
    """A runner traces the first layers alone; another one runs all of them meanwhile."""
    deep = th.adapt(make_model("qwen3", num_hidden_layers=6, hidden_size=32))
    eager, compiled = th.Runner(deep, **SIZES, compile=False), th.Runner(deep, **SIZES)
    expected = eager.extend(eager.new_sequences(1), prompts[:1])
    is_done = threading.Event()

    def compile_steps():
        with run_as_traced():
            compiled.warm_up()
        is_done.set()

    def run_steps():
        while not is_done.is_set():
            seqs = eager.new_sequences(1)
            assert torch.equal(eager.extend(seqs, prompts[:1]), expected)
            eager.free(seqs)

    in_threads([compile_steps, run_steps])
    assert compiled.report().graphs["decode"].layers.copied > 0


def test_by_hand_every_call_waits_for_its_turn(model, prompts):
    runner = th.Runner(model, **SIZES, compile=False)

    def alone(prompt):
        (seq,) = runner.new_sequences(1)
        logits = [runner.extend([seq], [prompt[:64]]), runner.extend([seq], [[1]])]
        runner.free([seq])
        return torch.cat(logits)

    expected = [alone(prompt) for prompt in prompts]

    def check(prompt, logits):
        for _ in range(10):
            torch.testing.assert_close(alone(prompt), logits, rtol=0, atol=0)

    in_threads([lambda pair=pair: check(*pair) for pair in zip(prompts, expected, strict=True)])
    assert_all_returned(runner)


@pytest.mark.slow
def test_no_surroundings_compile_anything_again(prompts):
    """Experts in such surroundings: ``tests/host/test_surroundings.py``."""
    model = make_hybrid()
    expected = tokens_of(model, prompts)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        runner = th.Runner(model, **COMPILED_SIZES)
        runner.warm_up()
    for name in SURROUNDINGS.keys() - {"deterministic"}:  # which asks for other kernels
        with SURROUNDINGS[name]():
            serve(th.Engine(runner), prompts, expected, rounds=1)
    assert runner.report().recompiles == 0


def test_pages_are_reserved_for_all_or_none(model, monkeypatch):
    """Whatever raises in the middle: here the second write to the page table."""
    from torch_hybrid.caches import hybrid

    cache = HybridCache(model.table, max_seqs=3, kv_tokens=64, page_size=4)
    seqs = cache.allocate(3)
    cache.reserve(seqs, [4, 4, 4])
    made = 0

    def int_tensor(values, dtype):
        nonlocal made
        made += 1
        if made == 2:
            raise KeyboardInterrupt
        return torch.tensor(list(values), dtype=dtype)

    with monkeypatch.context() as patched:
        patched.setattr(hybrid, "int_tensor", int_tensor)
        cache.commit(seqs, [4, 4, 4])
        with pytest.raises(KeyboardInterrupt):
            cache.reserve(seqs, [8, 8, 8])
    assert cache.pages.num_free == 13
    cache.reserve(seqs, [8, 8, 8])
    assert cache.pages.num_free == 7
    cache.free(seqs)
    assert cache.pages.num_free == 16
