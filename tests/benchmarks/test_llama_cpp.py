"""``benchmarks.llama_cpp`` without llama.cpp: its batches of requests, and what it says alone."""

import random
import sys

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import llama_cpp
from benchmarks.llama_cpp_weights import LLAMA_CPP
from benchmarks.models import FAMILIES

VOCAB_SIZE = 101


def next_token(history):
    return (7 * sum(history) + 3 * history[-1] + len(history)) % VOCAB_SIZE


class FakeLlama:
    """Its next token follows from all tokens of a sequence."""

    def __init__(self, max_seqs):
        self.histories = [None] * max_seqs
        self.steps = []

    def restart(self, seq):
        self.histories[seq] = []

    def extend(self, new):
        self.steps.append([len(tokens) for tokens in new.values()])
        for seq, tokens in new.items():
            assert len(tokens) > 0
            self.histories[seq] += tokens
        drawn = [next_token(self.histories[seq]) for seq in new]
        return torch.nn.functional.one_hot(torch.tensor(drawn), VOCAB_SIZE).float()


@pytest.mark.parametrize("max_seqs", [1, 3, 8])
def test_every_request_gets_its_own_tokens(monkeypatch, max_seqs):
    monkeypatch.setattr(llama_cpp, "STEP_TOKENS", 16)
    draw = random.Random(0)
    lengths = [1, 40, 16, 2, 17, 5, 33, 1]
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    fake = FakeLlama(max_seqs)
    made = llama_cpp.serve_llama(fake, prompts, 5, max_seqs=max_seqs)
    for prompt, tokens in zip(prompts, made, strict=True):
        history = list(prompt)
        for token in tokens:
            assert token == next_token(history)
            history.append(token)
        assert len(tokens) == 5
    assert max(map(sum, fake.steps)) <= 16
    if max_seqs == 8:
        assert max(map(len, fake.steps)) > 4, "requests share steps"


def test_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(llama_cpp, "missing", lambda: "llama-cpp-python")
    monkeypatch.setattr(sys, "argv", ["llama_cpp", "--quick"])
    llama_cpp.main()
    assert capsys.readouterr().out == "llama.cpp is left out: install llama-cpp-python\n"


def test_it_says_which_models_it_can_write(monkeypatch, capsys):
    monkeypatch.setattr(llama_cpp, "missing", lambda: "")
    monkeypatch.setattr(sys, "argv", ["llama_cpp", "--quick", "--model", "qwen3"])
    llama_cpp.main()
    said = capsys.readouterr().out
    assert said.startswith("qwen3 is left out: it is not written for llama.cpp, qwen3_5, falcon_h1")
    assert LLAMA_CPP.keys() <= FAMILIES.keys()
