"""How was the demo's checkpoint made? Train the recall model from scratch on one CPU thread.

    python examples/train_recall.py --out build/recall

The defaults are those of the checkpoint that ships with the package, which took 16 minutes of a
shared core. Fixed seeds and a single thread make a second run on the same kind of processor print
the same losses. The task is described in ``torch_hybrid/demo/task.py``.

The number of writes grows with what the model can do: over short prompts it finds the circuit that
matches a query with a key, over long ones it only has to make the match sharper. Trained on long
prompts from the start, it stays at guessing one of the values it has seen.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from torch_hybrid.demo.task import RECALL, make_bindings, make_prompts

LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention"]
IGNORED = -100  # the label that cross_entropy leaves out
CHAINS = 8  # queries with their answers after the writes of a training row
CHAIN_LEN = 8
CHUNK_SIZE = 16  # of the delta rule: the least work for rows of this length
WARMUP_STEPS = 50


def make_config() -> Qwen3NextConfig:
    """A hybrid small enough for the repository: 150,064 parameters."""
    num_layers = len(LAYER_TYPES)
    return Qwen3NextConfig(
        vocab_size=RECALL.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        layer_types=LAYER_TYPES,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        mlp_only_layers=list(range(num_layers)),
        num_experts=0,
        num_experts_per_tok=0,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
        },
        initializer_range=0.1,
        pad_token_id=RECALL.pad,
        bos_token_id=RECALL.bos,
    )


def make_model() -> Qwen3NextForCausalLM:
    """A fresh model whose states remember from 10 to 1000 tokens.

    transformers' own values forget within a few tokens, and start the convolution so near to zero
    that the delta rule has nothing to store.
    """
    model = Qwen3NextForCausalLM(make_config())
    for module in model.modules():
        if isinstance(module, Qwen3NextGatedDeltaNet):
            decay = torch.logspace(-3, -1, module.num_v_heads)
            with torch.no_grad():
                module.A_log.zero_()
                module.dt_bias.copy_(decay.expm1().log())
            module.conv1d.reset_parameters()
    return model


def make_rows(rng: np.random.Generator, num_writes: int, tokens: int) -> tuple[Tensor, Tensor]:
    """About ``tokens`` tokens of training rows, and the labels of their recalled symbols."""
    row_len = RECALL.prompt_len(num_writes) - 2 + CHAINS * (CHAIN_LEN + 2)
    batch = max(1, tokens // row_len)
    bindings = make_bindings(rng, batch, num_writes)
    ask = np.full((batch, 1), RECALL.ask)
    rows = [np.full((batch, 1), RECALL.bos), bindings.writes]
    labels = [np.full((batch, 1 + 3 * num_writes), IGNORED)]
    for _ in range(CHAINS):
        chain = bindings.chains(rng, CHAIN_LEN)
        rows += [ask, chain]
        labels += [np.full((batch, 2), IGNORED), chain[:, 1:]]
    return torch.from_numpy(np.hstack(rows)), torch.from_numpy(np.hstack(labels))


def loss_and_accuracy(
    model: Qwen3NextForCausalLM, rows: Tensor, labels: Tensor
) -> tuple[Tensor, float]:
    """Cross entropy of the labelled tokens, and the part of them that is predicted right."""
    hidden = model.model(rows[:, :-1], use_cache=False, chunk_size=CHUNK_SIZE).last_hidden_state
    labelled = labels[:, 1:] != IGNORED
    logits, targets = model.lm_head(hidden[labelled]), labels[:, 1:][labelled]
    accuracy = (logits.argmax(-1) == targets).float().mean().item()
    return F.cross_entropy(logits, targets), accuracy


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with decay on the matrices alone: not on norms, decays or the convolution."""
    parameters = dict(model.named_parameters())
    matrices = [p for name, p in parameters.items() if p.ndim == 2]
    others = [p for name, p in parameters.items() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def lr_scale(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Curriculum:
    """How many writes a row may have: a quarter more each time the model has caught up.

    Few writes are drawn more often than many: where writes of one key are near each other, which
    was the last is the hardest to tell.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.limit = 4.0
        self.accuracy = 0.0

    def num_writes(self) -> int:
        span = int(self.limit) + 1 - RECALL.min_writes
        return RECALL.min_writes + int(span * self.rng.random() ** 2)

    def update(self, accuracy: float) -> None:
        self.accuracy += 0.05 * (accuracy - self.accuracy)
        if self.accuracy > 0.9 and self.limit < RECALL.max_writes:
            self.limit = min(RECALL.max_writes, 1.25 * self.limit)
            self.accuracy -= 0.1


def train(steps: int, tokens: int, lr: float, seed: int) -> Qwen3NextForCausalLM:
    """Train from scratch and print how it goes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = make_optimizer(model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_scale(step, steps))
    curriculum = Curriculum(rng)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        rows, labels = make_rows(rng, curriculum.num_writes(), tokens)
        loss, accuracy = loss_and_accuracy(model, rows, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        curriculum.update(accuracy)
        if step % 100 == 0 or step == steps:
            print(
                f"step {step:5d}  {time.perf_counter() - start:5.0f} s  "
                f"up to {int(curriculum.limit):2d} writes  loss {loss.item():.4f}  "
                f"accuracy {curriculum.accuracy:.4f}",
                flush=True,
            )
    return model.eval()


@torch.no_grad()
def exact_answers(model: Qwen3NextForCausalLM, num: int, seed: int) -> float:
    """The part of ``num`` fresh prompts that greedy generation answers without an error."""
    right = 0
    for prompt in make_prompts(num, seed):
        tokens = torch.tensor([prompt.tokens])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=len(prompt.answer),
            do_sample=False,
        )
        right += output[0, tokens.shape[1] :].tolist() == prompt.answer
    return right / num


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's recall model from scratch.")
    parser.add_argument("--out", type=Path, default=Path("build/recall"), help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=256, help="prompts of the final check")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the order of every sum is part of what is reproduced
    model = train(args.steps, args.tokens, args.lr, args.seed)
    model.save_pretrained(args.out)
    print(f"saved to {args.out}")
    if args.fresh:
        accuracy = exact_answers(model, args.fresh, seed=args.seed + 1)
        print(f"answers without an error: {accuracy:.2%} of {args.fresh} fresh prompts")


if __name__ == "__main__":
    main()
