"""Docstrings of ops say what their bases do not."""

from __future__ import annotations

from torch_hybrid.ops.core.docs import complete_doc


class Base:
    """Base.

    Args:
        state: [S, D] pool.
        impl: a name,
            by the base.

    Raises:
        ValueError: something is wrong.
    """


class Op(Base):
    """Op of rows.

    Args:
        x: [T, D] rows.
        state: [S, D] pool, mutated.

    Returns:
        [T, D] rows.

    From a paper.
    """


class Bare(Base):
    """Op without Args."""


def test_a_docstring_has_what_its_base_says_of_other_arguments():
    assert complete_doc(Op, ["x", "state", "impl", "other"]) == (
        "Op of rows.\n\nArgs:\n    x: [T, D] rows.\n    state: [S, D] pool, mutated.\n"
        "    impl: a name,\n        by the base.\n\nReturns:\n    [T, D] rows.\n\n"
        "Raises:\n    ValueError: something is wrong.\n\nFrom a paper.\n"
    )
    assert complete_doc(Bare, ["impl"]) == "Op without Args."
