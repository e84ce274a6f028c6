"""The runner under a scheduler of your own.

A prompt is prefilled in chunks while another sequence decodes in the same steps. The logits are
those of the whole prompt in one step.
"""

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import torch_hybrid as th


def tiny_model() -> th.HybridModel:
    """Make a random Qwen3-Next of four layers: three linear, one full."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=0,
    )
    return th.adapt(Qwen3NextForCausalLM(config))


def main() -> None:
    """Compare chunked prefill beside a decoding sequence with prefill in one step."""
    # compile=True is the default; an eager runner takes the same path and starts at once.
    runner = th.Runner(tiny_model(), max_seqs=4, max_tokens=128, kv_tokens=512, compile=False)
    prompt = torch.randint(0, 256, (100,)).tolist()

    (whole,) = runner.new_sequences(1)
    expected = runner.extend([whole], [prompt])
    runner.free([whole])

    chunked, decoding = runner.new_sequences(2)
    logits = runner.extend([decoding], [[1, 2, 3]])
    for start in range(0, len(prompt), 32):
        token = int(logits[-1].argmax())
        logits = runner.extend([chunked, decoding], [prompt[start : start + 32], [token]])
        held, free = runner.length(chunked), runner.free_pages
        print(f"chunk at {start:2}: {held} tokens held, {free} pages free")
    error = (logits[0] - expected[0]).abs().max().item()
    print(f"chunks against one piece: largest difference of logits {error:.1e}")
    runner.free([chunked, decoding])
    assert error < 1e-4


if __name__ == "__main__":
    main()
