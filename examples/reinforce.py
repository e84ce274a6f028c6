"""Reinforcement learning in which the trainer's probabilities are the server's, bit for bit.

    python examples/reinforce.py

The demo's checkpoint is damaged by noise, so that it recalls worse. An engine samples answers, each
token is rewarded if it is right, and a policy gradient mends the weights, which go back to the
engine without a copy on disk. What the trainer says of the sampled tokens is compared with what the
engine reported: their KL divergence is 0.0 exactly, in each step.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import torch_hybrid as th
from torch_hybrid.demo.task import RECALL, RecallPrompt, checkpoint_path, make_prompts

OPTIONS = {"batch_invariant": True, "compile": False}


def damage(model: torch.nn.Module, amount: float) -> None:
    """Add noise to weights, as a share of their size."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += amount * weight.std(correction=0) * torch.randn_like(weight)


def sample(engine: th.Engine, prompts: list[RecallPrompt], seed: int) -> list[th.Output]:
    """Sample an answer to each prompt, with the log-probabilities of its tokens."""
    sampling = th.Sampling(
        max_new_tokens=RECALL.answer_len, ignore_eos=True, temperature=1.0, logprobs=0, seed=seed
    )
    outputs = engine.generate([prompt.tokens for prompt in prompts], sampling)
    return sorted(outputs, key=lambda output: output.index)


def reward(prompts: list[RecallPrompt], outputs: list[th.Output]) -> Tensor:
    """Reward [N, answer_len]: 1 for each token that follows from the one before."""
    right = []
    for prompt, output in zip(prompts, outputs, strict=True):
        cycle = dict(zip(prompt.tokens[-1:] + prompt.answer, prompt.answer, strict=False))
        pairs = pairwise(prompt.tokens[-1:] + output.tokens)
        right.append([float(cycle.get(before) == token) for before, token in pairs])
    return torch.tensor(right)


def score(
    trainer: Any, prompts: list[RecallPrompt], outputs: list[th.Output]
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities [N, answer_len] of sampled tokens: the trainer's, the engine's."""
    rows = [torch.tensor(p.tokens + o.tokens) for p, o in zip(prompts, outputs, strict=True)]
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    tokens = torch.cat(rows)
    logits = trainer(tokens[None], packing=th.Packing(ends)).logits[0]
    places = torch.cat([torch.arange(end - RECALL.answer_len, end) for end in ends[1:].tolist()])
    trained = th.token_logprobs(logits[places - 1], tokens[places])
    served = [[each.logprob for each in output.logprobs or ()] for output in outputs]
    return trained.view(-1, RECALL.answer_len), torch.tensor(served)


def draw(values: list[float], width: int = 60) -> str:
    """Draw values from 0 to 1 as a line of bars, each the mean of a stretch of steps."""
    means = [float(np.mean(part)) for part in np.array_split(values, min(width, len(values)))]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * mean))] for mean in means)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mend the demo's model by a policy gradient.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--damage", type=float, default=0.2)
    args = parser.parse_args()

    torch.manual_seed(0)
    start, rewards = time.perf_counter(), []
    trainer = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    damage(trainer, args.damage)
    th.make_trainable(trainer.train(), batch_invariant={"compile": False})
    runner = th.Runner(th.from_pretrained(checkpoint_path()), max_seqs=args.prompts, **OPTIONS)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=args.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    with th.Engine(runner) as engine:
        for step in range(args.steps):
            runner.update_weights(trainer)
            prompts = make_prompts(args.prompts, seed=step)
            outputs = sample(engine, prompts, seed=step)
            trained, served = score(trainer, prompts, outputs)
            kl = float((served - trained.detach()).abs().max())
            assert kl == 0.0, f"step {step}: the trainer's log-probabilities are {kl} off"
            gains = reward(prompts, outputs)
            loss = -((gains - gains.mean()) * trained).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            rewards.append(float(gains.mean()))
    print(f"reward {rewards[0]:.2f} {draw(rewards)} {np.mean(rewards[-5:]):.2f}")
    print(f"KL of server and trainer: 0.0 in each of {args.steps} steps", end="")
    print(f", {time.perf_counter() - start:.0f} s")
    assert np.mean(rewards[-5:]) > 0.9, rewards[-5:]


if __name__ == "__main__":
    main()
