"""A server's log-probabilities of the tokens that it samples, beside those of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.graphs.runner import Runner
from torch_hybrid.models.load import transformers_class
from torch_hybrid.models.shared_weights import adapt_shared
from torch_hybrid.packing import Packing
from torch_hybrid.sampling import Sampling, token_logprobs
from torch_hybrid.serving.engine import Engine
from torch_hybrid.training.make_trainable import make_trainable

PROMPTS = (1, 7, 40, 95)  # tokens of prompts, which are drawn at random


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Tokens of one answer that differ, of ``num_tokens``, and how far others are.

    Attributes:
        first: the first token whose log-probability differs; None if none does.
        plain: largest difference to a trainer without ``batch_invariant``.
    """

    num_prompt: int
    num_tokens: int
    first: int | None
    plain: float


def trainer_and_server(path: str, dtype: Any, device: str, **options: Any) -> tuple[Any, Runner]:
    """Load a checkpoint as a trainer, and serve its weights.

    Raises:
        ValueError: there is none.
    """
    try:
        model = transformers_class(path).from_pretrained(path, dtype=dtype).to(device)
    except OSError as error:
        raise ValueError(f"cannot read a model from {path}: {error}") from error
    trainer = make_trainable(model, batch_invariant=options)
    return trainer, Runner(adapt_shared(trainer), batch_invariant=True, **options)


def compare(trainer: Any, server: Runner, num_tokens: int) -> Iterator[Compared]:
    """Sample answers to prompts of random tokens together, and score them packed."""
    generator = torch.Generator("cpu").manual_seed(0)
    shown = [
        torch.randint(
            server.vocab_size, (n,), generator=generator, dtype=torch.int64, device="cpu"
        ).tolist()
        for n in PROMPTS
    ]
    sampling = Sampling(
        max_new_tokens=num_tokens, ignore_eos=True, logprobs=0, seed=0, temperature=1.0
    )
    with Engine(server) as engine:
        outputs = sorted(engine.generate(shown, sampling), key=lambda output: output.index)
    rows = [
        torch.tensor(shown[each.index] + each.tokens, dtype=torch.int64, device="cpu")
        for each in outputs
    ]
    tokens = torch.cat(rows).to(trainer.device)
    ends = torch.tensor([0, *map(len, rows)], dtype=torch.int64, device="cpu").cumsum(0)
    packing = Packing(ends).to(trainer.device)
    exact = _scores(trainer, tokens, packing)
    plain = _scores(trainer, tokens, packing, server=None)
    for output, end in zip(outputs, packing.cu_seqlens[1:].tolist(), strict=False):
        answer = slice(end - len(output.tokens), end)
        served = exact.new_tensor([each.logprob for each in output.logprobs or ()])
        other = (exact[answer] != served).nonzero().flatten().tolist()
        yield Compared(
            num_prompt=len(shown[output.index]),
            num_tokens=len(output.tokens),
            first=next(iter(other), None),
            plain=float((plain[answer] - served).abs().max()),
        )


@torch.no_grad()
def _scores(trainer: Any, tokens: Tensor, packing: Packing, **without: Any) -> Tensor:
    """Compute log-probabilities [T] of tokens; the first of a sequence has none that counts."""
    kept = vars(trainer)["server"]
    vars(trainer).update(without)
    try:
        logits = trainer(tokens[None], packing=packing, use_cache=False).logits[0]
    finally:
        vars(trainer)["server"] = kept
    scores = token_logprobs(logits, tokens.roll(-1)).roll(1)
    return scores.cpu()
