"""Docstrings and help texts follow the rules of ``tests.language``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.language import docstring_faults, faults


@pytest.mark.parametrize("room", ["torch_hybrid", "graphs", "ops"])
def test_docstrings_follow_the_rules(room: str):
    broken = [
        f"{path.as_posix()}::{name}: {fault}"
        for path in sorted(Path(room).rglob("*.py"))
        for name, fault in faults(path)
    ]
    assert broken == [], "see tests/language.py for the rules"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Of the weights.", "no subject"),
        ("The same of drafts.", "no subject"),
        ("Whether a step is captured.", "no subject"),
        ("The rows of a batch.", "no verb"),
        ("Multiply weights of 8 bits.", "format"),
        ("Cut rows. " + "And so on " * 9 + ".", "27 words"),
    ],
)
def test_each_rule_refuses_what_breaks_it(text: str, fault: str):
    assert any(fault in each for each in docstring_faults(text, is_order=True))


def test_what_follows_the_rules_has_no_fault():
    text = """Cut rows of a batch (FP8 or INT4) into pieces.

    They are equal but for the last: it may be shorter.

        for each row        pseudo-code, which is no sentence: a b c d e f g h i j k
                            l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9

    Args:
        rows: [T, D]; ``a long expression + another + a third`` counts as one word.
    """
    assert list(docstring_faults(text, is_order=True)) == []
