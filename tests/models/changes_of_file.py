"""Changes of file between frames while ``from_pretrained`` loads the demo's checkpoint.

    python -m tests.models.changes_of_file

A call, or the resumption of a generator, changes file where its frame and the nearest frame of ours
below it lie in two files. Frames of torch and transformers are none of ours. Stops are what a
reader sees, who reads each function when it is first called.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

from torch_hybrid.models.load import from_pretrained

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "torch_hybrid" / "demo" / "recall"
OURS = tuple(f"{REPOSITORY / package}/" for package in ("torch_hybrid", "graphs", "ops"))


@dataclass(slots=True)
class Walk:
    """The frames of ours that a thread enters.

    Attributes:
        changes: how many calls went to another file.
        functions: in the order of their first calls.
    """

    changes: int = 0
    functions: dict[CodeType, None] = field(default_factory=dict)
    _files: list[str] = field(default_factory=list)  # of the frames that are running

    def record(self, frame: FrameType, event: str, _value: object) -> None:
        """Follow a call or a return, as ``sys.setprofile`` tells it."""
        file = frame.f_code.co_filename
        if not file.startswith(OURS):
            return
        if event == "call":
            self.changes += bool(self._files) and self._files[-1] != file
            self._files.append(file)
            self.functions[frame.f_code] = None
        elif event == "return" and self._files:
            self._files.pop()

    @property
    def stops(self) -> list[str]:
        """The files that a reader opens, one after the other."""
        files = [code.co_filename for code in self.functions]
        return files[:1] + [after for before, after in pairwise(files) if before != after]


def walk_through_loading() -> Walk:
    """Load the demo's checkpoint twice, and record the second time: the first one imports."""
    walk = Walk()
    from_pretrained(DEMO)
    sys.setprofile(walk.record)
    try:
        from_pretrained(DEMO)
    finally:
        sys.setprofile(None)
    return walk


def main() -> None:
    """Print the counts."""
    walk = walk_through_loading()
    stops = walk.stops
    print(f"{walk.changes} changes of file; {len(stops)} stops in {len({*stops})} files")


if __name__ == "__main__":
    main()
