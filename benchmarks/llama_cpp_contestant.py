"""llama.cpp as a contestant: a GGUF file, driven through the C functions of llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 30}  # of ggml: the KV cache as ours is


class LlamaCpp:
    """A model in llama.cpp that holds a batch of sequences, each with a cache of its own.

    Args:
        path: of the GGUF file.
        max_seqs: sequences at once.
        max_len: tokens of each.
        num_threads: that it computes with.
        dtype: of its KV cache.
        flash: attention as it is by default, flash attention, which rounds values to float16
            whatever the cache is in. Without, all of it is in float32.

    Raises:
        RuntimeError: llama.cpp does not take the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_seqs: int,
        max_len: int,
        num_threads: int,
        dtype: torch.dtype,
        flash: bool = True,
    ) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(_ignore)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(bytes(path), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_seqs * -(-max_len // 256) * 256
        params.n_batch = params.n_ubatch = max(max_len, max_seqs)
        params.n_seq_max = max_seqs
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = False
        if not flash:
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = _CACHE_TYPES[dtype]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {max_seqs} sequences of {max_len}")
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._lengths: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Drop what is held, and prefill the prompts one by one."""
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_clear(memory, True)
        self._lengths = [0] * len(prompts)
        for seq, prompt in enumerate(prompts):
            self.extend({seq: prompt})

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each sequence; [N, vocab_size] logits."""
        return self.extend({seq: [token] for seq, token in enumerate(tokens)})

    def restart(self, seq: int) -> None:
        """Make room for a new sequence in the place of one that has ended."""
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_seq_rm(memory, seq, -1, -1)
        self._lengths[seq] = 0

    def extend(self, new: dict[int, Sequence[int]]) -> Tensor:
        """Append tokens to sequences, any mix of lengths; [N, vocab_size] logits after the last of
        each, in the order of ``new``."""
        batch, at, last = self._batch, 0, []
        for seq, tokens in new.items():
            for token in tokens:
                batch.token[at], batch.pos[at] = token, self._lengths[seq]
                batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, seq, 0
                self._lengths[seq] += 1
                at += 1
            batch.logits[at - 1] = 1
            last.append(at - 1)
        batch.n_tokens = at
        if code := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode of {at} tokens returned {code}")
        return torch.stack([self._logits(row) for row in last])

    def _logits(self, row: int) -> Tensor:
        found = self._lib.llama_get_logits_ith(self._context, row)
        values = ctypes.cast(found, ctypes.POINTER(ctypes.c_float * self._vocab_size)).contents
        return torch.frombuffer(values, dtype=torch.float32).clone()

    def close(self) -> None:
        """Free its memory."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def _ignore(_level: int, _text: bytes, _data: object) -> None:
    """What llama.cpp says of itself while it loads."""


def quantized_gguf(path: Path, weights: str) -> Path:
    """The same file beside it, with weights of 8 or 4 bits as llama.cpp makes them.

    Raises:
        RuntimeError: it does not.
    """
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(_ignore)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    to = path.with_suffix(f".{weights}.gguf")
    kinds = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = kinds[weights], torch.get_num_threads()
    if llama_cpp.llama_model_quantize(bytes(path), bytes(to), params):
        raise RuntimeError(f"llama.cpp does not quantize {path} to {weights}")
    return to
