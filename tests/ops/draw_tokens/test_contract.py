"""The contract of draw_tokens, held by every implementation."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.devices import needs_cuda
from tests.errors import error_text
from tests.ops.contract import impl_fixture, rows_apart
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.draw_tokens import draw_tokens, reference
from torch_hybrid.ops.draw_tokens.op import IMPLEMENTATIONS, DrawTokens

ALL: dict[str, Any] = {"draws": True, "num_ranked": 4096, "has_wide_top_p": True}
GREEDY: dict[str, Any] = {"draws": False, "num_ranked": 0, "has_wide_top_p": False}
# Temperature, top-k, top-p and min-p; what each needs of an op that leaves out what it can.
KINDS: dict[str, tuple[list[tuple[float, float, float, float]], dict[str, Any]]] = {
    "greedy": ([(0.0, 0, 1.0, 0.0)], GREEDY),
    "plain": ([(1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.02)], GREEDY | {"draws": True}),
    "ranked": (
        [(0.8, 20, 0.95, 0.0), (2.0, 300, 0.5, 0.1), (1e-300, 1, 1.0, 0.0)],
        GREEDY | {"draws": True, "num_ranked": 512},
    ),
    "wide": (
        [(1.0, 0, 0.9, 0.0), (3.0, 0, 0.999, 0.0), (0.1, 0, 1e-9, 0.0)],
        GREEDY | {"draws": True, "has_wide_top_p": True},
    ),
    "mixed": (
        [
            (0.0, 0, 1.0, 0.0),
            (1.0, 0, 1.0, 0.0),
            (1.5, 4000, 0.9, 0.0),
            (0.7, 0, 0.8, 1.0),
            (0.9, 5, 1.0, 0.3),
        ],
        ALL,
    ),
}
# Of one segment and of two, the second with few tokens and with many.
SIZES = (
    ("greedy", 300),
    ("plain", 2049),
    ("ranked", 1),
    ("ranked", 2500),
    ("wide", 2500),
    ("mixed", 300),
    ("mixed", 2500),
)
impl = impl_fixture(IMPLEMENTATIONS)


def logits_of(num_rows: int, vocab: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Rows with many ties in half of the cases, and barred tokens."""
    x = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    x = x.round() if seed % 2 else x
    x[:, seed % vocab :: 7] = -math.inf
    x[:, vocab // 2] = seed % 3 - 1.0
    return x.to(dtype)


def settings_of(rows: list[tuple[float, float, float, float]], seed: int) -> Tensor:
    rng = random.Random(seed)
    drawn = [(t, rng.choice([rng.random(), 0.0, 1 - 2**-53]), *rest) for t, *rest in rows]
    return torch.tensor(drawn, dtype=torch.float64).t().contiguous()


def by_reference(logits: Tensor, settings: Tensor) -> list[int]:
    found: list[int] = reference.draw_tokens(DrawTokens(logits, settings, **ALL, impl="")).tolist()
    return found


@pytest.mark.parametrize(("kind", "vocab"), SIZES)
def test_tokens_of_the_reference(impl: str, kind: str, vocab: int) -> None:
    rows, options = KINDS[kind]
    for seed, dtype in ((0, torch.float32), (3, torch.bfloat16)):
        logits, settings = logits_of(len(rows), vocab, seed, dtype), settings_of(rows, seed)
        drawn = draw_tokens(logits, settings, **options, impl=impl)
        assert drawn.dtype == torch.int64
        assert drawn.tolist() == by_reference(logits, settings)


def test_rows_that_are_not_finite_harm_no_other(impl: str) -> None:
    good = KINDS["mixed"][0]
    rows = [row for row in good for _ in range(2)]
    logits, settings = logits_of(len(rows), 2500, 0, torch.float32), settings_of(rows, 0)
    expected = by_reference(logits, settings)
    harmed = logits.clone()
    harmed[::2, 2400] = torch.tensor([math.nan, math.inf, -math.nan, math.inf, math.nan])
    harmed[8] = -math.inf
    told = draw_tokens(harmed, settings, **ALL, impl=impl).tolist()
    assert told == [token if i % 2 else -1 for i, token in enumerate(expected)]


def test_all_tokens_alike(impl: str) -> None:
    """However many tie with the last one kept, and where sums are larger than doubles are exact; in
    a row that programs share however they cut it."""
    rows = [
        (1.0, 2, 1.0, 0.0),
        (1.0, 3, 0.5, 0.0),
        (2.0, 0, 1 - 1e-16 * 2, 0.0),
        (0.0, 0, 1.0, 0.0),
    ]
    settings = settings_of(rows, 0)
    settings[1] = 1 - 2**-53
    logits = torch.zeros(4, 8400)
    logits[:, 7] = -25.0
    drawn = draw_tokens(logits, settings, **ALL, impl=impl).tolist()
    assert drawn == [8399, 8399, 8399, 0]


def test_rows_that_lie_apart(impl: str) -> None:
    rows, options = KINDS["plain"]
    logits, settings = logits_of(len(rows), 300, 0, torch.float32), settings_of(rows, 0)
    expected = by_reference(logits, settings)
    for x in (rows_apart(logits), logits.t().contiguous().t()):
        assert draw_tokens(x, settings, **options, impl=impl).tolist() == expected


test_in_the_interpreter = interprets("triton")


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 300, 2049, 5000, 151_936, 262_144])
def test_on_a_gpu(kind: str, vocab: int) -> None:
    """Both forms there draw the same; sizes and filters are those of whole vocabularies."""
    rows, options = KINDS[kind]
    rows = rows * 8
    for seed, dtype in ((0, torch.float32), (1, torch.float16), (2, torch.bfloat16)):
        logits, settings = logits_of(len(rows), vocab, seed, dtype), settings_of(rows, seed)
        on_gpu = logits.cuda(), settings.cuda()
        drawn = draw_tokens(*on_gpu, **options, impl="triton")
        assert torch.equal(drawn, draw_tokens(*on_gpu, **options, impl="torch"))


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.draw_tokens import _triton

    rows = []
    for target in SHARED_LIMITS:
        with launches_on(target) as launches:
            logits = torch.empty(32, 151_936, dtype=torch.bfloat16, device="meta")
            settings = torch.empty(5, 32, dtype=torch.float64, device="meta")
            _triton.draw_tokens(DrawTokens(logits, settings, **ALL, impl="triton"))
        rows += [resources_of(each, target, "151936") for each in launches.values()]
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


# ---- errors ----------------------------------------------------------------------------------


def test_error_texts() -> None:
    logits, settings = torch.zeros(4, 8), torch.zeros(5, 4, dtype=torch.float64)
    calls: list[tuple[Tensor, Tensor, dict[str, Any]]] = [
        (logits[0], settings, {}),
        (logits[:, :0], settings, {}),
        (logits.int(), settings, {}),
        (logits, settings[:4], {}),
        (logits, settings.float(), {}),
        (logits, settings, {"num_ranked": -1}),
    ]
    errors = [
        error_text(ValueError, draw_tokens, given, own, **(ALL | {"impl": "torch"} | options))
        for given, own, options in calls
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
logits must be [N, vocab_size], got [8]
logits must be [N, vocab_size], got [4, 0]
logits must be a floating point tensor, got torch.int32
settings must have shape [5, 4], got [4, 4]
settings must have dtype torch.float64, got torch.float32
num_ranked must be at least 0, got -1""",
    )
