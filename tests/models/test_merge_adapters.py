"""Adapters of peft: what it computes with them unmerged is what an adapted model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.errors import error_text
from tests.models.oracle import Oracle, ask, assert_equal_logits, make_texts
from tests.models.test_taken_weights import logits_of
from tests.tiny_models import make_model

peft = pytest.importorskip("peft", reason="peft is not installed")

TARGETS: dict[str, Any] = {
    "qwen3_next": {
        "target_modules": "all-linear",
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "qwen3_5": {"target_modules": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj", "lm_head"]},
    "kimi_linear": {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa", "f_b_proj", "o_proj"]},
    "minimax": {"target_modules": ["qkv_proj", "output_gate", "o_proj"], "use_dora": True},
    "bamba": {"target_modules": ["in_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "lfm2": {  # whose head is its embedding
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head"],
        "ensure_weight_tying": True,
    },
}
TEXTS = make_texts([20, 7])


def with_lora(family: str, **options: Any) -> Any:
    """A model of peft with adapters that are no start of a training: they change the outputs."""
    torch.manual_seed(0)
    config = peft.LoraConfig(init_lora_weights=False, r=4, lora_alpha=8, **options)
    model = peft.get_peft_model(make_model(family), config).eval()
    for name, weight in model.named_parameters():
        if "modules_to_save" in name:
            weight.data *= 1.5
    return model


def changed(oracle: Oracle, family: str) -> bool:
    plain = ask(make_model(family), TEXTS)
    return not torch.allclose(plain.logits[0], oracle.logits[0], rtol=0.1)


@pytest.mark.parametrize("family", TARGETS)
def test_logits_are_those_of_peft(family: str):
    model = with_lora(family, **TARGETS[family])
    oracle = ask(model, TEXTS)
    assert changed(oracle, family)
    adapted = th.adapt(model)
    assert_equal_logits(logits_of(adapted, TEXTS), oracle)
    assert not any("lora" in name for name, _ in adapted.named_parameters())


def test_greedy_tokens_are_those_of_generate():
    model = with_lora("qwen3_next_dense", target_modules="all-linear")
    prompt = torch.tensor([TEXTS[0]])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(input_ids=prompt, **options)[0, len(TEXTS[0]) :].tolist()
    runner = th.Runner(th.adapt(model), max_seqs=2, max_tokens=64, kv_tokens=64, compile=False)
    tokens: list[int] = []
    (seq,) = runner.new_sequences(1)
    new = TEXTS[0]
    while len(tokens) < len(expected):
        new = [int(runner.extend([seq], [new])[0].argmax())]
        tokens += new
    assert tokens == expected


def test_adapters_within_a_model_of_transformers():
    model = make_model("qwen3_next_dense")
    torch.manual_seed(0)
    config = peft.LoraConfig(init_lora_weights=False, target_modules=["in_proj_qkvz", "down_proj"])
    # As ``add_adapter`` does, for which transformers 5.24 asks for PEFT 0.22.
    peft.inject_adapter_in_model(config, model)
    oracle = ask(model.eval(), TEXTS)
    assert changed(oracle, "qwen3_next_dense")
    assert_equal_logits(logits_of(th.adapt(model), TEXTS), oracle)


def test_adapters_that_are_switched_off_are_left_out():
    model = with_lora("bamba", **TARGETS["bamba"])
    model.base_model.disable_adapter_layers()
    oracle = ask(model, TEXTS)
    assert not changed(oracle, "bamba")
    assert_equal_logits(logits_of(th.adapt(model), TEXTS), oracle)


def test_adapters_merged_before_count_once():
    model = with_lora("qwen3_next_dense", target_modules=["in_proj_qkvz", "out_proj"])
    oracle = ask(model, TEXTS)
    model.merge_adapter()
    assert_equal_logits(logits_of(th.adapt(model), TEXTS), oracle)


def test_what_has_no_weights_to_merge_is_refused():
    def refusal(config: Any, family: str = "qwen3_next_dense") -> str:
        model = peft.get_peft_model(make_model(family), config)
        return error_text(th.UnsupportedError, th.adapt, model)

    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    expected = "adapter 'default' of type PROMPT_TUNING has no weights to merge"
    assert refusal(prompt) == expected
    activated = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["in_proj_qkvz"], alora_invocation_tokens=[1]
    )
    assert refusal(activated).startswith("peft cannot merge its adapter of model.layers.0.linear")
    normed = peft.LoraConfig(target_modules=["embed_tokens"])
    assert "model.embed_tokens adds to normed rows" in refusal(normed, "inkling")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_of_two_layers_that_share_a_weight(target: str):
    torch.manual_seed(0)
    model = make_model("qwen3_next_dense", tie_word_embeddings=True)
    config = peft.LoraConfig(init_lora_weights=False, target_modules=[target])
    model = peft.get_peft_model(model, config).eval()
    oracle = ask(model, TEXTS)
    assert_equal_logits(logits_of(th.adapt(model), TEXTS), oracle)


def test_adapters_of_layers_that_share_their_weights():
    """A block of Zamba in several layers: each call of it has adapters of its own."""
    model = with_lora("zamba", target_modules=["q_proj", "down_proj"])
    oracle = ask(model, TEXTS)
    assert changed(oracle, "zamba")
    assert_equal_logits(logits_of(th.adapt(model), TEXTS), oracle)
