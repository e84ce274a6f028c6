"""The demo: its counts, and transformers' side of it."""

from types import SimpleNamespace

import pytest

from tests.graphs.as_traced import run_as_traced
from tests.tiny_models import FEWEST_LAYERS, qwen3_next_dense, randomize
from torch_hybrid import Runner, from_pretrained
from torch_hybrid.demo import serve
from torch_hybrid.demo.task import RecallPrompt, make_prompts

PROMPTS = make_prompts(5, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of the task's vocabulary that was not trained."""
    model = (
        qwen3_next_dense(vocab_size=128, **FEWEST_LAYERS["qwen3_next_dense"])
        .eval()
        .requires_grad_(False)
    )
    randomize(model, seed=0)
    path = tmp_path_factory.mktemp("recall")
    model.save_pretrained(path)
    return path


@pytest.fixture
def traced_transformers(monkeypatch):
    """transformers' own decode step is traced, and no further."""
    config = serve._compile_config()
    config.backend = "eager"
    monkeypatch.setattr(serve, "_compile_config", lambda: config)


@pytest.mark.usefixtures("traced_transformers")
def test_serves_what_transformers_generates(folder):
    runner = Runner(
        from_pretrained(folder), max_seqs=3, max_tokens=64, kv_tokens=999, compile=False
    )
    theirs = serve.load_transformers(folder)
    counted = []
    alone = serve.transformers_one_by_one(theirs, PROMPTS, lambda: counted.append(1))
    assert len(counted) == len(PROMPTS)
    assert serve.serve(runner, PROMPTS) == alone
    assert [len(tokens) for tokens in alone] == [len(prompt.answer) for prompt in PROMPTS]
    assert serve.transformers_batch(theirs, PROMPTS[:1]) == alone[:1]


def test_counts_right_and_equal_tokens():
    prompts = [RecallPrompt(tokens=[1], answer=[5, 6]), RecallPrompt(tokens=[1], answer=[7, 8])]
    recalled = serve.compare(prompts, served=[[5, 6], [7, 9]], expected=[[5, 4], [7, 9]])
    assert recalled == serve.Recalled(num_tokens=4, num_right=3, num_equal=3, num_whole=1)


def test_the_fastest_run_counts_and_the_first_does_not(monkeypatch):
    now = iter([0, 0, 0, 3, 3, 10, 10, 12, 12, 16])  # the warm-up reads no end
    monkeypatch.setattr(serve, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert serve.fastest({"a": list, "b": list}, rounds=2) == {"a": 2, "b": 4}


@pytest.mark.usefixtures("traced_transformers")
def test_the_command_prints_every_fact(run, folder):
    """Of steps that are traced whole; ``examples/write_a_pass.py`` compiles the demo's model."""
    with run_as_traced():
        code, out, _ = run("demo", "--model", folder, "--num-prompts", 4, "--seed", 1)
    assert code == 0
    for fact in ("32 tokens equal to its own generate", "0 breaks, 0 recompiles", "tokens/s"):
        assert fact in out
