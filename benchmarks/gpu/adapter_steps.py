"""Steps of a runner with resident adapters (LoRA), beside those of one that takes none.

Every linear layer but the head is adapted; in ``experts`` the experts' stacks are too. Floors are
those of the plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.contestants import load_adapters
from benchmarks.gpu.clock import Rates
from benchmarks.gpu.steps import (
    CONTEXT,
    DECODES,
    MAX_TOKENS,
    ROOM,
    Step,
    decoding,
    floor_ms,
    make_empty,
    make_model,
    measure,
    prefilling,
)
from benchmarks.mixers import Row
from torch_hybrid import HybridModel, Runner

COUNT, RANK = 8, 16
PROMPT = 2048  # tokens
# Layers of the part with adapted experts: a file of their factors has .2 GB a layer.
NUM_LAYERS_OF_EXPERTS = 4


def measure_adapter_steps(rates: Rates, *, experts: bool = False) -> Iterator[Step]:
    """Measure captured steps of warm runners, by turns."""
    sizes = {"num_hidden_layers": NUM_LAYERS_OF_EXPERTS} if experts else {}
    model = make_model(**sizes)
    plain = _runner(model)
    adapted = _runner(model, max_adapters=COUNT, max_lora_rank=RANK, expert_adapters=experts)
    load_adapters(adapted, make_empty(**sizes), COUNT, RANK, experts=experts)
    for runner in (plain, adapted):
        runner.warm_up()
    for name, rows, run in runs(plain, adapted):
        yield measure(name, floor_ms(rates, model, rows), run)


def runs(plain: Runner, adapted: Runner) -> Iterator[tuple[str, list[Row], Callable[[], Tensor]]]:
    """Yield name, rows and call of steps without adapters, with resident ones that no sequence
    has, and of sequences that have them in turn."""
    count = len(adapted.adapters)
    kinds: list[tuple[str, Runner, tuple[str, ...]]] = [
        ("plain", plain, ()),
        (f"{count} adapters unused", adapted, ()),
        (f"{count} adapters", adapted, adapted.adapters),
    ]
    for num_seqs in DECODES:
        for name, runner, names in kinds:
            seqs, prompts = decoding(runner, num_seqs, names)
            run = partial(runner.extend, seqs, [prompt[:1] for prompt in prompts])
            yield f"decode {num_seqs}, {name}", [Row(1, CONTEXT)] * num_seqs, run
            runner.free(seqs)
    for name, runner, names in kinds:
        run = prefilling(runner, 1, PROMPT, names)
        yield f"prefill 1x{PROMPT}, {name}", [Row(PROMPT, 0)], run


def _runner(model: HybridModel, **options: Any) -> Runner:
    most = DECODES[-1]
    return Runner(
        model,
        max_seqs=most,
        max_tokens=MAX_TOKENS,
        kv_tokens=most * (CONTEXT + ROOM) + MAX_TOKENS,
        cuda_graphs="on",
        **options,
    )
