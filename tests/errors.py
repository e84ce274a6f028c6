"""What a call that fails says, for tests that pin it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def error_text(
    error: type[Exception], call: Callable[..., object], /, *args: Any, **options: Any
) -> str:
    """Return the text of what a call raises."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)
