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
