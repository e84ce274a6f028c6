"""Options of an engine's speculation, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch_hybrid.host.ints import check_int
from torch_hybrid.serving.speculation.drafter import Drafter
from torch_hybrid.serving.speculation.head import Head
from torch_hybrid.serving.speculation.ngram import Ngram
from torch_hybrid.serving.speculation.smaller_model import SmallerModel

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner

_NAMES = ("ngram", "mtp")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafter and number of drafts of an engine.

    Args:
        drafter: "ngram" looks the last tokens up in the prompt and the output. "mtp" asks the
            model's own head, of ``from_pretrained(path, mtp=True)``. Another runner, of a smaller
            model of the same vocabulary, drafts greedily. Any object with the methods of
            ``Drafter`` will do, too.
        num_drafts: the most drafts of a request in one step, up to the runner's ``max_drafts``.
        adapts: try fewer drafts, down to none, where measured acceptance and step times say that
            more do not pay. The cost of finding out is bounded (see ``pace``). False tries all
            proposed drafts.

    Raises:
        TypeError: a value is of another kind.
        ValueError: a value is out of its range.
    """

    drafter: Literal["ngram", "mtp"] | Runner | Drafter = "ngram"
    num_drafts: int = 4
    adapts: bool = True

    def __post_init__(self) -> None:
        check_int("num_drafts", self.num_drafts)
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts must be at least 1, got {self.num_drafts}")
        if isinstance(self.drafter, str):
            if self.drafter not in _NAMES:
                raise ValueError(f"{_EXPECTED}, got {self.drafter!r}")
        elif not isinstance(self.drafter, Drafter) and not _is_runner(self.drafter):
            raise TypeError(f"{_EXPECTED}, got {self.drafter!r}")

    def make_drafter(self, runner: Runner) -> Drafter:
        """Make the drafter of one engine.

        Raises:
            ValueError: the drafter does not fit ``runner`` or its model.
        """
        match self.drafter:
            case "ngram":
                return Ngram()
            case "mtp":
                return Head(runner)
            case Drafter() as drafter:
                return drafter
            case other:
                return SmallerModel(other, runner)


_EXPECTED = f"drafter must be one of {_NAMES}, a Runner or a Drafter"


def _is_runner(drafter: object) -> bool:
    from torch_hybrid.graphs.runner import Runner  # deferred: only this check needs it

    return isinstance(drafter, Runner)
