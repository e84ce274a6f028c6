"""Conversion of a checkpoint's ``generation_config`` into fields of ``Sampling``.

Each field that transformers knows is followed, is harmless, or is named in a warning. Unknown
fields are named, too: nothing that a checkpoint asks for is silently dropped.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

DEFAULT_MAX_NEW_TOKENS = 64

# Fields that are followed, with their names in ``Sampling``. Those without a name there decide over
# others, include the prompt, or are the engine's ("eos_token_id").
FOLLOWED: Mapping[str, str | None] = {
    "do_sample": None,
    "eos_token_id": None,
    "max_length": None,
    "max_new_tokens": "max_new_tokens",
    "min_length": None,
    "min_new_tokens": "min_new_tokens",
    "min_p": "min_p",
    "num_return_sequences": "n",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}

# Fields that change no token: further outputs, caches, compilation, tokens of padded or empty
# prompts, and options of drafting methods that other fields select.
HARMLESS = frozenset(
    {
        "_commit_hash",
        "_from_model_config",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "low_memory",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "return_dict_in_generate",
        "target_lookbehind",
        "transformers_version",
        "use_cache",
    }
)

# Fields that are not followed, with the value besides None that leaves them off.
NAMED: Mapping[str, object] = {
    "assistant_early_exit": None,
    "assistant_ensemble_weight": None,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "is_assistant": False,
    "length_penalty": 1.0,
    "max_time": None,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "prompt_lookup_num_tokens": None,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "sequence_bias": None,
    "speculation_type": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "use_mtp": False,
    "watermarking_config": None,
}


def not_followed(config: Mapping[str, Any]) -> list[str]:
    """Name the fields that a config sets and ``fields_of`` does not follow, with their values."""
    return [
        f"{name}={reprlib.repr(value)}"
        for name, value in config.items()
        if name not in FOLLOWED
        and name not in HARMLESS
        and value not in (None, [], {}, (), NAMED.get(name))
    ]


def counts_prompt(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Name the lengths of a config that are followed, but include the tokens of the prompt."""
    return [
        f"{name}={fields[name]}"
        for name in ("max_length", "min_length")
        if fields.get(name) and name not in changes
    ]


def fields_of(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config into fields of ``Sampling``; a caller's changes override it.

    As in transformers, sampling is greedy without ``do_sample``; with it, ``top_k`` defaults to 50.
    A length of new tokens overrides one that includes the prompt.
    """
    asked = {name: value for name, value in config.items() if value is not None}
    fields = {ours: asked[name] for name, ours in FOLLOWED.items() if ours and name in asked}
    if asked.get("do_sample", False):
        fields = {"temperature": 1.0, "top_k": 50} | fields
    else:
        fields["temperature"] = 0.0
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    fields |= changes
    if "max_new_tokens" not in fields and "max_length" in asked:
        fields = {"max_length": asked["max_length"]} | fields
    if "min_new_tokens" not in fields and "min_length" in asked:
        fields = {"min_length": asked["min_length"]} | fields
    return _with_lengths(fields, changes)


def _with_lengths(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Adjust the lengths of a config that contradict each other or the caller's own."""
    least, longest = fields.get("min_new_tokens", 0), fields.get("max_length")
    if not (isinstance(least, int) and isinstance(longest, int | None)):
        return fields  # ``Sampling`` refuses them by name
    if "max_new_tokens" not in fields:  # a prompt takes at least one token of max_length
        most = max(DEFAULT_MAX_NEW_TOKENS, least) if longest is None else longest - 1
        fields["max_new_tokens"] = most
    if "min_new_tokens" not in changes and isinstance(fields["max_new_tokens"], int):
        fields["min_new_tokens"] = min(least, fields["max_new_tokens"])
    return fields
