"""Tuning of the demo's checkpoint by LoRA to a changed task, in packed rows on a CPU.

    python examples/tune_a_hybrid.py

The checkpoint answers with what a key was bound to by ``<write> key value``, where ``<ask> key``
asks. Here tokens that it never saw there stand for both marks, and it recalls half as much. A step
packs prompts of several lengths in one row. ``torch_hybrid/demo/task.py`` describes the task.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import torch_hybrid as th
from torch_hybrid.demo.task import RECALL, checkpoint_path, make_bindings

IGNORED = -100  # the label of tokens that are not to be predicted
WRITE, ASK = RECALL.pad, RECALL.bos  # the marks of the changed task
CHAINS, CHAIN_LEN = 6, 8  # queries after the writes of a prompt, each with its answers
PROJECTIONS = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]


def make_prompt(rng: np.random.Generator, num_writes: int) -> tuple[Tensor, Tensor]:
    """Make the tokens [length] of a prompt of the changed task, and the labels of its answers."""
    bindings = make_bindings(rng, 1, num_writes)
    writes = np.where(bindings.writes == RECALL.write, WRITE, bindings.writes)
    tokens = [[RECALL.bos], writes[0]]
    labels = [np.full(1 + 3 * num_writes, IGNORED)]
    for _ in range(CHAINS):
        chain = bindings.chains(rng, CHAIN_LEN)[0]
        tokens += [[ASK], chain]
        labels += [[IGNORED, IGNORED], chain[1:]]
    return torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(labels))


def make_batch(rng: np.random.Generator, num_prompts: int, most_writes: int) -> dict[str, Any]:
    """Pack prompts of several lengths in one row."""
    counts = rng.integers(RECALL.min_writes, most_writes + 1, num_prompts)
    tokens, labels = zip(*(make_prompt(rng, int(n)) for n in counts), strict=True)
    ends = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    return {
        "input_ids": torch.cat(tokens)[None],
        "labels": torch.cat(labels)[None],
        "packing": th.Packing(ends),
    }


@torch.no_grad()
def recall(model: Any, num_prompts: int, seed: int) -> float:
    """Measure the share of answers that are right, over new prompts."""
    batch = make_batch(np.random.default_rng(seed), num_prompts, RECALL.max_writes)
    labels = batch.pop("labels")[:, 1:]
    predicted = model.eval()(**batch).logits[:, :-1].argmax(-1)
    model.train()
    return float((predicted == labels)[labels != IGNORED].float().mean())


def draw(losses: list[float], width: int = 60) -> str:
    """Draw losses as a line of bars, each the mean of a stretch of steps."""
    means = [float(np.mean(part)) for part in np.array_split(losses, min(width, len(losses)))]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * mean / max(means)))] for mean in means)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the demo's model to a changed task.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--prompts", type=int, default=12, help="prompts of a step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--save", metavar="FOLDER", help="where the adapter goes")
    args = parser.parse_args()

    torch.manual_seed(0)
    rng, start = np.random.default_rng(0), time.perf_counter()
    model = th.make_trainable(AutoModelForCausalLM.from_pretrained(checkpoint_path()))
    config = LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS)
    model = get_peft_model(model, config).train()
    print(f"recall before: {recall(model, 64, seed=1):.1%}")
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
    losses = []
    for step in range(args.steps):
        most = min(RECALL.max_writes, 8 + 2 * RECALL.max_writes * step // args.steps)
        loss = model(**make_batch(rng, args.prompts, most)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} {draw(losses)} {losses[-1]:.2f}")
    after = recall(model, 64, seed=1)
    print(f"recall after {args.steps} steps, {time.perf_counter() - start:.0f} s: {after:.1%}")
    assert after > 0.95, after
    if args.save:
        model.save_pretrained(args.save)
        print(f"torch-hybrid serve {checkpoint_path()} --lora tuned={args.save}")


if __name__ == "__main__":
    main()
