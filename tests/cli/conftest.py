"""A checkpoint with a tokenizer, and a way to run the command line in this process."""

import sys
import warnings

import pytest

from tests.tiny_models import FEWEST_LAYERS, qwen3_next_dense
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_level

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("click")
pytest.importorskip("rich")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A random Qwen3-Next with a byte-level tokenizer."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0} | {byte: 1 + at for at, byte in enumerate(alphabet)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>").save_pretrained(folder)
    sizes = {"vocab_size": len(vocab), **FEWEST_LAYERS["qwen3_next_dense"]}
    qwen3_next_dense(eos_token_id=0, **sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_checkpoint(tmp_path_factory):
    """A random Qwen3-Next whose tokenizer has a chat template, and that asks to be sampled."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = byte_level(CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), **FEWEST_LAYERS["qwen3_next_dense"]}
    model = qwen3_next_dense(eos_token_id=0, **sizes)
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``torch-hybrid`` with these arguments; its exit code, stdout and stderr."""
    from torch_hybrid import cli
    from torch_hybrid.host import malloc

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["torch-hybrid", *map(str, args)])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces it
        monkeypatch.setattr(malloc, "tune_allocator", lambda: False)  # it is for the whole process
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
