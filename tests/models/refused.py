"""Configs that are refused: each error in a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch_hybrid as th
from tests.errors import error_text
from tests.tiny_models import make_model


def refusals(folder: Path, family: str, refused: Iterable[Mapping[str, Any]]) -> str:
    """Load a family's config with each of these fields; no weight is looked for: there are none."""
    config, errors = make_model(family).config.to_dict(), []
    for fields in refused:
        (folder / "config.json").write_text(json.dumps(config | fields))
        errors.append(error_text(th.UnsupportedError, th.from_pretrained, folder))
    return "\n".join(errors)
