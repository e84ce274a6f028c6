"""The check that comes before any figure: logits against transformers in the same process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RELATIVE = 2e-5  # of the logits' scale, in float32


class Oracle:
    """Logits of one whole forward for each sequence by transformers, without cache or padding.

    In float32 the difference may be 2e-5 of the logits' scale. Where it is more, and in bfloat16,
    the error against the same weights with more digits (float64, or float32 for bfloat16) may be
    twice that of transformers itself, plus one rounding.

    Args:
        hf_model: an unmodified transformers model.
    """

    def __init__(self, hf_model: Any) -> None:
        self._model = hf_model
        self._is_float32 = hf_model.dtype == torch.float32
        self._exact: Any = None  # made when it is first asked for

    def check(self, name: str, logits: Tensor, sequences: Sequence[Sequence[int]]) -> None:
        """Compare the logits after each sequence's last token.

        Raises:
            SystemExit: they are not within the budget; there is nothing to report then.
        """
        for row, tokens in zip(logits, sequences, strict=True):
            theirs = _last_logits(self._model, tokens)
            scale = theirs.abs().max().item()
            error, budget = (row - theirs).abs().max().item(), RELATIVE * scale
            if not self._is_float32 or error > budget:
                exact = _last_logits(self._in_more_digits(), tokens)
                own = (theirs - exact).abs().max().item()
                error = (row - exact).abs().max().item()
                budget = 2 * own + torch.finfo(self._model.dtype).eps * scale
            if not error <= budget:
                raise SystemExit(
                    f"{name}: logits after {len(tokens)} tokens are {error:.2e} off those of "
                    f"transformers, and {budget:.2e} is allowed: no figures"
                )

    def _in_more_digits(self) -> Any:
        if self._exact is None:
            dtype = torch.float64 if self._is_float32 else torch.float32
            self._exact = copy.deepcopy(self._model).to(dtype)
            self._exact.set_experts_implementation("eager")  # grouped products have no float64
        return self._exact


def _last_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        ids = torch.tensor([list(tokens)])
        last: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return last.double()
