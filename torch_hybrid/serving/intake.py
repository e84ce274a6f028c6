"""Intake of prompts: makes requests, and refuses what cannot be served before it is queued."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.caches.adapter import check_loaded
from torch_hybrid.host.ints import int_tensor, packed_ints, plain_ints
from torch_hybrid.sampling import LogitsRules, RandomNumbers, Sampling
from torch_hybrid.sampling.grammar import Compiler, Matcher
from torch_hybrid.serving.detokenizer import Detokenizer, Tokenizer
from torch_hybrid.serving.images import Images
from torch_hybrid.serving.messages import NO_SIGHT, Sight, read_messages
from torch_hybrid.serving.prompts import (
    Processor,
    Prompt,
    has_images,
    is_conversation,
    message_tokens,
    process,
    processed_message_tokens,
    prompt_tokens,
    template_of,
    with_images,
)
from torch_hybrid.serving.request import Request

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner
    from torch_hybrid.models.tower import Tower


@dataclass(eq=False)
class Intake:
    """Factory of an engine's requests."""

    runner: Runner  # the runner that serves them
    tokenizer: Tokenizer | None  # encodes and decodes texts; None serves tokens alone
    eos_token_ids: frozenset[int]  # tokens that end every request which does not ignore them
    # encodes conversations, with images or without; None serves texts alone
    processor: Processor | None = None
    finds_messages: bool = False  # find where the last message of a conversation ends

    def __post_init__(self) -> None:
        self._tower: Tower | None = None
        if self.runner.takes_embeds:
            self._tower = getattr(self.runner.model, "vision", None)
        self._sight = _sight(self._tower, self.processor)
        self._vocab_size, self._max_seq_len = self.runner.vocab_size, self.runner.max_seq_len
        self._grammars: Compiler | None = None  # made by the first grammar

    def requests(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        index: int,
        stream: bool,
        adapter: str | None = None,
    ) -> list[Request]:
        """Make a request for each of the ``sampling.n`` outputs of a prompt.

        Args:
            prompt: text, tokens or a conversation.
            sampling: how tokens are chosen and when a request ends.
            index: index of the prompt in its call.
            stream: whether events carry text.
            adapter: name of the adapter; None: the base.

        Raises:
            TypeError: the prompt or ``sampling`` is of another kind.
            ValueError: the prompt cannot be served; see ``Engine.submit``.
            UnsupportedError: grammars need a package that is missing, or another tokenizer.
        """
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a th.Sampling, got {sampling!r}")
        if adapter is not None:
            check_loaded(adapter, self.runner.adapters)
        packed = plain_ints(prompt) if isinstance(prompt, list) else None
        inputs: Mapping[str, Tensor] = {}
        if isinstance(prompt, list) and packed is not None:
            tokens = prompt.copy()
        else:
            prompt = self._read(prompt)
            tokens, inputs = self._encoded(prompt)
        sampling = sampling.for_prompt(len(tokens))
        packed = self._checked(tokens, packed, sampling)
        message_end = self._message_end(prompt, tokens) if self.finds_messages else None
        images = None
        if self._tower is not None and inputs:
            images = Images(self._tower, tokens, inputs, sampling.n)
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        ends = eos.union(sampling.stop_token_ids)
        # A config may name ids outside of the vocabulary; no set of the whole vocabulary is built.
        barred = frozenset(token for token in ends if 0 <= token < self._vocab_size)
        tokenizer = self.tokenizer if stream or sampling.stop else None
        return [
            Request(
                index=index,
                sample=sample,
                prompt=tokens,
                sampling=sampling,
                stop_token_ids=ends,
                tokenizer=self.tokenizer,
                detokenizer=None if tokenizer is None else Detokenizer(tokenizer, sampling.stop),
                numbers=RandomNumbers.of(sampling, sample),
                rules=LogitsRules.of(sampling, num_prompt=len(tokens), end_token_ids=barred),
                matcher=self._matcher(sampling, len(tokens), barred),
                history=tokens.copy(),
                packed=packed,
                message_end=message_end,
                images=images,
                adapter_name=adapter,
            )
            for sample in range(sampling.n)
        ]

    def _matcher(self, sampling: Sampling, num_prompt: int, ends: frozenset[int]) -> Matcher | None:
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            self._grammars = Compiler(self.tokenizer, self._vocab_size)
        return self._grammars.matcher(sampling.grammar, num_prompt=num_prompt, end_token_ids=ends)

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode one prompt, of any length."""
        return self._encoded(self._read(prompt))[0]

    def _read(self, prompt: Prompt) -> Prompt:
        """Check the messages of a conversation; other prompts stay as they are."""
        if not is_conversation(prompt):
            return prompt
        return read_messages(prompt, self._template, self._sight)

    def _encoded(self, prompt: Prompt) -> tuple[list[int], Mapping[str, Tensor]]:
        """Encode a prompt: its tokens, and the tower inputs of its images."""
        if self.processor is not None and is_conversation(prompt):
            prompt = process(list(prompt), self.processor)
        if isinstance(prompt, Mapping):
            if self._tower is None and has_images(prompt):
                raise ValueError(f"a prompt has images, and {NO_SIGHT.otherwise}")
            if self._tower is not None and not prompt.keys().isdisjoint(self._tower.input_names):
                return with_images(prompt, self._tower.input_names)
        return prompt_tokens(prompt, self.tokenizer), {}

    @property
    def _template(self) -> object:
        """Chat template that writes conversations."""
        if self.processor is not None:
            return self.processor.chat_template
        return template_of(self.tokenizer)

    def _message_end(self, prompt: Prompt, tokens: list[int]) -> int | None:
        if self.processor is not None and is_conversation(prompt):
            return processed_message_tokens(list(prompt), tokens, self.processor)
        return message_tokens(prompt, tokens, self.tokenizer)

    def _checked(
        self, tokens: list[int], packed: array[int] | None, sampling: Sampling
    ) -> array[int]:
        """Check that a prompt can be served, and pack its tokens if they are not packed yet."""
        last = self._vocab_size - 1
        if not tokens:
            raise ValueError("the prompt must have at least 1 token, got 0")
        try:
            packed = packed or packed_ints(tokens, "q")
            lowest, highest = map(int, torch.aminmax(int_tensor(packed, torch.int64)))
        except OverflowError:
            lowest, highest = min(tokens), max(tokens)
        if packed is None or lowest < 0 or highest > last:
            wrong = next(token for token in tokens if not 0 <= token <= last)
            raise ValueError(f"token ids must be within 0 and {last}, got {wrong}")
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
        ):
            if max(ids, default=0) > last:
                raise ValueError(f"{name} must be within 0 and {last}, got {max(ids)}")
        longest = len(tokens) + sampling.max_new_tokens - 1  # the last token is never held
        if longest > self._max_seq_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens={sampling.max_new_tokens} "
                f"hold up to {longest} tokens, and a sequence can hold {self._max_seq_len}; "
                f"the runner's kv_tokens raises this"
            )
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop texts need a tokenizer, got stop={list(sampling.stop)!r}")
        return packed


def _sight(tower: Tower | None, processor: Processor | None) -> Sight:
    """Tell which media messages may show."""
    if tower is None:
        return NO_SIGHT
    if processor is None:
        return Sight(
            otherwise="images in a conversation need the checkpoint's processor: th.Engine(runner, "
            "processor=transformers.AutoProcessor.from_pretrained(path))"
        )
    kinds = tuple(modality.name for modality in tower.modalities)
    return Sight(
        kinds=kinds,
        otherwise=f"the model's tower takes {' and '.join(f'{kind}s' for kind in kinds)}",
    )
