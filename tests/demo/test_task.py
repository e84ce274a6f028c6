"""The recall task's format, and what plain transformers makes of the shipped checkpoint."""

import copy
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_hybrid as th
from torch_hybrid.demo.task import (
    RECALL,
    Recall,
    RecallPrompt,
    checkpoint_path,
    make_bindings,
    make_prompts,
)

TRAINING_SCRIPT = Path(__file__).parents[2] / "examples" / "train_recall.py"
PROMPTS = make_prompts(200, seed=3)


def writes_of(prompt: RecallPrompt) -> list[tuple[int, int]]:
    body = prompt.tokens[1:-2]
    assert body[0::3] == [RECALL.write] * (len(body) // 3)
    return list(zip(body[1::3], body[2::3], strict=True))


def test_prompts_are_framed_and_of_mixed_length():
    for prompt in PROMPTS:
        assert prompt.tokens[0] == RECALL.bos
        assert prompt.tokens[-2] == RECALL.ask
        assert len(prompt.tokens) == RECALL.prompt_len(len(writes_of(prompt)))
        assert len(prompt.answer) == RECALL.answer_len
        symbols = [s for pair in writes_of(prompt) for s in pair] + prompt.answer
        assert all(RECALL.first_symbol <= s < RECALL.vocab_size for s in symbols)
    lengths = {len(prompt.tokens) for prompt in PROMPTS}
    assert min(lengths) < 16
    assert max(lengths) > 180
    assert len(lengths) > 40


def test_an_answer_follows_the_last_write_of_each_key():
    for prompt in PROMPTS:
        bound = dict(writes_of(prompt))
        symbol = prompt.tokens[-1]
        for answered in prompt.answer:
            symbol = bound[symbol]
            assert answered == symbol


def test_the_last_bindings_form_one_cycle_over_all_symbols():
    for prompt in PROMPTS:
        bound = dict(writes_of(prompt))
        assert set(bound.values()) == set(bound)
        symbol, visited = prompt.tokens[-1], set()
        while symbol not in visited:
            visited.add(symbol)
            symbol = bound[symbol]
        assert visited == set(bound)


def test_rewrites_come_last_and_touch_the_earlier_half():
    for prompt in PROMPTS:
        keys = [key for key, _ in writes_of(prompt)]
        once, again = keys[: len(set(keys))], keys[len(set(keys)) :]
        assert set(once) == set(keys)
        assert len(set(again)) == len(again)
        assert set(again) <= set(once[: len(once) // 2])


def test_a_good_part_of_the_answers_needs_an_overwritten_key():
    def has_stale_binding(prompt: RecallPrompt) -> bool:
        keys = [key for key, _ in writes_of(prompt)]
        asked = [prompt.tokens[-1], *prompt.answer[:-1]]
        return any(keys.count(key) > 1 for key in asked)

    assert np.mean([has_stale_binding(prompt) for prompt in PROMPTS]) > 0.6


def test_prompts_depend_on_the_seed_alone():
    assert make_prompts(5, seed=3) == PROMPTS[:5]
    assert make_prompts(5, seed=4) != PROMPTS[:5]


def test_answers_have_the_length_asked_for():
    task = Recall(answer_len=70)
    prompt = make_prompts(1, seed=0, task=task)[0]
    assert len(prompt.answer) == 70


def test_numbers_out_of_range_are_named():
    with pytest.raises(ValueError, match="num must be at least 1, got 0"):
        make_prompts(0, seed=0)
    with pytest.raises(ValueError, match=r"num_writes must be in 2\.\.64, got 65"):
        make_bindings(np.random.default_rng(0), 1, 65)


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint_path()).eval()


@torch.no_grad()
def right_answers(model, prompts: list[RecallPrompt]) -> float:
    """The part of the prompts that greedy generation answers without an error."""
    width = max(len(prompt.tokens) for prompt in prompts)
    padded = torch.full((len(prompts), width), RECALL.pad)
    for row, prompt in zip(padded, prompts, strict=True):
        row[width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
    output = model.generate(
        padded,
        attention_mask=(padded != RECALL.pad).long(),
        max_new_tokens=RECALL.answer_len,
        do_sample=False,
    )
    answers = torch.tensor([prompt.answer for prompt in prompts])
    return (output[:, width:] == answers).all(1).float().mean().item()


def test_checkpoint_is_a_small_hybrid(model):
    size = sum(file.stat().st_size for file in checkpoint_path().iterdir())
    assert size < 1_000_000
    assert set(model.config.layer_types) == {"linear_attention", "full_attention"}
    assert model.dtype == torch.float32


def test_checkpoint_recalls(model):
    assert right_answers(model, make_prompts(64, seed=11)) >= 0.99


@pytest.mark.parametrize("removed", ["recurrent state", "full attention"])
def test_checkpoint_needs_both_kinds_of_layer(model, removed):
    ablated = copy.deepcopy(model)
    for layer in ablated.model.layers:
        if removed == "full attention" and layer.block_type == "full_attention":
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        if removed == "recurrent state" and layer.block_type == "linear_attention":
            # A decay so strong that nothing outlives one token.
            torch.nn.init.constant_(layer.linear_attn.A_log, 10.0)
            torch.nn.init.constant_(layer.linear_attn.dt_bias, 10.0)
    assert right_answers(ablated, make_prompts(64, seed=11)) < 0.3


def test_training_script_writes_a_checkpoint_that_loads(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "recall"
    arguments = ["--out", str(out), "--steps", "2", "--tokens", "200", "--fresh", "1"]
    arguments += ["--head-steps", "2", "--head-tokens", "200"]
    monkeypatch.setattr("sys.argv", ["train_recall.py", *arguments])
    num_threads = torch.get_num_threads()
    try:
        runpy.run_path(str(TRAINING_SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(num_threads)
    assert "answers without an error" in capsys.readouterr().out
    trained = transformers.AutoConfig.from_pretrained(out).to_diff_dict()
    assert trained == transformers.AutoConfig.from_pretrained(checkpoint_path()).to_diff_dict()
    transformers.AutoModelForCausalLM.from_pretrained(out)
    assert th.from_pretrained(out, mtp=True).mtp is not None
    assert (out / "tokenizer.json").read_text() == (
        checkpoint_path() / "tokenizer.json"
    ).read_text()


def test_the_tokenizer_knows_every_token_and_writes_prompts():
    transformers = pytest.importorskip("transformers")
    words = transformers.AutoTokenizer.from_pretrained(checkpoint_path())
    assert sorted(words.get_vocab().values()) == [*range(RECALL.vocab_size)]
    for prompt in PROMPTS:
        text = words.decode(prompt.tokens, skip_special_tokens=True)
        message = {"role": "user", "content": text}
        assert words.encode(text) == prompt.tokens
        assert words.apply_chat_template([message], return_dict=False) == prompt.tokens


def test_a_conversation_is_answered():
    transformers = pytest.importorskip("transformers")
    words = transformers.AutoTokenizer.from_pretrained(checkpoint_path())
    runner = th.Runner(th.from_pretrained(checkpoint_path()), max_seqs=1, compile=False)
    message = {"role": "user", "content": "let a b let b c let c d let d a get b"}
    (output,) = th.Engine(runner, words).generate([message], th.Sampling(max_new_tokens=6))
    assert output.text == "c d a b c d"


def test_the_head_knows_what_comes():
    """Most of its drafts are right, and the answers those without drafts."""
    model = th.from_pretrained(checkpoint_path(), mtp=True)
    prompts = [prompt for prompt in make_prompts(12, seed=5) if len(prompt.tokens) < 120]
    sizes = {"max_seqs": len(prompts), "max_tokens": 512, "kv_tokens": 4096, "compile": False}
    speculate = th.Speculation("mtp", num_drafts=4, adapts=False)
    engine = th.Engine(th.Runner(model, **sizes, max_drafts=4), speculate=speculate)
    outputs = engine.generate([p.tokens for p in prompts], th.Sampling(max_new_tokens=8))
    tokens = {output.index: output.tokens for output in outputs}
    assert [tokens[i] for i in range(len(prompts))] == [prompt.answer for prompt in prompts]
    assert engine.stats().drafts.acceptance > 0.4
