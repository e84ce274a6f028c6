"""The model in 8 bits that GPU benchmarks make, at sizes for a CPU."""

from __future__ import annotations

import torch
from transformers import Qwen3NextConfig

import torch_hybrid as th
from benchmarks.fp8_models import make_fp8_model
from benchmarks.gpu.steps import CONFIG
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.scaled_linear import ScaledLinear

SMALL = {
    "vocab_size": 99,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}


def test_activations_keep_their_scale_and_weights_are_in_8_bits() -> None:
    model = make_fp8_model(Qwen3NextConfig(**CONFIG | SMALL), torch.device("cpu"))
    held = [module for module in model.modules() if isinstance(module, ScaledLinear)]
    # Of each mixer its input and output, or q, k, v and o; and three of each shared expert.
    assert len(held) == 3 * 2 + 4 + 4 * 3
    experts = [module for module in model.modules() if isinstance(module, FusedExperts)]
    assert all(module.down_proj.dtype == torch.float8_e4m3fn for module in experts)
    assert all(weight.isfinite().all() for weight in model.parameters() if weight.itemsize > 1)
    runner = th.Runner(model, max_seqs=2, max_tokens=64, kv_tokens=128, compile=False)
    logits = runner.extend(runner.new_sequences(2), [[1, 2, 3], [4]])
    assert 0.1 < logits.float().std() < 10
