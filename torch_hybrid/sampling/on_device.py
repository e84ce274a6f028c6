"""Draw of tokens on the device, one for each row, by an op that reads nothing on the host.

The op is captured with the step whose logits it draws from, or called after a step that is waited
for. On a GPU the same kernel draws in both cases, so running ahead changes no token. On a CPU
``draw`` is faster, and draws the same tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.draw_tokens import op
from torch_hybrid.ops.draw_tokens.op import NUM_SETTINGS
from torch_hybrid.sampling.draw import Draw, sample_on_host

_FEWEST_RANKED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawKind:
    """Work that the rows of one step need; the op skips what no row needs."""

    draws: bool = False  # some temperature is above 0
    num_ranked: int = 0  # at least the largest top-k
    has_wide_top_p: bool = False  # some row has a top-p and no top-k

    @classmethod
    def of(cls, draws: Sequence[Draw | None]) -> DrawKind:
        """Find the kind of a step with these draws."""
        drawn = [x.sampling for x in draws if x is not None and x.sampling.temperature > 0]
        top_k = max((sampling.top_k for sampling in drawn), default=0)
        return cls(
            draws=bool(drawn),
            num_ranked=max(1 << (top_k - 1).bit_length(), _FEWEST_RANKED) if top_k else 0,
            has_wide_top_p=any(s.top_p < 1 and not s.top_k for s in drawn),
        )

    def __str__(self) -> str:
        """Name the kind for reports."""
        if not self.draws:
            return "greedy"
        filters = ["top-k"] * (self.num_ranked > 0) + ["top-p"] * self.has_wide_top_p
        return " ".join(["drawn", *filters])


# Kinds of most steps; one with a larger top-k differs in a number.
USUAL_KINDS = (
    DrawKind(),
    DrawKind(draws=True),
    DrawKind(draws=True, num_ranked=_FEWEST_RANKED),
    DrawKind(draws=True, has_wide_top_p=True),
)


def settings_of(draws: Sequence[Draw | None], num_rows: int) -> Tensor:
    """Pack [5, num_rows] float64 on the host: temperature, number, top-k, top-p, min-p of each row.

    Rows without a draw, and padding rows, are all zero.
    """
    rows = [_NOTHING if draw is None else _settings(draw) for draw in draws]
    rows += [_NOTHING] * (num_rows - len(rows))
    packed = array("d", chain.from_iterable(zip(*rows, strict=True)))
    return torch.frombuffer(packed, dtype=torch.float64).view(NUM_SETTINGS, num_rows)


_NOTHING = (0.0,) * NUM_SETTINGS


def _settings(draw: Draw) -> tuple[float, ...]:
    sampling = draw.sampling
    top_k = float(sampling.top_k)
    return sampling.temperature, draw.number, top_k, sampling.top_p, sampling.min_p


def no_settings(num_rows: int) -> Tensor:
    """Make the settings of rows that are not drawn."""
    return torch.zeros(NUM_SETTINGS, num_rows, dtype=torch.float64, device="cpu")


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose a token for each row, and wait for it.

    Args:
        logits: [N, vocab], any float dtype; not changed.
        draws: N draws.

    Returns:
        N token ids; ``NOT_FINITE`` for a row with NaN or infinity among its logits. Minus infinity
        bars a token, and is allowed beside finite ones.
    """
    if logits.device.type == "cpu":
        return sample_on_host(logits, draws)
    if not draws:  # a step of unfinished prompts alone
        return []
    settings = settings_of(draws, len(draws)).to(logits.device)
    tokens: list[int] = draw_tokens(logits, settings, DrawKind.of(draws)).tolist()
    return tokens


def draw_tokens(logits: Tensor, settings: Tensor, kind: DrawKind) -> Tensor:
    """Choose a token for each row.

    Args:
        logits: [N, vocab], any float dtype; not changed.
        settings: [5, N] float64, of ``settings_of``.
        kind: kind of the rows that are drawn; other rows may hold anything.

    Returns:
        [N] int64 token ids; ``NOT_FINITE`` for a row with NaN or infinity among its logits.
    """
    return op.draw_tokens(
        logits,
        settings,
        draws=kind.draws,
        num_ranked=kind.num_ranked,
        has_wide_top_p=kind.has_wide_top_p,
        impl=_impl_for(logits),
    )


def _impl_for(logits: Tensor) -> str:
    """Choose the first implementation for these logits."""
    sizes = {"vocab_size": logits.shape[-1]}
    need = Need(device=logits.device, dtype=logits.dtype, sizes=sizes)
    return next(
        name for name, each in op.IMPLEMENTATIONS.items() if not each.capability.why_not(need)
    )
