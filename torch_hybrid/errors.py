"""The errors of the public boundary.

A caller's own mistake (a wrong shape, an unknown token) is a plain ``ValueError``.
"""


class UnsupportedError(NotImplementedError):
    """A request that no implementation can serve; the message lists each candidate's reasons."""


class CapacityError(RuntimeError):
    """A pool is full; the message says what was asked, what is free and what raises the limit."""
