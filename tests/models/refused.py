"""Configs that are refused: each error in a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import torch_hybrid as th
from tests.tiny_models import make_model


def refusals(folder: Path, family: str, refused: Iterable[Mapping[str, Any]]) -> str:
    """Load a family's config with each of these fields; no weight is looked for: there are none."""
    config, errors = make_model(family).config.to_dict(), []
    for fields in refused:
        (folder / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(th.UnsupportedError) as caught:
            th.from_pretrained(folder)
        errors.append(str(caught.value))
    return "\n".join(errors)
