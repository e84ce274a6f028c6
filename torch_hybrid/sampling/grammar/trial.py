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
_TOO_LONG = "it takes too long, as patterns do that must all hold"
_NO_END = "it has a place where nothing can follow, or recurses without end"


class Trial:
    """Process that compiles grammars for a vocabulary of bytes, started by the first of them.

    Attributes:
        is_needed: False where grammars come from a process that has tried them.
    """

    def __init__(self) -> None:
        self.is_needed = True
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def fault(self, source: str) -> str | None:
        """Tell what is wrong with a grammar, in the form of llguidance; None if nothing is.

        A grammar that does not compile at all is left to who compiles it.
        """
        if not self.is_needed:
            return None
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(source).encode() + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], MAX_SECONDS)[0] and (
                line := process.stdout.readline()
            ):
                told: str = json.loads(line)
                return told or None
            process.kill()
            process.communicate()
            return _TOO_LONG

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
    """Compile each grammar of the standard input, and follow a text in it; answer with a fault."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    vocabulary = LLTokenizer("byte")
    limits = LLParserLimits(precompute_large_lexemes=False)
    for line in sys.stdin:
        matcher, fault = LLMatcher(vocabulary, json.loads(line), log_level=0, limits=limits), ""
        compiles = not matcher.is_error()
        for _ in range(_NUM_BYTES):
            if matcher.is_stopped():
                break
            matcher.consume_token(_first(matcher.compute_bitmask()))
        if compiles and matcher.is_error():
            error = matcher.get_error().partition("\n")[0]
            is_long = error.startswith("lexer error")
            fault = f"{_TOO_LONG if is_long else _NO_END} ({error})"
        print(json.dumps(fault), flush=True)


def _first(mask: bytes) -> int:
    """Find the first token that a mask allows."""
    words = int.from_bytes(mask, "little")
    return (words & -words).bit_length() - 1


if __name__ == "__main__":
    serve()
