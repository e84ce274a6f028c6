"""Trial of a grammar in a process of its own, which can be ended.

llguidance bounds its work but for intersections of counted repeats: those may take hours to compile
or to make the first masks of. A crash would end this process alone, too. It runs this file, which
imports nothing of the package and so starts in a moment. It serves all engines, and ends with the
standard input that it reads.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from threading import Lock

MAX_SECONDS = 5.0
_NUM_BYTES = 64  # of a text whose masks are made


class Trial:
    """Process that compiles grammars for a vocabulary of bytes, started by the first of them.

    Attributes:
        is_needed: False where grammars come from a process that has tried them.
    """

    def __init__(self) -> None:
        self.is_needed = True
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def passes(self, source: str) -> bool:
        """Tell whether a grammar, in the form of llguidance, compiles in ``MAX_SECONDS``."""
        if not self.is_needed:
            return True
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(source).encode() + b"\n")
            process.stdin.flush()
            if (
                select.select([process.stdout], [], [], MAX_SECONDS)[0]
                and process.stdout.readline()
            ):
                return True
            process.kill()
            process.communicate()
            return False

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process


TRIAL = Trial()


def serve() -> None:
    """Compile each grammar of the standard input, and follow a text in it; answer with a line."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    vocabulary = LLTokenizer("byte")
    limits = LLParserLimits(precompute_large_lexemes=False)
    for line in sys.stdin:
        matcher = LLMatcher(vocabulary, json.loads(line), log_level=0, limits=limits)
        for _ in range(_NUM_BYTES):
            if matcher.is_stopped():
                break
            matcher.consume_token(_first(matcher.compute_bitmask()))
        print(flush=True)


def _first(mask: bytes) -> int:
    """Find the first token that a mask allows."""
    words = int.from_bytes(mask, "little")
    return (words & -words).bit_length() - 1


if __name__ == "__main__":
    serve()
