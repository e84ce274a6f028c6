"""Steps that sample on the device, so that the host need not wait for their tokens.

    last     [max_seqs + 1] the last sampled token of each sequence, by the sequence's place
    tokens   of a step: an id, or -p for last[p], which the host has not read yet
    draws    places: where last gets each row's token (0: none is drawn); settings: how it is drawn

    a launched step; its first two lines are captured, and serve ``Runner.extend`` too:
        tokens = last[-tokens] where tokens < 0
        logits = the compiled step
        drawn = draw_tokens(logits, settings)
        last[places] = drawn
    then drawn is copied to the host; ``Launched.result`` waits for that

Draws are not captured: each kind would take a graph of each bucket.

Place 0 is null: padding reads and writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.caches.sequence import Sequence as HeldSequence
from torch_hybrid.graphs.step import Inputs
from torch_hybrid.host.ints import int_tensor
from torch_hybrid.pytrees import register_value
from torch_hybrid.sampling import Draw, DrawKind, draw_tokens, no_settings, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Draws of tokens from the R rows of a step's logits."""

    places: Tensor  # [R] int64: place of the sequence that gets the token; 0: none is drawn
    settings: Tensor  # [5, R] float64; see ``settings_of``

    @classmethod
    def nothing(cls, num_rows: int) -> Draws:
        """Make draws for rows of which none is sampled."""
        places = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
        return cls(places=places, settings=no_settings(num_rows))

    @classmethod
    def of(
        cls,
        places: Sequence[int],
        draws: Sequence[Draw | None],
        kind: DrawKind,
        num_rows: int,
    ) -> Draws:
        """Make the draws of a step.

        Args:
            places: place of each sequence among the last tokens.
            draws: how each sequence's token is drawn; None draws none.
            kind: kind of all draws.
            num_rows: rows of logits, padding included.
        """
        drawn = [place * (draw is not None) for place, draw in zip(places, draws, strict=True)]
        drawn += [0] * (num_rows - len(drawn))
        is_greedy = not kind.draws
        settings = no_settings(num_rows) if is_greedy else settings_of(draws, num_rows)
        return cls(places=int_tensor(drawn, torch.int64), settings=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs that change from step to step: those of the compiled step, and the draws after it.

    A step that is not launched draws nothing.
    """

    inputs: Inputs
    draws: Draws


register_value(Draws)
register_value(StepInputs)


def num_logits(inputs: Inputs) -> int:
    """Count the rows of logits that a step returns, padding included."""
    if inputs.rows is not None:
        return inputs.rows.shape[0]
    return sum(part.batch.num_tokens for part in inputs.parts)


class Launched:
    """Step that was started, and whose tokens are being copied to the host."""

    def __init__(self, drawn: Tensor, num_rows: int) -> None:
        self._num_rows = num_rows
        self._tokens, self._copied = drawn, None
        if drawn.device.type == "cuda":
            self._tokens = torch.empty_like(drawn, device="cpu", pin_memory=True)
            self._tokens.copy_(drawn, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(drawn.device))

    def result(self) -> list[int]:
        """Wait for the tokens: one for each sequence, in their order.

        Returns:
            The tokens. ``NOT_FINITE`` marks logits with NaN or infinity. The entry of a sequence
            without a draw has no meaning.
        """
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._tokens[: self._num_rows].tolist()
        return tokens

    def join(self, device: torch.device) -> None:
        """Make this thread's later work on the device wait for the step."""
        if self._copied is not None:
            self._copied.wait(torch.cuda.current_stream(device))


class LastTokens:
    """Tokens that were sampled last for the sequences of a runner, on the device.

    Args:
        max_seqs: number of places, one for each sequence of the runner.
        device: device on which steps run.
    """

    @torch.inference_mode(mode=False)
    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self._of_place = torch.zeros(max_seqs + 1, dtype=torch.int64, device=device)
        self._known: set[int] = set()  # ids of the sequences that have a sampled token

    def fill(
        self,
        seqs: Sequence[HeldSequence],
        places: Sequence[int],
        tokens: Sequence[Sequence[int] | None],
    ) -> list[Sequence[int]]:
        """Write the tokens of a step as its batch has them: None becomes the sequence's last token.

        Raises:
            ValueError: the step before sampled no token for such a sequence.
        """
        known = self._known
        for seq, new in zip(seqs, tokens, strict=True):
            if new is None and seq.id not in known:
                raise ValueError(f"{seq} has no sampled token: its last step drew none")
        pairs = zip(places, tokens, strict=True)
        return [[-place] if new is None else new for place, new in pairs]

    def note(self, seqs: Sequence[HeldSequence], draws: Sequence[Draw | None]) -> None:
        """Note that a step with these draws was started."""
        pairs = list(zip(seqs, draws, strict=True))
        self._known.difference_update([seq.id for seq, draw in pairs if draw is None])
        self._known.update([seq.id for seq, draw in pairs if draw is not None])

    def forget(self, seqs: Iterable[HeldSequence]) -> None:
        """Forget sequences that were freed, or went on with tokens of the host."""
        self._known.difference_update(seq.id for seq in seqs)

    def reading(self, step: Callable[[Inputs], Tensor]) -> Callable[[StepInputs], Tensor]:
        """Make a step read last tokens where its tokens stand for them."""

        def run(value: StepInputs) -> Tensor:
            for part in value.inputs.parts:
                self._fill_in(part.batch.tokens)
            return step(value.inputs)

        return run

    @torch.inference_mode()
    def draw(self, logits: Tensor, draws: Draws, kind: DrawKind) -> Tensor:
        """Sample a token from each row of logits, and keep it as its sequence's last.

        Returns:
            [R] int64.
        """
        drawn: Tensor = draw_tokens(logits, draws.settings, kind)
        self._of_place.scatter_(0, draws.places, drawn.clamp(min=0))
        return drawn

    def _fill_in(self, tokens: Tensor) -> None:
        """Put last tokens in the place of their markers, in the step's own input."""
        last = self._of_place.index_select(0, tokens.neg().clamp_(min=0))
        torch.where(tokens < 0, last, tokens, out=tokens)
