"""Answers are those of ``Engine.generate``, whole and streamed, by OpenAI's own client."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import pytest
import torch

from tests.http.conftest import RECALL, ROOM, openai, prompt_of, transformers, words
from torch_hybrid.sampling import Sampling


def completed(server, prompt, **options):
    return server.client.completions.create(model="demo", prompt=prompt, **options)


def streamed(server, **options):
    """Texts and ends of the choices of a streamed completion, and its usage."""
    texts, ends, usage = {}, {}, None
    stream = server.client.completions.create(
        model="demo", stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    return texts, ends, usage


def test_greedy_texts_are_the_engines_whatever_else_runs(server, engine):
    prompts = [prompt_of(seed, 3 + seed % 9) for seed in range(8)]
    expected = [o.text for o in sorted_outputs(engine, prompts, Sampling(max_new_tokens=24))]

    def ask(number):
        if number % 2:  # others, of other lengths and drawn at random
            return completed(server, [5] * number, temperature=1.5, max_tokens=number)
        whole = completed(server, prompts[number // 2], max_tokens=24).choices[0].text
        texts, _, _ = streamed(server, prompt=words(prompts[number // 2]), max_tokens=24)
        return whole, texts[0]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(16)))
    assert answers[::2] == [(text, text) for text in expected]


def sorted_outputs(engine, prompts, sampling):
    return sorted(engine.generate(prompts, sampling), key=lambda out: (out.index, out.sample))


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"temperature": 0.8, "seed": 5, "n": 3}, {"temperature": 0.8, "seed": 5, "n": 3}),
        (
            {"temperature": 2.0, "seed": 1, "extra_body": {"top_k": 9, "min_p": 0.01}},
            {"temperature": 2.0, "seed": 1, "top_k": 9, "min_p": 0.01},
        ),
        (
            {"temperature": 3, "seed": 2, "top_p": 0.7, "extra_body": {"top_k": -1}},
            {"temperature": 3, "seed": 2, "top_p": 0.7},
        ),
        (
            {"presence_penalty": 1.5, "frequency_penalty": 0.5},
            {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        ),
        ({"extra_body": {"repetition_penalty": 3.0}}, {"repetition_penalty": 3.0}),
        ({"logit_bias": {"40": 60, "41": -5}}, {"logit_bias": {40: 60.0, 41: -5.0}}),
        ({"extra_body": {"stop_token_ids": list(range(4, 60))}}, {"stop_token_ids": range(4, 60)}),
    ],
)
def test_options_reach_the_draw(server, engine, asked, sampling):
    prompts = [prompt_of(seed) for seed in (20, 21)]
    outputs = sorted_outputs(engine, prompts, Sampling(max_new_tokens=12, **sampling))
    answer = completed(server, prompts, max_tokens=12, **asked)
    assert [choice.text for choice in answer.choices] == [output.text for output in outputs]
    assert [choice.index for choice in answer.choices] == list(range(len(outputs)))
    ends = [choice.finish_reason for choice in answer.choices]
    assert ends == [output.finish_reason for output in outputs]
    texts, streamed_ends, usage = streamed(server, prompt=prompts, max_tokens=12, **asked)
    assert [texts[n] for n in range(len(outputs))] == [output.text for output in outputs]
    assert [streamed_ends[n] for n in range(len(outputs))] == ends
    assert usage.completion_tokens == sum(len(output.tokens) for output in outputs)
    assert usage.prompt_tokens == sum(map(len, prompts))


def test_a_stop_text_ends_a_choice_and_is_left_out(server):
    whole = completed(server, prompt_of(3), max_tokens=12).choices[0].text
    third = whole.split()[2]
    choice = completed(server, prompt_of(3), max_tokens=12, stop=third).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(third)], "stop")
    texts, ends, _ = streamed(server, prompt=prompt_of(3), max_tokens=12, stop=[third, "never"])
    assert (texts[0], ends[0]) == (choice.text, "stop")


@pytest.mark.parametrize("prompt", ["w5 w6", ["w5 w6", "w7"], [5, 6], [[5, 6], [7]]])
def test_prompts_are_texts_or_tokens_or_lists_of_either(server, prompt):
    answer = completed(server, prompt, max_tokens=3)
    first = completed(server, [5, 6], max_tokens=3).choices[0].text
    second = completed(server, [7], max_tokens=3).choices[0].text
    expected = [first, second] if len(answer.choices) == 2 else [first]
    assert [choice.text for choice in answer.choices] == expected


def test_max_tokens_is_16_for_completions_and_cut_at_the_room(server):
    assert completed(server, [5] * 40).usage.completion_tokens == 16
    answer = completed(server, [5] * (ROOM - 20), max_tokens=10**6)
    assert answer.usage.completion_tokens == 21  # the last one is never held
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_and_echo(server, engine):
    prompt = prompt_of(9)
    sampling = Sampling(max_new_tokens=4, logprobs=2, prompt_logprobs=2)
    (expected,) = engine.generate(prompt, sampling)
    choice = completed(server, prompt, max_tokens=4, logprobs=2, echo=True).choices[0]
    assert choice.text == words(prompt) + expected.text
    entries = [*expected.prompt_logprobs, *expected.logprobs]
    told = choice.logprobs
    assert told.tokens == [words([token]) for token in [*prompt, *expected.tokens]]
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    for entry, top in zip(entries, told.top_logprobs[1:], strict=True):
        assert {words([token]) for token, _ in (*entry.top, (entry.token, 0))} == top.keys()
    starts = [sum(map(len, told.tokens[:n])) for n in range(len(told.tokens))]
    assert told.text_offset == starts


def test_echo_alone_generates_nothing(server):
    answer = completed(server, prompt_of(9), max_tokens=0, logprobs=0, echo=True)
    assert answer.choices[0].text == words(prompt_of(9))
    assert len(answer.choices[0].logprobs.tokens) == len(prompt_of(9))
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("max_tokens", [6, 0])
def test_streamed_logprobs_are_those_of_the_whole(server, max_tokens):
    """Of more choices than run at once: some begin when others have ended."""
    options = {"prompt": [prompt_of(8), prompt_of(9)], "max_tokens": max_tokens, "logprobs": 1}
    options |= {"echo": True, "n": 3, "temperature": 1.0, "seed": 1}
    whole = completed(server, **options).choices
    parts = [[] for _ in whole]
    for chunk in completed(server, **options, stream=True):
        for choice in chunk.choices:
            parts[choice.index].append(choice.logprobs)
    for choice, own in zip(whole, parts, strict=True):
        for name in ("tokens", "token_logprobs", "text_offset"):
            told = [*chain.from_iterable(getattr(each, name) for each in own)]
            assert told == pytest.approx(getattr(choice.logprobs, name))


def test_a_chat_is_answered_by_the_template(server, engine):
    messages = [{"role": "user", "content": "<1> <2> w5 w6 <2> w6 w9"}]
    sampling = Sampling(max_new_tokens=5, logprobs=1)
    (expected,) = engine.generate(messages, sampling)
    asked = {"model": "demo", "messages": messages, "max_completion_tokens": 5}
    asked |= {"logprobs": True, "top_logprobs": 1, "n": 2}
    answer = server.client.chat.completions.create(**asked)
    assert [choice.message.content for choice in answer.choices] == [expected.text] * 2
    told = answer.choices[1].logprobs.content
    assert [entry.token for entry in told] == [words([token]) for token in expected.tokens]
    assert [entry.logprob for entry in told] == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=1e-4
    )
    assert bytes(told[0].top_logprobs[0].bytes).decode() == told[0].top_logprobs[0].token
    texts, roles = ["", ""], []
    for chunk in server.client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.delta.role] * bool(choice.delta.role)
    assert (texts, roles) == ([expected.text] * 2, ["assistant"] * 2)


def test_a_last_message_of_the_assistant_is_continued(server, engine):
    talk = [
        {"role": "user", "content": "<1> <2> w5 w6"},
        {"role": "assistant", "content": "<2> w6"},
    ]
    (expected,) = engine.generate("<1> <2> w5 w6 <2> w6", Sampling(max_new_tokens=5))
    ends = {"continue_final_message": True, "add_generation_prompt": False}
    for body in ({}, ends):
        answer = server.client.chat.completions.create(
            model="demo", messages=talk, max_tokens=5, extra_body=body
        )
        assert answer.choices[0].message.content == expected.text
    for messages, body in (
        (talk, {"continue_final_message": True}),
        (talk, {"add_generation_prompt": True}),
        (talk[:1], ends),
    ):
        with pytest.raises(openai.BadRequestError, match="must be true and false where the last"):
            server.client.chat.completions.create(model="demo", messages=messages, extra_body=body)


def test_usage_tells_kept_tokens_of_the_second_turn(server):
    chat = server.client.chat.completions.create
    messages = [{"role": "user", "content": words(prompt_of(31, 20))}]
    first = chat(model="demo", messages=messages, max_tokens=4)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    messages += [{"role": "assistant", "content": first.choices[0].message.content}]
    messages += [{"role": "user", "content": "w8"}]
    second = chat(model="demo", messages=messages, max_tokens=4)
    assert second.usage.prompt_tokens_details.cached_tokens >= len(prompt_of(31, 20))
    assert second.usage.prompt_tokens == first.usage.prompt_tokens + 4 + 2 - 1


def test_a_second_turn_with_tools_keeps_the_first(server, monkeypatch):
    template = (
        "{{ 'w9 ' if tools }}{# <tool_call> #}{% for m in messages %}{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}<3> w4{% endif %}"
    )
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", template)
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = {"model": "demo", "tools": tools, "max_tokens": 4}
    messages = [{"role": "user", "content": words(prompt_of(32, 20))}]
    server.client.chat.completions.create(messages=messages, **options)
    messages += [{"role": "assistant", "content": "w5"}, {"role": "user", "content": "w8"}]
    second = server.client.chat.completions.create(messages=messages, **options)
    assert second.usage.prompt_tokens_details.cached_tokens == 1 + len(prompt_of(32, 20))


def test_models_and_tokens(server):
    (model,) = server.client.models.list().data
    assert (model.id, model.max_model_len) == ("demo", ROOM)
    assert server.client.models.retrieve("demo").id == "demo"
    _, _, text = server.post("/tokenize", '{"prompt": "w5 w6", "model": "demo"}')
    assert '"tokens":[5,6]' in text
    _, _, text = server.post("/tokenize", '{"messages": [{"role": "user", "content": "w5"}]}')
    assert '"tokens":[5,3]' in text
    status, _, text = server.post("/tokenize", '{"prompt": "%s"}' % ("w5 " * (ROOM + 1)))
    assert (status, f'"count":{ROOM + 1},' in text) == (200, True)
    _, _, text = server.post("/detokenize", '{"tokens": [5, 6, 1]}')
    assert text == '{"prompt":"w5 w6 <1>"}'


def test_an_adapter_is_a_model(server, engine, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    config = peft.LoraConfig(init_lora_weights=False, r=4, target_modules="all-linear")
    base = transformers.AutoModelForCausalLM.from_pretrained(RECALL)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    prompt, sampling = prompt_of(5), Sampling(max_new_tokens=12)
    engine.load_adapter("tuned", tmp_path)
    (of_base,), (expected,) = (
        list(engine.generate(prompt, sampling, adapter=name)) for name in (None, "tuned")
    )
    engine.unload_adapter("tuned")
    assert expected.text != of_base.text
    ask = partial(server.client.completions.create, prompt=prompt, max_tokens=12)
    with pytest.raises(openai.NotFoundError, match="`tuned` does not exist: 'demo' is served"):
        ask(model="tuned")
    server.engine.load_adapter("tuned", tmp_path)
    assert [model.id for model in server.client.models.list().data] == ["demo", "tuned"]
    assert server.client.models.retrieve("tuned").parent == "demo"
    answer = ask(model="tuned")
    assert (answer.model, answer.choices[0].text) == ("tuned", expected.text)
    assert ask(model="demo").choices[0].text == of_base.text
    chunks = ask(model="tuned", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    said = [{"role": "user", "content": words(prompt)}]
    texts = {
        name: server.client.chat.completions.create(model=name, messages=said, max_tokens=12)
        .choices[0].message.content
        for name in ("demo", "tuned")
    }  # fmt: skip
    assert texts["demo"] != texts["tuned"]
    server.engine.unload_adapter("tuned")


def test_the_page_needs_no_key(server):
    status, text = server.get("/")
    assert status == 200
    assert "/v1/chat/completions" in text
