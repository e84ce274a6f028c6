"""A training step of Qwen3.5-9B's or Nemotron-3-Nano-4B's widths on one GPU: full tuning and LoRA.

    python -m benchmarks.training_gpu [--model nemotron] [--layers 8] [--rows 8] [--length 2048]

Rows are packed. Random weights in bfloat16, a vocabulary of 32k. A step is forward, loss, backward
and AdamW; FLOPs are those of products with weights, without attention, recurrences and what is
computed again. Busy is the sum of all kernels' times over the clock's, from a profile of three
steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

import torch_hybrid as th

VOCAB = 32768
Step = Callable[[], Tensor]


def qwen(num_layers: int) -> PreTrainedConfig:
    return Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )


def nemotron(num_layers: int) -> PreTrainedConfig:
    """Mamba2, attention and MLPs are layers of their own; the first 14 are a third of all."""
    pattern = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    return NemotronHConfig(
        vocab_size=VOCAB,
        hidden_size=3136,
        intermediate_size=12544,
        layer_types=[kinds[letter] for letter in pattern[:num_layers]],
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        mamba_num_heads=96,
        mamba_head_dim=80,
        n_groups=8,
        ssm_state_size=128,
    )


MODELS = {"qwen": (qwen, 8), "nemotron": (nemotron, 14)}  # configs, and layers by default


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Make the model with random weights on the GPU."""
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def adapted(model: nn.Module) -> nn.Module:
    """Put adapters of rank 16 on all projections but the head."""
    from peft import LoraConfig, get_peft_model

    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules=sorted(names - {"lm_head"}))
    )


def batches(rows: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield packed rows of random tokens, as a flattening collator sends them."""
    while True:
        tokens = torch.randint(VOCAB, (1, rows * length), device="cuda")
        position_ids = torch.arange(length, device="cuda").repeat(rows)[None]
        yield {"input_ids": tokens, "labels": tokens, "position_ids": position_ids}


def flops_of(model: nn.Module, num_tokens: int) -> int:
    """Count a step's FLOPs of products with weights: frozen ones have no gradient of their own."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return num_tokens * sum((6 if w.requires_grad else 4) * w.numel() for w in weights)


def step_of(model: nn.Module, rows: int, length: int) -> Step:
    """Make one step of an optimizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    kept = list(islice(batches(rows, length), 4))

    def step() -> Tensor:
        kept.append(kept.pop(0))
        loss: Tensor = model(**kept[0]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def seconds(step: Step, repeats: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def measure(name: str, step: Step, flops: int, top: int) -> None:
    """Print a line of the table, and the kernels that take the most."""
    start = time.perf_counter()
    losses = [step().item() for _ in range(3)]
    cold = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    wall = seconds(step, 5)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        during = seconds(step, 3)
    events = [e for e in traced.key_averages() if e.self_device_time_total > 0]
    busy = sum(e.self_device_time_total for e in events) / 3e6
    rate = flops / wall / 1e12
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"| {name} | {1e3 * wall:.1f} | {1e3 * busy:.1f} | {busy / during:.1%} | {rate:.0f} | "
        f"{memory:.1f} | {cold:.0f} | {losses[0]:.3f}, {losses[-1]:.3f} |",
        flush=True,
    )
    for e in sorted(events, key=lambda e: -e.self_device_time_total)[:top]:
        print(f"    {e.self_device_time_total / 3e3:8.2f} ms {e.count // 3:5d} x {e.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="qwen")
    parser.add_argument("--layers", type=int, help="8 of qwen by default, 14 of nemotron")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--compile", choices=["layers", "model", "no"], default="layers")
    parser.add_argument("--only", choices=["full", "lora"], nargs="+", default=["full", "lora"])
    parser.add_argument(
        "--batch-invariant", action="store_true", help="logits with a server's bits"
    )
    parser.add_argument("--top", type=int, default=0, help="kernels to list")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    print("| tuning | step, ms | kernels, ms | busy | TFLOP/s | GiB | 3 first, s | losses |")
    print("|---|---|---|---|---|---|---|---|")
    config_of, num_layers = MODELS[options.model]
    for name in options.only:
        torch.manual_seed(0)
        model = model_of(config_of(options.layers or num_layers)).train()
        server = {"max_tokens": 8192} if options.batch_invariant else False
        th.make_trainable(model, batch_invariant=server)
        decoder = model.model
        model = adapted(model) if name == "lora" else model
        flops = flops_of(model, options.rows * options.length)
        if options.compile == "layers":
            for layer in decoder.layers:
                layer.compile(fullgraph=True)
        elif options.compile == "model":
            model = torch.compile(model, fullgraph=True)
        measure(name, step_of(model, options.rows, options.length), flops, options.top)
        del model, decoder


if __name__ == "__main__":
    main()
