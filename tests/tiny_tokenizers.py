"""Tokenizers that are made in a moment: over bytes, and over words with their spaces in front."""

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message.role == "tool" -%}{{ raise_exception("no tools here") }}{%- endif -%}
<|{{ message.role }}|>{{ message.content }}<end>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
WORDS = ["the quick brown fox", "größer über 日本"]


def byte_level(chat_template=None):
    """Byte-level BPE with the merges of a few words; any text can be written."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(WORDS, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<end>", chat_template=chat_template
    )


def metaspace():
    """BPE as sentencepiece has it: a space begins a word, and what no piece has falls to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁fox", *"abcdefghijklmnopqrstuvwxyzü,.!"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    )
    model.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    model.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


VISION_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VISION_TEMPLATE = """{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<end>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def image_processor(patch: int):
    """The processor of Qwen's models for small images, without its part for videos, which wants
    torchvision."""
    pytest.importorskip("PIL", reason="Pillow is missing")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class ImagesAlone(transformers.Qwen3VLProcessor):
        def __init__(self, image_processor, tokenizer, chat_template=None):
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

    tokenizer = byte_level(VISION_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_MARKS})
    pixels = {"shortest_edge": 4 * patch**2, "longest_edge": 64 * patch**2}
    cutter = Qwen2VLImageProcessorPil(size=pixels, patch_size=patch, merge_size=2)
    return ImagesAlone(cutter, tokenizer, VISION_TEMPLATE)
