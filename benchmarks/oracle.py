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

    In float32 the difference may be 2e-5 of the logits' scale. In bfloat16 the error against the
    same weights in float32 may be twice that of transformers itself, plus one rounding.

    Args:
        hf_model: an unmodified transformers model.
    """

    def __init__(self, hf_model: Any) -> None:
        self._model = hf_model
        is_exact = hf_model.dtype == torch.float32
        self._exact = hf_model if is_exact else copy.deepcopy(hf_model).float()

    def check(self, name: str, logits: Tensor, sequences: Sequence[Sequence[int]]) -> None:
        """Compare the logits after each sequence's last token.

        Raises:
            SystemExit: they are not within the budget; there is nothing to report then.
        """
        for row, tokens in zip(logits, sequences, strict=True):
            exact = _last_logits(self._exact, tokens)
            scale = exact.abs().max().item()
            budget = RELATIVE * scale
            if self._exact is not self._model:
                own = (_last_logits(self._model, tokens) - exact).abs().max().item()
                budget = 2 * own + torch.finfo(self._model.dtype).eps * scale
            error = (row.float() - exact).abs().max().item()
            if not error <= budget:
                raise SystemExit(
                    f"{name}: logits after {len(tokens)} tokens are {error:.2e} off those of "
                    f"transformers, and {budget:.2e} is allowed: no figures"
                )


def _last_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        ids = torch.tensor([list(tokens)])
        last: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return last.float()
