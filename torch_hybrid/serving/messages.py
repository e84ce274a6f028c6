"""Validation of a conversation's messages: content that the model would not see is an error.

A chat template silently drops what it does not know, and some write a placeholder for an image that
nobody loads. So each key and each part of a message is understood or refused by name.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

_TEXTS = ("text", "input_text", "output_text")
_IMAGES_OF_OPENAI = ("image_url", "input_image")
# Keys that may hold the source of a part; transformers' processors take exactly one.
_SOURCES = {"image": ("image", "url", "path", "base64"), "video": ("video", "url", "path")}
# Keys that a template may ignore: metadata, and thoughts (templates drop those of earlier turns).
_ABOUT = ("name", "tool_call_id")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Keys that are refused even where the template names them: media must be parts of a content.
_MEDIA = frozenset(
    f"{kind}{end}"
    for kind in ("image", "video", "audio", "file", "input_image", "input_audio", "input_file")
    for end in ("", "s", "_url", "_urls")
)
# Roles that all templates know. They may silently leave out messages of another role.
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Kinds of media that messages may show beside text.

    Attributes:
        kinds: of "image" and "video".
        otherwise: why other media are refused.
    """

    kinds: tuple[str, ...] = ()
    otherwise: str = (
        "the model has no tower: a multimodal checkpoint keeps its own with "
        "th.from_pretrained(path, vision=True)"
    )


NO_SIGHT = Sight()


def read_messages(
    conversation: Sequence[Any], template: object, sight: Sight = NO_SIGHT
) -> list[Message]:
    """Check messages, and rewrite their parts in the form that transformers' processors take.

    Args:
        conversation: messages, each with "role" and "content"; values that are None count as
            absent.
        template: the chat template. Keys that it names are understood.
        sight: media that parts may show.

    Returns:
        The messages without empty values. Parts are of the types "text", "image" and "video".

    Raises:
        TypeError: a message is no dict, or its content is neither a text nor a list of parts.
        ValueError: a message has a key or part that is not understood, or invalid Unicode.
    """
    return [_message(message, at, template, sight) for at, message in enumerate(conversation)]


def check_unicode(text: str) -> None:
    """Raise ValueError for lone surrogates, which Python makes of arguments that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text must be valid Unicode, got {_shown(text)}: {error}") from error


def joined(messages: Sequence[Message]) -> list[Message]:
    """Concatenate the text parts of each message whose content is a list."""
    return [
        message
        if isinstance(message.get("content", ""), str)
        else {**message, "content": "".join(part["text"] for part in message["content"])}
        for message in messages
    ]


def shows_more(message: Message) -> bool:
    """Tell whether a checked message has parts other than text."""
    content = message.get("content", "")
    return not isinstance(content, str) and any(part["type"] != "text" for part in content)


def has_unusual_role(messages: Sequence[Message]) -> bool:
    """Tell whether a message has a role that templates may silently leave out."""
    return any(message["role"] not in _ROLES for message in messages)


def check_written(messages: Sequence[Message], text: str) -> None:
    """Raise ValueError if a message of an unusual role is missing from the template's text."""
    for at, message in enumerate(messages):
        content = message.get("content", "")
        parts = [{"text": content}] if isinstance(content, str) else content
        is_written = all(part.get("text", "").strip() in text for part in parts)
        if message["role"] not in _ROLES and not is_written:
            raise ValueError(
                f"the chat template leaves out message {at}, of the role {message['role']!r}"
            )


def _message(message: object, at: int, template: object, sight: Sight) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"message {at} must be a dict, got {_shown(message)}")
    given = _said(message)
    if "role" not in given or given.keys() <= {"role", *_ABOUT}:
        raise ValueError(
            f'message {at} must have "role" and "content", got {sorted(map(str, given))}'
        )
    if not isinstance(given["role"], str):
        raise TypeError(f"the role of message {at} must be a text, got {_shown(given['role'])}")
    for key in given.keys() - {"role", "content", *_ABOUT, *_THOUGHTS}:
        if key in _MEDIA:
            raise ValueError(f"message {at} has {key!r}: what it shows must be parts of a content")
        if not _is_named(key, template):
            raise ValueError(f"message {at} has {key!r}, which the chat template does not read")
    content = given.get("content", "")
    if isinstance(content, str):
        check_unicode(content)
    elif isinstance(content, list | tuple):
        where = f"of message {at}"
        given["content"] = [
            _part(part, f"part {place} {where}", sight) for place, part in enumerate(content)
        ]
    else:
        expected = f"the content of message {at} must be a text or a list of parts"
        raise TypeError(f"{expected}, got {_shown(content)}")
    return given


def _part(part: object, where: str, sight: Sight) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise TypeError(f'{where} must be a dict with a "type", got {_shown(part)}')
    given = _said(part)
    if "type" not in given and len(given) != 1:
        raise ValueError(f'{where} must have a "type", got {sorted(map(str, part))}')
    (kind,) = given if "type" not in given else (given.pop("type"),)
    if kind in _TEXTS:
        text = _only(given, ("text",), where)
        if not isinstance(text, str):
            raise TypeError(f"the text of {where} must be a text, got {_shown(text)}")
        check_unicode(text)
        return {"type": "text", "text": text}
    shown = "image" if kind in _IMAGES_OF_OPENAI else kind
    if shown not in sight.kinds:
        takes = f"parts may be {' or '.join(('text', *sight.kinds))}"
        reason = sight.otherwise if shown in ("image", "video") else takes
        raise ValueError(f"{where} is of type {kind!r}, and {reason}")
    source = _address(given, where) if kind != shown else _only(given, _SOURCES[shown], where)
    return {"type": shown, shown: source}


def _only(given: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """Take the value of the only key that a part has beside its type."""
    if len(given) != 1 or not given.keys() <= set(names):
        expected = f"{' or '.join(map(repr, names))} beside its type and nothing else"
        raise ValueError(f"{where} must have {expected}, got {sorted(map(str, given))}")
    (value,) = given.values()
    return value


def _address(given: Mapping[str, Any], where: str) -> str:
    """Take the URL of an image from a part in OpenAI's format."""
    outer = dict(given)
    inner = outer.pop("image_url", None)
    fields = outer | _said(inner if isinstance(inner, Mapping) else {"url": inner})
    if fields.pop("detail", "auto") != "auto":
        raise ValueError(f"{where} must have the detail 'auto', got {_shown(given)}")
    url = _only(fields, ("url",), where)
    if not isinstance(url, str):
        raise TypeError(f"the URL of {where} must be a text, got {_shown(url)}")
    return url


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop empty values: clients write None and [] for fields that they do not use."""
    return {
        key: value
        for key, value in fields.items()
        if value is not None and not (isinstance(value, list | tuple | dict) and not value)
    }


def _is_named(key: object, template: object) -> bool:
    """Tell whether a template, or one of several by name, contains a word."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    word = re.compile(rf"\b{re.escape(str(key))}\b")
    return any(isinstance(text, str) and word.search(text) is not None for text in texts)


def _shown(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
