"""The errors of the public boundary.

A caller's own mistake (a wrong shape, an unknown token) is a plain ``ValueError``.
"""


class UnsupportedError(NotImplementedError):
    """Nothing here can serve a request; the message lists every reason of every candidate."""


class CapacityError(RuntimeError):
    """A pool is full; the message says what was asked, what is free and what raises the limit."""
