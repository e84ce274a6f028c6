"""How many histograms find the end of a nucleus, and what they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ops.draw_tokens.test_contract import ALL, KINDS, by_reference, logits_of, settings_of
from torch_hybrid.ops.draw_tokens import draw_tokens
from torch_hybrid.ops.draw_tokens._torch import draw_tokens as launch
from torch_hybrid.ops.draw_tokens.op import DrawTokens


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


@pytest.mark.parametrize("vocab", [16, 111, 2049, 50_000])
def test_memory_follows_the_vocabulary(vocab: int) -> None:
    num_rows = 200_000  # of which nothing is computed
    logits = torch.empty(num_rows, vocab, device="meta")
    settings = torch.empty(5, num_rows, dtype=torch.float64, device="meta")
    with Largest() as largest:
        launch(DrawTokens(logits, settings, **ALL, impl="torch"))
    assert logits.numel() <= largest.numel <= 2 * logits.numel()


@pytest.mark.parametrize("vocab", [1, 2, 17, 111, 1000, 9000, 40_000])
def test_the_end_of_a_nucleus_by_any_number_of_histograms(vocab: int) -> None:
    rows, options = KINDS["wide"]
    for seed in (0, 3):
        logits, settings = logits_of(3, vocab, seed, torch.float32), settings_of(rows, seed)
        drawn = draw_tokens(logits, settings, **options, impl="torch")
        assert drawn.tolist() == by_reference(logits, settings)
