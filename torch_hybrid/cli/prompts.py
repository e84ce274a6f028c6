"""Prompts of an engine, made from prompts as a user types them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_hybrid.serving.messages import Message
    from torch_hybrid.serving.prompts import Prompt


def read_prompts(
    texts: Sequence[str],
    file: Path | None,
    *,
    ids: bool,
    chat: bool,
    system: str | None,
    images: Sequence[str] = (),
) -> list[Prompt]:
    """Read the prompts of a command.

    A ``file`` has further prompts, one in each line. With images, each prompt is a user's message
    about them.

    Raises:
        ValueError: there are none, they cannot be read, or the options do not go together.
    """
    if ids and chat:
        raise ValueError("--ids and --chat say different things of the prompts: give one")
    if ids and images:
        raise ValueError("--image is for prompts of text, and --ids has token ids: give one")
    chat = chat or bool(images)
    if system is not None and not chat:
        raise ValueError("--system is for --chat")
    texts = [*texts, *(_read_lines(file) if file else [])]
    if not texts:
        raise ValueError("a prompt is needed, or --prompt-file with one in each line")
    if ids:
        return [_parse_ids(text) for text in texts]
    if chat:
        return [[*system_message(system), user_message(text, images)] for text in texts]
    return list(texts)


def user_message(text: str, images: Sequence[str] = ()) -> Message:
    """Make a user's message of a text and of images in these files."""
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def system_message(text: str | None) -> list[Message]:
    """Make the messages before a conversation: a system message, or none."""
    return [] if text is None else [{"role": "system", "content": text}]


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # utf-8-sig drops a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read prompts from {path}: {error}") from error
    # ``splitlines`` would also cut at U+2028 and form feeds, which a prompt may contain.
    return [line for line in text.split("\n") if line.strip()]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"with --ids a prompt is token ids as in '5 17 3', got {text!r}") from None
