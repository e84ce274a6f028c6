"""FlashInfer's top-k before the draw: without a GPU by its documentation, and on one."""

from __future__ import annotations

import inspect
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.draw_tokens.test_contract import ALL, GREEDY, KINDS, logits_of, settings_of
from tests.ops.flashinfer_source import needs_flashinfer, parameters_of
from tests.ops.triton_interpreter import needs_interpreter
from torch_hybrid.ops.draw_tokens import draw_tokens, reference
from torch_hybrid.ops.draw_tokens.op import IMPLEMENTATIONS

RANKED = ("ranked", "mixed")


def top_k_mask_logits(logits: Tensor, top_k: Tensor) -> Tensor:
    """FlashInfer's function by its documentation: all that tie with the last one stay; NaN, which
    compares with nothing, does not."""
    assert logits.is_contiguous()
    assert top_k.dtype == torch.int32
    ordered = logits.float().sort(dim=1, descending=True).values
    last = ordered.gather(1, top_k.long().unsqueeze(1) - 1)
    return logits.masked_fill(~(logits.float() >= last), -math.inf)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer as its documentation has it, in place of the package."""
    for name in ("flashinfer", "flashinfer.sampling"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.sampling"].top_k_mask_logits = top_k_mask_logits


def launch(logits: Tensor, settings: Tensor, options: dict[str, int]) -> list[int]:
    """The launcher itself: the op takes CUDA tensors alone."""
    drawn: Tensor = IMPLEMENTATIONS["flashinfer"].load()(logits, settings, **options)
    return drawn.tolist()


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("kind", RANKED)
def test_tokens_of_the_reference_by_documentation_of_triton(kind: str):
    rows, options = KINDS[kind]
    for seed, dtype in ((0, torch.float32), (3, torch.float16)):
        logits, settings = logits_of(len(rows), 2500, seed, dtype), settings_of(rows, seed)
        drawn = launch(logits, settings, options)
        assert drawn == reference.draw_tokens(logits, settings)


@needs_interpreter
@pytest.mark.usefixtures("documented")
def test_rows_that_are_not_finite_by_documentation_of_triton():
    rows = KINDS["mixed"][0]
    logits, settings = logits_of(len(rows), 2500, 0, torch.float32), settings_of(rows, 0)
    expected = reference.draw_tokens(logits, settings)
    logits[2, 2400], logits[4, 7] = math.nan, math.inf
    assert launch(logits, settings, ALL) == [*expected[:2], -1, expected[3], -1]


def test_steps_without_a_top_k_are_refused():
    for options in (GREEDY, KINDS["wide"][1]):
        with pytest.raises(ValueError, match="draws where some row has a top-k, got none"):
            launch(torch.zeros(1, 9), torch.zeros(5, 1, dtype=torch.float64), options)


@needs_flashinfer
def test_its_function_takes_what_the_documentation_says():
    theirs = parameters_of("sampling.py", "top_k_mask_logits")
    assert theirs == list(inspect.signature(top_k_mask_logits).parameters)


@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize("kind", RANKED)
@pytest.mark.parametrize("vocab", [300, 5000, 151_936, 262_144])
def test_on_a_gpu(kind: str, vocab: int):
    """It draws what the others draw there; also where a row has a NaN."""
    rows, options = KINDS[kind]
    rows = rows * 8
    for seed, dtype in ((0, torch.float32), (1, torch.float16), (2, torch.bfloat16)):
        logits, settings = logits_of(len(rows), vocab, seed, dtype), settings_of(rows, seed)
        logits[5, vocab - 1] = math.nan
        on_gpu = logits.cuda(), settings.cuda()
        drawn = draw_tokens(*on_gpu, **options, impl="flashinfer")
        assert torch.equal(drawn, draw_tokens(*on_gpu, **options, impl="triton"))


@needs_cuda
@needs_flashinfer
def test_a_captured_graph_draws_from_other_logits():
    rows, options = KINDS["ranked"]
    logits, settings = (
        x.cuda() for x in (logits_of(3, 151_936, 2, torch.bfloat16), settings_of(rows, 2))
    )
    draw_tokens(logits, settings, **options, impl="flashinfer")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = draw_tokens(logits, settings, **options, impl="flashinfer")
    for seed in (4, 5):
        logits.copy_(logits_of(3, 151_936, seed, torch.bfloat16))
        settings.copy_(settings_of(rows, seed))
        graph.replay()
        assert torch.equal(drawn, draw_tokens(logits, settings, **options, impl="triton"))
