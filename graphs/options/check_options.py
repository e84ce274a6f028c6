"""Checks of ``Runner``'s options, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from inspect import getattr_static
from typing import Any, Literal

import torch

from torch_hybrid.backends.select import Backends
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.stepping.model_choices import modules_of
from torch_hybrid.host.ints import is_int
from torch_hybrid.layers.expert_parallel import TokensOfRank
from torch_hybrid.ops.formats import fp8_kv
from torch_hybrid.specs import KEPT_HIDDEN, AttentionSpec, LatentSpec, LayerTable

KvDtype = Literal["auto", "fp8"]
KvTokens = int | Literal["auto"]


def check_types(model: Any, backends: Any, passes: Any) -> None:
    """Raise TypeError unless the model is adapted, and backends and passes are such or None."""
    own = getattr_static(model, "table", None)  # a compiled model shows the one that it wraps
    if not isinstance(own, LayerTable):
        raise TypeError(
            f"model must come from th.from_pretrained or th.adapt, got {type(model).__name__}"
        )
    if backends is not None and not isinstance(backends, Backends):
        raise TypeError(f"backends must be a th.Backends or None, got {backends!r}")
    is_list = isinstance(passes, Sequence) and all(isinstance(each, Pass) for each in passes)
    if passes is not None and not is_list:
        raise TypeError(
            f"passes must be a list of torch_hybrid.graphs.passes.Pass or None, got {passes!r}"
        )


def check_artefact(artefact: str | os.PathLike[str] | None, *, compiles: bool) -> None:
    """Raise ValueError for an artefact of a runner that does not compile."""
    if artefact is not None and not compiles:
        raise ValueError("an artefact has compiled steps, got compile=False")


def runs_one_mode(device: torch.device) -> bool:
    """Tell whether a batch-invariant runner with drafts runs all steps in one mode.

    It does on a GPU: no op that verifies drafts there gives each row the bits of a decode step.
    """
    return device.type == "cuda"


def check_invariant(
    model: Any, compile: bool | str, two_batch_overlap: object, max_drafts: int
) -> None:
    """Check the options beside batch_invariant=True.

    Raises:
        ValueError: ``compile`` is "background": bits would change when a compiled step takes over.
        UnsupportedError: experts are whole on their ranks ("all_to_all"). The order in which a
            token's experts and its shared expert are summed then depends on its place in the batch.
            Or all steps verify drafts, which are never cut, and ``two_batch_overlap`` asks for
            halves.
    """
    if compile == "background":
        raise ValueError(
            "batch_invariant=True needs compile=True or False, got 'background': bits would change "
            "as compiled steps take the place of others"
        )
    if any(isinstance(module, TokensOfRank) for module in modules_of(model)):
        raise UnsupportedError(
            "batch_invariant=True is not to be had with experts='all_to_all': the order in which a "
            "token's experts and a shared one are added up goes by its place in the batch"
        )
    if runs_one_mode(model.device) and max_drafts and two_batch_overlap != "off":
        raise UnsupportedError(
            "batch_invariant=True with max_drafts verifies drafts in all steps on a GPU, and such "
            f"are never cut in halves: two_batch_overlap must be 'off', got {two_batch_overlap!r}"
        )


def check_max_tokens(max_tokens: int, chunk_size: int) -> None:
    """Raise ValueError unless a step holds a chunk of the layers that prefill in chunks."""
    if max_tokens < chunk_size:
        what = f"hold at least one chunk of {chunk_size} tokens"
        raise ValueError(
            f"max_tokens must {what if chunk_size > 1 else 'be at least 1'}, got {max_tokens}"
        )


def check_max_drafts(max_drafts: int, max_tokens: int) -> None:
    """Raise ValueError unless a step holds a token of a sequence and all of its drafts."""
    if max_drafts and not 0 <= max_drafts < max_tokens:
        raise ValueError(
            f"max_drafts must be within 0 and {max_tokens - 1}, one less than max_tokens, "
            f"got {max_drafts}"
        )


def check_head_drafts(max_drafts: int) -> None:
    """Raise ValueError if a draft head cannot make that many drafts.

    The pool must hold the hidden states of the drafts and of the two tokens before them.
    """
    if max_drafts > KEPT_HIDDEN - 2:
        raise ValueError(
            f"max_drafts must be at most {KEPT_HIDDEN - 2} for a model with a head, got "
            f"{max_drafts}"
        )


def check_kv_tokens(kv_tokens: KvTokens) -> None:
    """Raise ValueError unless ``kv_tokens`` is a number or "auto"."""
    if kv_tokens != "auto" and not is_int(kv_tokens):
        raise ValueError(f"kv_tokens must be an integer or 'auto', got {kv_tokens!r}")


def kept_table(table: LayerTable, kv_dtype: KvDtype) -> LayerTable:
    """Make the layer table with keys, values and latents in FP8 if ``kv_dtype`` is "fp8".

    Raises:
        UnsupportedError: no layer can keep them so.
    """
    kept = table.keeping(fp8_kv.DTYPE if kv_dtype == "fp8" else None)
    if kv_dtype == "fp8" and kept == table:
        raise UnsupportedError(
            f"kv_dtype='fp8' needs {AttentionSpec.kind} or {LatentSpec.kind}, got layers of "
            f"{', '.join(table.kinds)}"
        )
    return kept
