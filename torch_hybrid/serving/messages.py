"""Messages of a conversation, read whole: what a model is not shown is refused by name.

A chat template leaves out in silence what it does not know, and some write a placeholder for an
image that nobody looks at. So each key of a message and each part of it is understood, or an error.
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
# Keys of which a part of a kind has one, as processors of transformers take them.
_SOURCES = {"image": ("image", "url", "path", "base64"), "video": ("video", "url", "path")}
# Keys of a message that a template may leave out: they say nothing of its content, or are thoughts,
# of which templates leave out the earlier ones.
_ABOUT = ("name", "tool_call_id")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Keys that no template makes understood.
_MEDIA = frozenset(
    f"{kind}{end}"
    for kind in ("image", "video", "audio", "file", "input_image", "input_audio", "input_file")
    for end in ("", "s", "_url", "_urls")
)
# Roles that templates know. One that they do not know they may leave out.
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Kinds of what messages may show beside texts.

    Attributes:
        kinds: of "image" and "video".
        otherwise: why a message may show no others.
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
    """Check messages, and write their parts as processors of transformers take them.

    Args:
        conversation: messages, each with "role" and "content"; None says nothing.
        template: the chat template: keys are understood that it names.
        sight: what parts may show.

    Returns:
        The messages without what says nothing. Parts are of the types "text", "image" and "video".

    Raises:
        TypeError: a message is no dict, or its content no text and no list of parts.
        ValueError: something in a message is not understood, or no valid Unicode.
    """
    return [_message(message, at, template, sight) for at, message in enumerate(conversation)]


def check_unicode(text: str) -> None:
    """Raise ValueError for surrogates, as an argument of bytes that are no UTF-8 has them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text must be valid Unicode, got {_shown(text)}: {error}") from error


def joined(messages: Sequence[Message]) -> list[Message]:
    """Make one text of each content that is a list of texts."""
    return [
        message
        if isinstance(message.get("content", ""), str)
        else {**message, "content": "".join(part["text"] for part in message["content"])}
        for message in messages
    ]


def shows_more(message: Message) -> bool:
    """Tell whether a message that was read shows more than text."""
    content = message.get("content", "")
    return not isinstance(content, str) and any(part["type"] != "text" for part in content)


def has_unusual_role(messages: Sequence[Message]) -> bool:
    """Tell whether a template may leave a message out for its role."""
    return any(message["role"] not in _ROLES for message in messages)


def check_written(messages: Sequence[Message], text: str) -> None:
    """Raise ValueError for a message of an unusual role that is not in the text of a template."""
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
            f'message {at} must have "role" and "content", got {sorted(map(str, message))}'
        )
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
    """Take the value of the one key that a part has beside its type."""
    if len(given) != 1 or not given.keys() <= set(names):
        expected = f"{' or '.join(map(repr, names))} beside its type and nothing else"
        raise ValueError(f"{where} must have {expected}, got {sorted(map(str, given))}")
    (value,) = given.values()
    return value


def _address(given: Mapping[str, Any], where: str) -> str:
    """Take the URL of an image from a part as OpenAI has it."""
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
    """Leave out what says nothing: clients write None and [] for what they leave out."""
    return {
        key: value
        for key, value in fields.items()
        if value is not None and not (isinstance(value, list | tuple | dict) and not value)
    }


def _is_named(key: object, template: object) -> bool:
    """Tell whether a template, or one of several by name, has a word in it."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    word = re.compile(rf"\b{re.escape(str(key))}\b")
    return any(isinstance(text, str) and word.search(text) is not None for text in texts)


def _shown(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
