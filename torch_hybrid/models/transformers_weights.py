"""Models as transformers makes them, with the weights of a checkpoint that has not been read.

transformers has the modules, and knows under which names a checkpoint may have their weights:
renamed, tied, a tensor for each expert. Its loader is handed unread weights, and merges those.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch

from torch_hybrid.host.defaults import Defaults
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.mtp import add_parts, with_head
from torch_hybrid.models.stored_formats import AsWeights, as_weights

T = TypeVar("T")

# Of the text part of a multimodal model, which may be a causal language model or lack its head.
_OF_TEXT = re.compile(r"(?:(model\.)(?:language_model|llm)\.|language_model\.|(lm_head\.))(.+)")


def take_quantization(config: Any) -> AsWeights | None:
    """Take the quantization out of a config, else transformers would make layers of its own.

    Returns:
        The function that makes weights of a checkpoint's tensors; None without quantization.

    Raises:
        UnsupportedError: the quantization of the config is not served.
    """
    found = None
    for part in (config, config.get_text_config()):
        given = part.to_dict().get("quantization_config")
        if given:
            found = as_weights(config.model_type, given)
            del part.quantization_config
    return found


def make_unread(
    checkpoint: Checkpoint,
    architecture: Architecture,
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    vision: bool = False,
) -> Any:
    """Make a causal language model of transformers whose weights are unread; with ``vision``, the
    whole of a multimodal one.

    Its other buffers are on the host. Where a head is read, the modules around its layers are the
    model's ``mtp``.

    Raises:
        ValueError: the checkpoint lacks a weight, or has one of another shape than its config says.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        GenerationConfig,
    )

    from torch_hybrid.models.stacked_experts import check_experts

    given, config, head = checkpoint, architecture.config, architecture.head
    text_class = None if vision else architecture.family.text_class()
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if vision else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes:
        config, checkpoint = _text_config(config), _text_part(checkpoint)
    model_class: Any = text_class or classes[type(config)]
    if head is not None:
        checkpoint = with_head(checkpoint, given, config.get_text_config(), head)
    if not isinstance(config, model_class.config_class):  # but that of a multimodal model
        config = _text_config(config)
    check_experts(checkpoint)
    with _quiet():
        try:
            hf_model, info = _refusing(
                model_class, checkpoint, has_head=head is not None
            ).from_pretrained(
                None,
                config=config,
                dtype=dtype,
                state_dict=checkpoint.unread(device, _dtype_of(config, dtype)),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except NotImplementedError:  # ours: an operation that unread weights do not have
            raise
        except (OSError, RuntimeError) as error:
            told = f"cannot use the weights in {checkpoint.folder}: {error}"
            raise ValueError(told) from error
        path = Path(checkpoint.folder, "generation_config.json")
        try:
            if path.is_file():  # else it is as the config says
                hf_model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error}") from error
    hf_model.__class__ = model_class
    if info["unexpected_keys"]:
        warnings.warn(
            f"the checkpoint {checkpoint.folder} has unexpected keys: "
            f"{sorted(info['unexpected_keys'])}",
            stacklevel=2,
        )
    return hf_model


def _text_config(config: Any) -> Any:
    """Return the config of a multimodal model's text part, whose head is tied where the whole's is:
    transformers asks the outer config alone."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    text = config.get_text_config()
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if text is not config and whole is not None and whole._tied_weights_keys:
        text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    return text


def _text_part(checkpoint: Checkpoint) -> Checkpoint:
    """Keep the tensors of a multimodal model's text part, by their names in it alone."""

    def named(found: Mapping[str, T]) -> dict[str, T]:
        matches = ((_OF_TEXT.fullmatch(name), value) for name, value in found.items())
        return {"".join(filter(None, match.groups())): value for match, value in matches if match}

    return replace(checkpoint, tensors=named(checkpoint.tensors), lost=named(checkpoint.lost))


def _refusing(model_class: Any, checkpoint: Checkpoint, *, has_head: bool) -> Any:
    """Derive a class whose loader is given experts as stacks, and refuses an incomplete checkpoint.

    The loader raises where a weight is missing or of another shape than its config says, before
    transformers initialises such weights."""
    from transformers import initialization as init
    from transformers.monkey_patching import apply_patches

    from torch_hybrid.models.stacked_experts import stack_experts

    class Refusing(model_class):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            with _without_dtypes_of_parts(config):
                super().__init__(config, *args, **options)
            if has_head:
                add_parts(self)

        @classmethod
        def get_init_context(cls, dtype: torch.dtype, *_options: object) -> list[Any]:
            """Make no weights, and set the default dtype of this thread alone."""
            made = Defaults(device=torch.device("meta"), dtype=dtype)
            return [made, init.no_tie_weights(), apply_patches()]

        @staticmethod
        def _load_pretrained_model(
            model: Any, tensors: Any, files: Any, load_config: Any, *options: Any
        ) -> Any:
            tensors = stack_experts(tensors, load_config.weight_mapping)
            return model_class._load_pretrained_model(model, tensors, files, load_config, *options)

        @staticmethod
        def _finalize_model_loading(model: Any, load_config: Any, found: Any) -> Any:
            ignored = model._keys_to_ignore_on_load_missing or ()
            # Tied weights are missing on purpose, unless their file is missing: then nobody knows.
            tied = model.all_tied_weights_keys.keys() - checkpoint.lost.keys()
            missing = [
                name
                for name in sorted(found.missing_keys - tied)
                if not any(re.search(pattern, name) for pattern in ignored)
            ]
            if missing:
                raise ValueError(checkpoint.lacks(missing))
            if found.mismatched_keys:
                raise ValueError(
                    f"the checkpoint {checkpoint.folder} has mismatched keys: "
                    f"{sorted(map(str, found.mismatched_keys))}"
                )
            return model_class._finalize_model_loading(model, load_config, found)

        @staticmethod
        def _adjust_bias(layer: object, weight: object) -> None:
            """Leave the bias of a layer with a tied weight, whose length is right already."""

    # transformers looks up by these the names that a checkpoint may have.
    Refusing.__name__, Refusing.__module__ = model_class.__name__, model_class.__module__
    return Refusing


@contextmanager
def _without_dtypes_of_parts(config: Any) -> Iterator[None]:
    """Hide the dtypes of a config's parts: transformers would make each the default of the whole
    process while it builds that part."""
    parts = list(_parts_of(config))
    dtypes = [part.dtype for part in parts]
    try:
        for part in parts:
            part.dtype = None
        yield
    finally:
        for part, dtype in zip(parts, dtypes, strict=True):
            part.dtype = dtype


def _parts_of(config: Any) -> Iterator[Any]:
    for name in config.sub_configs:
        part = vars(config).get(name)
        if part is not None:
            yield part
            yield from _parts_of(part)


def _dtype_of(config: Any, dtype: torch.dtype | str) -> torch.dtype:
    """Choose the dtype of dequantized weights: the one asked for, or the config's."""
    if isinstance(dtype, torch.dtype):
        return dtype
    given: torch.dtype | None = config.dtype or config.get_text_config().dtype
    return given or torch.bfloat16


_LOADING = RLock()  # guards settings of the process that transformers changes to make a model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports: this loader has its own.

    transformers has one verbosity for the process, and exchanges functions of classes while it
    makes a model. Threads take turns, else one would put back another's setting.
    """
    from transformers.utils import logging

    with _LOADING:
        verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        try:
            logging.set_verbosity_error()  # type: ignore[no-untyped-call]
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            yield
        finally:
            logging.set_verbosity(verbosity)
            if has_bars:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]
