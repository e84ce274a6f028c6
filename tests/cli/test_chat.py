"""A conversation: its history is kept, and Ctrl-C ends an answer and nothing else."""

import builtins

import pytest

from tests.cli.test_cli import EAGER
from torch_hybrid.cli.options import load_tokenizer
from torch_hybrid.serving.engine import Engine


@pytest.fixture
def talk(run, chat_checkpoint, monkeypatch):
    """Run ``chat`` on what a user types; what was printed, and each prompt as text."""
    tokenizer = load_tokenizer(str(chat_checkpoint))

    def talk(*typed, options=()):
        words, prompts = iter(typed), []

        def read(prompt=""):
            word = next(words, EOFError)
            if isinstance(word, str):
                return word
            raise word

        submit = Engine.submit

        def noted(engine, prompt, *args, **named):
            request = submit(engine, prompt, *args, **named)
            prompts.append(tokenizer.decode(request.prompt))
            return request

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(Engine, "submit", noted)
        sizes = (*EAGER, "--max-new-tokens", 4, "--ignore-eos", "--temperature", 0)
        code, out, err = run("chat", chat_checkpoint, *sizes, *options)
        assert code == 0, err
        return prompts[1:], out, err  # the first one tries the template

    return talk


def test_history_is_kept_and_forgotten(talk):
    prompts, out, _ = talk("the fox", "", "again", "/new", "anew", "/exit", "never")
    first, second, third = prompts
    assert first == "<|user|>the fox<end><|assistant|>"
    answer = second.removeprefix(first).removesuffix("<end><|user|>again<end><|assistant|>")
    assert answer
    assert out.startswith(answer + "\n")
    assert third == "<|user|>anew<end><|assistant|>"


def test_a_byte_order_mark_is_no_part_of_a_message(talk):
    assert talk("\ufeffthe fox")[0] == ["<|user|>the fox<end><|assistant|>"]


def test_a_system_message_stays(talk):
    prompts, _, _ = talk("a", "/new", "b", options=("--system", "be brief"))
    start = "<|system|>be brief<end><|user|>"
    assert prompts == [f"{start}a<end><|assistant|>", f"{start}b<end><|assistant|>"]


def test_ctrl_c_ends_the_answer_and_not_the_program(talk, monkeypatch):
    step, num_steps = Engine.step, 0

    def interrupted(engine):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    prompts, out, err = talk("the fox", KeyboardInterrupt, "again", "more")
    assert "interrupted" in err
    assert len(prompts) == 3
    first, second, third = prompts
    begun = second.removeprefix(first).removesuffix("<end><|user|>again<end><|assistant|>")
    assert out.startswith(begun)
    assert third.startswith(second)


def test_a_message_that_does_not_fit_is_said_and_the_talk_goes_on(talk):
    prompts, _, err = talk("a" * 300, "b")
    assert prompts == ["<|user|>b<end><|assistant|>"]
    assert "a sequence can hold 256" in err
    assert "/new begins anew" in err


def test_a_model_that_cannot_chat_is_refused_before_anything_is_compiled(run, checkpoint):
    code, out, err = run("chat", checkpoint)
    assert (code, out) == (2, "")
    assert "the tokenizer has no chat template" in err
