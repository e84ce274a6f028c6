"""The demo itself: serve fresh recall prompts together, and compare the tokens with transformers'.

Every figure is measured in the run that prints it. transformers serves the same prompts with its
own ``generate``: one by one to compare tokens, and as one padded batch to compare time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torch_hybrid.demo.task import RECALL, RecallPrompt
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.graphs.step import Model
from torch_hybrid.models.checkpoint.files import open_checkpoint
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.speculation import Speculation

Tokens = list[list[int]]
PAGE_SIZE = 16
DRAFTS = 20  # most drafts of the MTP head in one step
ALONE, ALONE_TOKENS = 6, 64  # prompts served one by one, and new tokens of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Counts of served tokens that are right, and of those equal to transformers'."""

    num_tokens: int
    num_right: int  # equal to the answer that the prompt determines
    num_equal: int  # equal to what transformers generates
    num_whole: int  # prompts without a wrong token


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Prompts served one by one, without drafts and with drafts of the model's MTP head."""

    num_tokens: int
    seconds: dict[str, float]
    acceptance: float  # the share of drafts that were right
    is_equal: bool  # whether the tokens are the same


def has_head(path: Path) -> bool:
    """Tell whether a checkpoint has an MTP head."""
    return any(name.startswith("mtp.") for name in open_checkpoint(path).tensors)


def make_runner(model: Model, prompts: Sequence[RecallPrompt], *, compile: bool = True) -> Runner:
    """Make a runner with room for all prompts; it prefills chunks beside the first decodes."""
    longest = max(len(prompt.tokens) + len(prompt.answer) for prompt in prompts)
    kv_tokens = len(prompts) * (longest + PAGE_SIZE) + ALONE_TOKENS
    return Runner(
        model,
        max_seqs=len(prompts),
        max_tokens=1024,
        kv_tokens=kv_tokens,
        page_size=PAGE_SIZE,
        compile=compile,
    )


def serve(runner: Runner, prompts: Sequence[RecallPrompt]) -> Tokens:
    """Serve all prompts with the engine; return the generated tokens of each."""
    served: Tokens = [[] for _ in prompts]
    samplings = [Sampling(max_new_tokens=len(prompt.answer)) for prompt in prompts]
    with Engine(runner) as engine:
        for output in engine.generate([prompt.tokens for prompt in prompts], samplings):
            served[output.index] = output.tokens
    return served


def make_drafting_runner(model: Model, *, compile: bool = True) -> Runner:
    """Make a runner of a model with its MTP head, for one prompt at a time."""
    return Runner(
        model,
        max_seqs=1,
        max_tokens=512,
        kv_tokens=RECALL.prompt_len(RECALL.max_writes) + ALONE_TOKENS + PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_drafts=DRAFTS,
        compile=compile,
    )


def serve_alone(
    plain: Runner, drafting: Runner, prompts: Sequence[RecallPrompt], *, rounds: int
) -> Drafted:
    """Serve some of the prompts one by one; rounds without drafts and with them take turns.

    Generation goes on past the answer, round the cycle of the prompt's symbols.
    """
    engines = {
        "one by one": Engine(plain),
        "one by one, with drafts": Engine(
            drafting, speculate=Speculation("mtp", num_drafts=DRAFTS)
        ),
    }
    sampling = Sampling(max_new_tokens=ALONE_TOKENS, ignore_eos=True)
    tokens: dict[str, Tokens] = {}

    def run(name: str) -> None:
        tokens[name] = [
            output.tokens
            for prompt in prompts[:ALONE]
            for output in engines[name].generate(prompt.tokens, sampling)
        ]

    seconds = fastest({name: partial(run, name) for name in engines}, rounds=rounds)
    without, drafted = tokens.values()
    return Drafted(
        num_tokens=sum(map(len, without)),
        seconds=seconds,
        acceptance=engines["one by one, with drafts"].stats().drafts.acceptance,
        is_equal=without == drafted,
    )


def load_transformers(path: Path) -> Any:
    """Load the checkpoint as a model of transformers, unchanged."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).eval()


def transformers_one_by_one(
    model: Any, prompts: Sequence[RecallPrompt], on_prompt: Callable[[], None]
) -> Tokens:
    """Generate with transformers for each prompt alone, without padding."""
    generated = []
    for prompt in prompts:
        generated += transformers_batch(model, [prompt])
        on_prompt()
    return generated


def transformers_batch(
    model: Any, prompts: Sequence[RecallPrompt], *, compiled: bool = False
) -> Tokens:
    """Generate with transformers for the prompts as one batch, padded on the left.

    ``compiled`` uses its static cache and its compiled decode step.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    padding = [longest - len(prompt.tokens) for prompt in prompts]
    rows = [[0] * n + prompt.tokens for n, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in padding]
    options: dict[str, Any] = {}
    if compiled:
        options = {"cache_implementation": "static", "compile_config": _compile_config()}
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor(rows, dtype=torch.int64, device="cpu"),
            attention_mask=torch.tensor(mask, dtype=torch.int64, device="cpu"),
            max_new_tokens=max(len(prompt.answer) for prompt in prompts),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    generated: Tokens = ids[:, longest:].tolist()
    return generated


def _compile_config() -> Any:
    from transformers import CompileConfig

    config = CompileConfig(mode="default", dynamic=False)
    config._compile_all_devices = True  # transformers' only switch for a CPU
    return config


def compare(prompts: Sequence[RecallPrompt], served: Tokens, expected: Tokens) -> Recalled:
    """Count the served tokens that are right, and those equal to transformers'."""
    answers = [prompt.answer for prompt in prompts]
    return Recalled(
        num_tokens=sum(map(len, answers)),
        num_right=sum(_num_equal(s, a) for s, a in zip(served, answers, strict=True)),
        num_equal=sum(_num_equal(s, e) for s, e in zip(served, expected, strict=True)),
        num_whole=sum(s == a for s, a in zip(served, answers, strict=True)),
    )


def _num_equal(tokens: list[int], others: list[int]) -> int:
    return sum(a == b for a, b in zip(tokens, others, strict=False))


def fastest(contestants: Mapping[str, Callable[[], Any]], *, rounds: int) -> dict[str, float]:
    """Measure each contestant's fastest run in seconds; they take turns, after one warm-up run."""
    seconds: dict[str, float] = dict.fromkeys(contestants, float("inf"))
    for turn in range(1 + rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds
