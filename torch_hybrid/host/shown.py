"""A short form of runners, engines and counts: one line, or a table in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


class Shown:
    """A mixin that makes ``__repr__`` and ``_repr_html_`` of an object's facts."""

    __slots__ = ()

    def facts(self) -> Mapping[str, str]:
        """Collect the facts to show, by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}: {text}" for name, text in self.facts().items())
        return f"<{type(self).__name__} {facts}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in self.facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"
