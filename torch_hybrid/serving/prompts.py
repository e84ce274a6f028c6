"""Conversion of prompts (texts, tokens in many shapes, conversations) into token ids.

``as_prompts`` tells one prompt from several, ``prompt_tokens`` makes the tokens of one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from operator import index as index_of
from typing import Any, Protocol, SupportsIndex, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from torch_hybrid.serving.detokenizer import Tokenizer, num_alike
from torch_hybrid.serving.messages import (
    Message,
    check_unicode,
    check_written,
    has_unusual_role,
    joined,
    read_messages,
    shows_more,
)

EXPECTED = (
    "a text, a list of token ids, a 1-D tensor or array of integers, a conversation (a list of "
    'dicts with "role" and "content"), or what a tokenizer returns for one of these'
)
_OF_IMAGES = ("pixel_values", "pixel_values_videos")
# Entries of a tokenizer's or processor's result that add nothing to the token ids.
_OF_TOKENS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "special_tokens_mask",
        "offset_mapping",
        "assistant_masks",
        "length",
    }
)
_PROBE = "probe"  # a text that a template either writes or does not


@runtime_checkable
class Array(Protocol):
    """Common interface of torch tensors and numpy arrays."""

    @property
    def ndim(self) -> int: ...

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    def tolist(self) -> Any: ...


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that can write a conversation, as those of transformers can."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...


class Processor(Protocol):
    """A processor that makes tokens and pixels of a conversation, as those of transformers do."""

    tokenizer: Any
    chat_template: Any

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...


Prompt = str | Sequence[int] | Array | Sequence[Message] | Mapping[str, Any]


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """List the prompts in the argument of ``generate``: one alone, or several.

    One prompt is a text, a list of tokens, a 1-D tensor or array, or one conversation. Several are
    a list of those, a 2-D tensor or array (a prompt in each row), or what a tokenizer returns for
    several. Padding is left out, by the ``attention_mask``.

    Raises:
        TypeError: it is neither, or a list that mixes tokens with prompts.
        ValueError: a tensor of another rank, or a mask that does not fit its tokens.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [prompts] if _beside_tokens(prompts) else list(_encoded_rows(prompts))
    if not isinstance(prompts, list) and isinstance(prompts, Array):
        if prompts.ndim not in (1, 2):
            raise ValueError(f"prompts must be a 1-D or 2-D array, got {_shown(prompts)}")
        return prompts.tolist() if prompts.ndim == 2 else [prompts]
    if isinstance(prompts, bytes | set | frozenset) or not isinstance(prompts, Iterable):
        raise TypeError(f"a prompt must be {EXPECTED}; got {_shown(prompts)}")
    items: list[Any] = list(prompts)
    parts = {_is_part(item) for item in items}
    if len(parts) == 2:
        raise TypeError(
            f"prompts must be one prompt or a list of prompts, got a mix of both: {_shown(items)}"
        )
    return [items] if True in parts else items


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Convert one prompt into token ids.

    Args:
        prompt: a text, a list of token ids, a 1-D tensor or array of integers, a conversation, or a
            dict with ``input_ids`` of one row. The chat template is applied to the messages of a
            conversation; a last message of the assistant is continued.
        tokenizer: for texts and conversations.

    Raises:
        TypeError: the prompt, or one of its tokens, is of another kind.
        ValueError: the tokenizer that it needs is missing or has no chat template, the template
            refuses the conversation, or an array is not 1-D.
    """
    if isinstance(prompt, str):
        return _encode(prompt, tokenizer)
    if isinstance(prompt, Mapping):
        rows = _encoded_rows(prompt)
        if len(rows) != 1:
            raise ValueError(f"a prompt must have one row of input_ids, got {len(rows)} rows")
        return _token_list(rows[0])
    if not isinstance(prompt, list) and isinstance(prompt, Array):
        if prompt.ndim != 1:
            raise ValueError(f"a prompt must be a 1-D array, got {_shown(prompt)}")
        return _token_list(prompt.tolist())
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt must be {EXPECTED}; got {_shown(prompt)}")
    if is_conversation(prompt):
        return _conversation_tokens(read_messages(prompt, template_of(tokenizer)), tokenizer)
    return _token_list(prompt)


def template_of(tokenizer: object) -> object:
    """Return the chat template of a tokenizer; None for those that have none."""
    return tokenizer.chat_template if isinstance(tokenizer, ChatTokenizer) else None


def is_conversation(prompt: Prompt) -> TypeGuard[Sequence[Any]]:
    """Tell whether a prompt is a list of messages, by the first of its items."""
    # Lists skip these slow checks: they may have many tokens.
    if not isinstance(prompt, list) and isinstance(prompt, str | bytes | Array):
        return False
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def has_images(prompt: Prompt) -> bool:
    """Tell whether a processor's result has pixels of images or videos beside the tokens."""
    return isinstance(prompt, Mapping) and not set(_OF_IMAGES).isdisjoint(_beside_tokens(prompt))


def with_images(
    encoded: Mapping[str, Any], input_names: Sequence[str]
) -> tuple[list[int], dict[str, Tensor]]:
    """Split a processor's result for one prompt into tokens and tower inputs.

    Args:
        encoded: tensors by name.
        input_names: names of the tower's inputs.

    Raises:
        TypeError: tokens are no integers.
        ValueError: there are several prompts, or an input is not numeric or unknown to the tower.
    """
    beside = _beside_tokens(encoded)
    rows = _encoded_rows({name: x for name, x in encoded.items() if name not in beside})
    if len(rows) != 1:
        raise ValueError(f"images belong to one prompt, got {len(rows)} rows of input_ids")
    if unknown := [name for name in beside if name not in input_names]:
        raise ValueError(f"the model's tower takes {[*input_names]}, got {unknown}")
    return _token_list(rows[0]), {name: _as_tensor(name, encoded[name]) for name in beside}


def process(messages: list[Message], processor: Processor) -> Mapping[str, Any]:
    """Encode checked messages with a processor.

    The last message is to be answered or, if it is the assistant's, continued.

    Raises:
        ValueError: the processor refuses the messages, or leaves one out.
    """
    if has_unusual_role(messages):
        check_written(messages, _templated(messages, processor))
    encoded = _templated(messages, processor, tokenize=True)
    assert isinstance(encoded, Mapping)
    if any(shows_more(message) for message in messages) and not has_images(encoded):
        raise ValueError("the processor made no pixels of the images in the conversation")
    return encoded


def processed_message_tokens(
    messages: list[Message], tokens: list[int], processor: Processor
) -> int | None:
    """Count the tokens of a conversation up to the end of its last message.

    This is ``message_tokens`` for a conversation that a processor encoded.
    """
    if messages[-1]["role"] == "assistant":
        return None
    asked, alone = (_templated(messages, processor, asks=asks) for asks in (True, False))
    if not asked.startswith(alone):
        return None
    rest = processor.tokenizer(asked[len(alone) :], add_special_tokens=False)["input_ids"]
    length = len(tokens) - len(rest)
    return length if 0 < length < len(tokens) and tokens[length:] == rest else None


def _templated(
    messages: list[Message], processor: Processor, *, asks: bool = True, tokenize: bool = False
) -> Any:
    """Apply the processor's chat template: a text, or tokens and pixels."""
    is_continued = messages[-1]["role"] == "assistant"
    options = {"return_dict": True, "return_tensors": "pt"} if tokenize else {}
    try:
        return processor.apply_chat_template(
            [dict(message) for message in messages],  # it writes into them
            add_generation_prompt=asks and not is_continued,
            continue_final_message=is_continued,
            tokenize=tokenize,
            **options,
        )
    except Exception as error:  # from its template, its files, or a download
        raise ValueError(f"the processor refuses the conversation: {error}") from error


def _as_tensor(name: str, value: Any) -> Tensor:
    import numpy as np

    try:
        given = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
        return given.cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} of a prompt must be numbers, got {_shown(value)}") from error


def message_tokens(prompt: Prompt, tokens: list[int], tokenizer: Tokenizer | None) -> int | None:
    """Count the tokens of a conversation up to the end of its last message.

    The generation prompt follows, and may be written differently once the answer is there.

    Args:
        prompt: the argument of ``prompt_tokens``.
        tokens: its result.
        tokenizer: the tokenizer that it took.

    Returns:
        None if the prompt is no conversation, or nothing follows its last message.
    """
    if not is_conversation(prompt):
        return None
    messages = read_messages(prompt, template_of(tokenizer))
    if messages[-1]["role"] == "assistant":
        return None
    alone = _conversation_tokens(messages, tokenizer, asks=False)
    length = num_alike(alone, tokens)
    return length if 0 < length < len(tokens) else None


def _is_part(item: object) -> bool:
    """Tell whether an item of a list is a token or message, and not a prompt itself."""
    if type(item) is int:  # fast path: the checks below take a hundred times longer
        return True
    if isinstance(item, list):
        return False
    if isinstance(item, Mapping):
        return "input_ids" not in item
    if isinstance(item, Array):
        return item.ndim == 0
    return not isinstance(item, str | bytes | Iterable)


def _token_list(values: Sequence[Any]) -> list[int]:
    if set(map(type, values)) == {int}:
        return list(values)
    return [value if type(value) is int else _token(value, at) for at, value in enumerate(values)]


def _token(value: object, at: int) -> int:
    """Convert a token that is no plain int: an integer scalar of torch or numpy."""
    plain = value.tolist() if isinstance(value, Array) and value.ndim == 0 else value
    if isinstance(plain, bool | Array) or not isinstance(plain, SupportsIndex):
        raise TypeError(f"a token must be an int, got {_shown(value)} at place {at} of the prompt")
    return index_of(plain)


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise ValueError("a prompt must be tokens when the engine has no tokenizer, got a text")
    check_unicode(text)
    return list(tokenizer.encode(text))


def _conversation_tokens(
    messages: list[Message], tokenizer: Tokenizer | None, *, asks: bool = True
) -> list[int]:
    """Encode messages and, if it ``asks``, the generation prompt after the last one."""
    from jinja2 import TemplateError

    if not isinstance(tokenizer, ChatTokenizer):
        has = "the engine has none" if tokenizer is None else f"got {type(tokenizer).__name__}"
        raise ValueError(f"a conversation needs a tokenizer with a chat template, {has}")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give the prompt as a text")
    is_continued = messages[-1]["role"] == "assistant"
    options = {
        "add_generation_prompt": asks and not is_continued,
        "continue_final_message": is_continued,
    }
    try:
        if _writes_texts(messages, tokenizer):
            messages = joined(messages)
        if has_unusual_role(messages):
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            check_written(messages, text)
        tokens = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, **options
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
    return _token_list(tokens)


def _writes_texts(messages: Sequence[Message], tokenizer: ChatTokenizer) -> bool:
    """Tell whether the template needs texts in place of lists of parts.

    Most templates write a list as Python or JSON would. Those that take lists alone, such as
    MiniMax's, write nothing of a text.
    """
    from jinja2 import TemplateError

    if all(isinstance(message.get("content", ""), str) for message in messages):
        return False
    probe: list[Message] = [{"role": "user", "content": _PROBE}]
    try:
        return _PROBE in tokenizer.apply_chat_template(probe, tokenize=False)
    except (TemplateError, TypeError):
        return False


def _encoded_rows(encoded: Mapping[str, Any]) -> list[Sequence[Any]]:
    """Read the token rows of a tokenizer's result, without its padding."""
    if "input_ids" not in encoded:
        hint = "; a message belongs in a list" if "role" in encoded else ""
        raise TypeError(
            f'a dict as a prompt must have "input_ids", got {sorted(map(str, encoded))}{hint}'
        )
    if beside := _beside_tokens(encoded):
        raise ValueError(f"a prompt must be of tokens alone, got {beside} beside input_ids")
    rows = _rows(encoded["input_ids"], "input_ids")
    segments = encoded.get("token_type_ids")
    if segments is not None and any(any(row) for row in _rows(segments, "token_type_ids")):
        raise ValueError("token_type_ids must be 0: no model here tells segments apart")
    mask = encoded.get("attention_mask")
    if mask is None:
        return rows
    masks = _rows(mask, "attention_mask")
    lengths, expected = [len(row) for row in masks], [len(row) for row in rows]
    if lengths != expected:
        raise ValueError(
            f"attention_mask must have rows of {expected} entries as input_ids, got {lengths}"
        )
    return [row[_kept(keep)] for row, keep in zip(rows, masks, strict=True)]


def _beside_tokens(encoded: Mapping[str, Any]) -> list[str]:
    """Name the entries of a result that are neither tokens nor redundant with them."""
    return sorted(name for name in encoded if name not in _OF_TOKENS and encoded[name] is not None)


def _kept(mask: Sequence[Any]) -> slice:
    """Find the span of a row's tokens between its padding."""
    kept = [place for place, value in enumerate(mask) if value == 1]
    num_padding = sum(value == 0 for value in mask)
    if not kept and num_padding == len(mask):
        return slice(0)
    if len(kept) + num_padding < len(mask) or kept[-1] - kept[0] >= len(kept):
        raise ValueError(
            f"attention_mask must be 1, and 0 at the ends of a row alone, got {reprlib.repr(mask)}"
        )
    return slice(kept[0], kept[-1] + 1)


def _rows(values: Any, name: str) -> list[Sequence[Any]]:
    """List the rows of a 2-D array, a list of lists or arrays, or one row alone."""
    if isinstance(values, Array):
        if values.ndim not in (1, 2):
            raise ValueError(f"{name} must be a 1-D or 2-D array, got {_shown(values)}")
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{name} must be a list or an array of integers, got {_shown(values)}")
    listed = [item.tolist() if isinstance(item, Array) else item for item in values]
    nested = [isinstance(item, Sequence) for item in listed]
    if any(nested) and not all(nested):
        raise TypeError(f"{name} must be one row or a list of rows, got {_shown(values)}")
    return listed if any(nested) else [listed]


def _shown(value: object) -> str:
    """Describe a value in an error message: its type, and as much of it as fits a line."""
    kind = type(value).__name__
    if isinstance(value, Array) and value.ndim:
        return f"{kind} of shape {list(value.shape)} and {value.dtype}"
    return f"{reprlib.repr(value)} ({kind})"
