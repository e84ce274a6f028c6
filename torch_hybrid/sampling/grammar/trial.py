"""Trial of a grammar in a process of its own, which can be ended: ``python trial.py <source``.

Intersections of counted repeats can compile for hours, and no limit of llguidance ends that. This
file imports nothing of this package, so that the process starts in a moment.
"""

import sys


def main() -> None:
    """Compile the grammar on the standard input, for a vocabulary of bytes."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(precompute_large_lexemes=False)
    LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=limits)


if __name__ == "__main__":
    main()
