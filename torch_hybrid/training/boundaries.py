"""Boundaries of packed sequences, in all the ways that callers of transformers state them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.packing import Packing, after_first, check_form

# Arguments that say no more than boundaries; layers need not see them.
STATED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def packing_of(inputs: Mapping[str, Any]) -> Packing:
    """Make the packing of a model's inputs, without a read on the host inside a graph.

    A token begins a sequence where any of ``position_ids``, ``seq_idx``, ``cu_seq_lens_q``,
    ``cu_seq_lens_k`` and ``attention_mask`` says so. Padding is a sequence too, which no other
    token sees.

    Raises:
        ValueError: there are no tokens; a mask has holes, or is none of tokens; it disagrees with
            ``seq_idx``, or offsets of queries with those of keys; a packing or offsets are of
            another number of tokens; or anything is on another device. In a graph or on a GPU:
            RuntimeError, of those that depend on values.
    """
    x = inputs.get("input_ids")
    x = inputs.get("inputs_embeds") if x is None else x
    if x is None or x.ndim < 2:
        came = "neither" if x is None else f"shape {list(x.shape)}"
        raise ValueError(f"input_ids [B, T] or inputs_embeds [B, T, D] must be given, got {came}")
    num_rows, num_tokens = x.shape[:2]
    if not num_rows * num_tokens:
        raise ValueError(f"the inputs must have a token or more, got shape {list(x.shape)}")
    packing: Packing | None = inputs.get("packing")
    if packing is not None:
        if not isinstance(packing, Packing):
            raise ValueError(f"packing must be a th.Packing, got {type(packing).__name__}")
        if packing.num_tokens != num_rows * num_tokens:
            raise ValueError(
                f"packing must be of the {num_rows * num_tokens} tokens of the inputs, "
                f"got one of {packing.num_tokens}"
            )
        _check_device("packing", packing.cu_seqlens.device, x.device)
        return packing
    row = torch.arange(num_tokens, dtype=torch.int64, device=x.device).expand(num_rows, num_tokens)
    return Packing.from_starts(_starts(inputs, row))


def _starts(inputs: Mapping[str, Any], row: Tensor) -> Tensor:
    """Mark the tokens [B, T] that begin a sequence."""
    starts = row == 0
    position, seq_idx = text_positions(inputs), inputs.get("seq_idx")
    mask = inputs.get("attention_mask")
    if position is not None:
        _check_rows("position_ids", position, row)
        starts = starts | after_first(position.diff() != 1, position)
    if seq_idx is not None:
        _check_rows("seq_idx", seq_idx, row)
        starts = starts | _changes(seq_idx)
    if mask is not None:
        starts = starts | _of_mask(mask, seq_idx, row)
    given = (inputs.get("cu_seq_lens_q"), inputs.get("cu_seq_lens_k"))
    q, k = (
        None if offsets is None else _of_offsets(f"cu_seq_lens_{side}", offsets, starts)
        for side, offsets in zip("qk", given, strict=True)
    )
    if q is not None and k is not None:
        _require((q == k).all(), "cu_seq_lens_q and cu_seq_lens_k must be the same offsets")
    for marks in (q, k):
        starts = starts if marks is None else starts | marks
    return starts


def text_positions(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return ``position_ids`` of texts, or None if there are none."""
    position: Tensor | None = inputs.get("position_ids")
    if isinstance(position, Tensor) and position.ndim == 3:
        # Axes of images and videos say nothing of boundaries; the first of four is the text's.
        return position[0] if len(position) == 4 else None
    return position


def check_positions_go_on(inputs: Mapping[str, Any]) -> None:
    """Raise ValueError, or fail as ``packing_of`` does, if positions restart within a row.

    Those of padding are any. Where a mask says for each pair of tokens who sees whom, they may.
    """
    position, mask = text_positions(inputs), inputs.get("attention_mask")
    if position is None or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        return
    check_form("position_ids", position, (2,))
    restarts = position.diff() != 1
    if mask is not None:  # of earlier tokens too
        is_token = mask[:, mask.shape[1] - position.shape[1] :] != 0
        restarts = restarts & is_token[:, 1:] & is_token[:, :-1]
    _require(
        ~restarts.any(),
        "a call with a cache keeps no packed sequences apart, got position_ids that restart: "
        "leave use_cache and past_key_values out",
    )


def _check_device(name: str, given: torch.device, expected: torch.device) -> None:
    if given != expected:
        how = "; `to` moves it" if name == "packing" else ""
        raise ValueError(f"{name} must be on {expected}, got {given}{how}")


def _check_rows(name: str, given: Tensor, row: Tensor) -> None:
    """Raise ValueError unless a tensor has an integer for each token, or for each of one row."""
    check_form(name, given, (2,))
    _check_device(name, given.device, row.device)
    if given.shape[1] != row.shape[1] or given.shape[0] not in (1, row.shape[0]):
        raise ValueError(f"{name} must have shape {list(row.shape)}, got {list(given.shape)}")


def _of_mask(mask: Any, seq_idx: Tensor | None, row: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.shape != row.shape:
        came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have shape {tuple(row.shape)}, got {came}")
    _check_device("attention_mask", mask.device, row.device)
    is_token = mask != 0
    changes = _changes(is_token)
    rises = (changes & is_token).sum(-1)
    _require((rises <= 1).all(), "attention_mask must have no holes between tokens of a row")
    if seq_idx is not None:
        agrees = ~(changes & ~_changes(seq_idx)).any()
        _require(agrees, "attention_mask must change only where seq_idx does")
    return changes


def _of_offsets(name: str, offsets: Tensor, starts: Tensor) -> Tensor:
    check_form(name, offsets, (1,))
    _check_device(name, offsets.device, starts.device)
    if not offsets.shape[0]:
        raise ValueError(f"{name} must have shape [N + 1], got [0]")
    end = starts.numel()
    # A diff of two offsets has a size of 1, for which a graph is compiled anew.
    rises = (offsets == offsets.cummax(0).values).all()
    fits = (offsets[0] == 0) & (offsets[-1] == end) & rises
    _require(fits, f"{name} must rise from 0 to the number of tokens", offsets)
    marks = torch.zeros(end + 1, dtype=torch.bool, device=starts.device)
    return marks.index_fill(0, offsets.long(), True)[:end].view(starts.shape)


def _changes(x: Tensor) -> Tensor:
    """Mark values that differ from the one before, and the first of each row."""
    return after_first(x.diff() != 0, x)


def _require(holds: Tensor, message: str, came: Tensor | None = None) -> None:
    """Raise ValueError at once on a CPU; elsewhere leave an assertion to the device.

    A number of tokens in ``message`` would make a graph for that number alone.
    """
    if torch.compiler.is_compiling() or holds.device.type != "cpu":
        torch._assert_async(holds, message)
    elif not holds:
        raise ValueError(message if came is None else f"{message}, got {came.tolist()}")


def named(
    module: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any], *, last: str
) -> dict[str, Any]:
    """Name positional arguments as the forward of a module of transformers does."""
    names = ["input_ids"]
    if len(args) > 1:
        names = [*inspect.signature(type(module).forward).parameters][1:]
        names = names[: names.index(last) + 1]
    if len(args) > len(names):
        raise TypeError(f"arguments after {last} must be named, got {len(args)} positional ones")
    return {**dict(zip(names, args, strict=False)), **options}
