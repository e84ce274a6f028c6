"""What weights of 8 and 4 bits cost in accuracy: the demo's trained model, asked to recall.

    python -m benchmarks.integers [--prompts N]

Of the right answers to fresh prompts: their perplexity, how many have the largest logit, and how
far logits are from those of float32 weights (root of the mean square, over their standard
deviation).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import Results
from torch_hybrid import Runner, from_pretrained
from torch_hybrid.demo.task import RecallPrompt, checkpoint_path, make_prompts
from torch_hybrid.models.quantize import EIGHT_BITS, KEPT

NUM_PROMPTS, SEED, AT_ONCE = 200, 11, 16
_HEAD = ("*lm_head",)
_ATTENTION = ("*k_proj", "*v_proj", "*o_proj")
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"weights": "int8"},
    "int8, the head kept": {"weights": "int8", "keep": (*KEPT, *_HEAD)},
    "int8, everything": {"weights": "int8", "keep": ()},
    "int4": {"weights": "int4"},
    "int4, groups of 64": {"weights": "int4", "group": 64},
    "int4, 8 bits: the head": {"weights": "int4", "eight_bits": _HEAD},
    "int4, 8 bits: the head, k, v, o": {"weights": "int4", "eight_bits": (*_HEAD, *_ATTENTION)},
    "int4, 8 bits: nothing": {"weights": "int4", "eight_bits": ()},
    "int4, everything": {"weights": "int4", "eight_bits": (), "keep": ()},
    "int4, down too": {"weights": "int4", "eight_bits": (*EIGHT_BITS, "*down_proj")},
    "int4, in_proj too": {"weights": "int4", "eight_bits": (*EIGHT_BITS, "*in_proj")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Logits [answers, vocab_size] and which tokens are right."""

    logits: Tensor
    right: Tensor

    @property
    def perplexity(self) -> float:
        chosen = self.logits.log_softmax(-1).gather(-1, self.right[:, None])
        return math.exp(-chosen.mean().item())

    @property
    def recalled(self) -> float:
        return (self.logits.argmax(-1) == self.right).double().mean().item()


def answers(prompts: list[RecallPrompt], **options: Any) -> Answers:
    """What a model loaded with these options says where it has to answer."""
    runner = Runner(
        from_pretrained(checkpoint_path(), **options),
        max_seqs=AT_ONCE,
        max_tokens=4096,
        kv_tokens=8192,
        compile=False,
    )
    found = []
    for first in range(0, len(prompts), AT_ONCE):
        some = prompts[first : first + AT_ONCE]
        texts = [prompt.tokens + prompt.answer[:-1] for prompt in some]
        seqs = runner.new_sequences(len(some))
        logits = runner.extend(seqs, texts, logits="all").float().split([*map(len, texts)])
        runner.free(seqs)
        pairs = zip(logits, some, strict=True)
        found += [rows[len(prompt.tokens) - 1 :] for rows, prompt in pairs]
    right = torch.tensor([token for prompt in prompts for token in prompt.answer])
    return Answers(logits=torch.cat(found), right=right)


def main() -> None:
    """Ask each form the same."""
    parser = argparse.ArgumentParser(description="What weights of 8 and 4 bits cost in accuracy.")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    prompts = make_prompts(parser.parse_args().prompts, SEED)
    exact = answers(prompts)
    results = Results(
        title=f"Weights as integers: the demo's model, {len(exact.right)} answers",
        columns=["weights", "perplexity", "recalled", "logits off"],
    )
    results.add("float32", f"{exact.perplexity:.5f}", f"{exact.recalled:.4f}", "-")
    for name, options in FORMS.items():
        given = answers(prompts, **options)
        off = (given.logits - exact.logits).square().mean().sqrt() / exact.logits.std()
        figures = f"{given.perplexity:.5f}", f"{given.recalled:.4f}", f"{off.item():.3f}"
        results.add(name, *figures)
    print(results.text())


if __name__ == "__main__":
    main()
