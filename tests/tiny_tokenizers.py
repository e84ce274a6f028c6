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


def fallback_bytes(*, unigram=False):
    """Pieces of sentencepiece without a normalizer, and a decoder of Metaspace (unigram) or of
    replaced spaces (BPE); what no piece has falls to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁fox", "es", *"abcdefghijklmnopqrstuvwxyzü,.!'"]
    if unigram:
        scored = [(piece, -1.0) for piece in pieces]
        model = tokenizers.models.Unigram(scored, unk_id=0, byte_fallback=True)
        last = tokenizers.decoders.Metaspace()
    else:
        vocab = {piece: at for at, piece in enumerate(pieces)}
        model = tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
        last = tokenizers.decoders.Replace("▁", " ")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), last, tokenizers.decoders.Fuse()]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def unigram():
    """Unigram with byte fallback."""
    return fallback_bytes(unigram=True)


def bpe_fallback():
    """BPE with byte fallback that keeps the space in front."""
    return fallback_bytes()


# Words and signs from which a clean-up takes spaces, whole and in parts.
SIGNS = ["n", "'", "t", "s", "m", "v", "e", "r", "ve", "re", "n't", "'s", ".", ",", "!", "?"]
CLEANED = ["[UNK]", "[SEP]", "do", "we", "über", "日本", "##s", "##n", "##'", *SIGNS]


def word_pieces(*, cleans=False):
    """WordPiece as BERT has it: what continues a word is marked, and its decoder cleans up."""
    vocab = {word: at for at, word in enumerate(CLEANED)}
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    model.decoder = tokenizers.decoders.WordPiece(cleanup=not cleans)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="[UNK]",
        eos_token="[SEP]",
        clean_up_tokenization_spaces=cleans,
    )


def cleaned_word_pieces():
    """WordPiece whose text transformers cleans up."""
    return word_pieces(cleans=True)


def cleaned_words():
    """Whole words with spaces between them, some of them spaces, that transformers cleans up."""
    vocab = {word: at for at, word in enumerate([*CLEANED, " ", "  ", " '"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="[UNK]",
        eos_token="[SEP]",
        clean_up_tokenization_spaces=True,
    )


def cleaned_bytes():
    """Byte-level BPE that transformers is told to clean up, which takes spaces out of any text."""
    tokenizer = byte_level()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return tokenizer


def word_ends():
    """BPE whose words are marked at their ends."""
    pieces = [
        "<unk>",
        "</s>",
        "</w>",
        "the</w>",
        "fox</w>",
        *"abcdefgh",
        *(f"{x}</w>" for x in "xyz."),
    ]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>")
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.decoder = tokenizers.decoders.BPEDecoder("</w>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", eos_token="</s>"
    )


def byte_by_byte():
    """A tokenizer in Python, of single bytes, that leaves out those which are no character."""
    return transformers.ByT5Tokenizer(extra_ids=3)


def with_added_tokens(tokenizer):
    """The same with tokens that were added to it, special ones and others."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    tokenizer.add_tokens(["<tool>", " spaced ", "ü!"])
    return tokenizer


EVERY_KIND = {
    make.__name__: make
    for make in (
        byte_level,
        metaspace,
        unigram,
        bpe_fallback,
        word_pieces,
        cleaned_word_pieces,
        cleaned_words,
        cleaned_bytes,
        word_ends,
        byte_by_byte,
    )
}


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
