"""Grammars, tools and thoughts of chats, by OpenAI's own client."""

import json
from dataclasses import replace

import pytest

import torch_hybrid as th
from tests.http.conftest import Server, openai
from tests.serving.fake_runner import FakeRunner
from tests.tiny_tokenizers import byte_level

pytest.importorskip("llguidance")

TEMPLATE = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.arguments.word }}{% endfor %}<end>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if messages[0].content == 'think' %}<think>{% endif %}"
    "{% if messages[0].content == 'no' or enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"$ref": "#/$defs/Word"}},
    "$defs": {"Word": {"enum": ["größer", "b"]}},
    "required": ["word"],
    "additionalProperties": False,
}
FUNCTION = {"name": "find", "parameters": PARAMETERS, "strict": True}
TOOLS = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "other"}},
]
ASKED = [{"role": "user", "content": "hi"}]


def start(*special):
    """A server of a model without meaning, whose outputs are shaped by grammars alone."""
    tokenizer = byte_level(f"{TEMPLATE}{{# {special} #}}")
    added = [*special, "<think>", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    runner = FakeRunner(max_seqs=8, max_tokens=512, num_pages=4096, vocab_size=320)
    engine = th.Engine(runner, tokenizer, eos_token_ids=[0])
    return Server(engine)


@pytest.fixture(scope="module")
def server():
    started = start()
    yield started
    started.close()


def chat(server, *, messages=ASKED, max_tokens=200, **options):
    """One answer, whole and streamed, which must be the same."""
    options = {"model": "demo", "messages": messages, "max_tokens": max_tokens, **options}
    (choice,) = server.client.chat.completions.create(**options).choices
    parts = {"content": "", "reasoning_content": ""}
    calls, end = [], None
    for chunk in server.client.chat.completions.create(**options, stream=True):
        (streamed,) = chunk.choices
        delta = streamed.delta.to_dict()
        for name in parts:
            parts[name] += delta.get(name) or ""
        calls += delta.get("tool_calls", [])
        end = streamed.finish_reason or end
    message = choice.message.to_dict()
    told = [call["function"] for call in message.get("tool_calls") or ()]
    assert {name: message.get(name) or "" for name in parts} == parts
    assert [call["function"] for call in calls] == told
    assert [call["index"] for call in calls] == [*range(len(calls))]
    assert end == choice.finish_reason
    return message, told, end


def says(server, monkeypatch, grammar):
    """Let a model say what a grammar allows, without the server's knowledge."""
    prepare = server.engine.prepare
    monkeypatch.setattr(
        server.engine,
        "prepare",
        lambda prompt, sampling, **options: prepare(
            prompt, replace(sampling, grammar=grammar), **options
        ),
    )


SCHEMA = {"type": "object", "properties": {"a": {"enum": [7, 8]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            ('{"a":7}', '{"a":8}'),
        ),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, ('{"a":7}', '{"a":8}')),
        ({"extra_body": {"structured_outputs": {"regex": "[ab]{3}c"}}}, "[ab]{3}c"),
        ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, ("yes", "no")),
        ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}}, ("x", "y")),
    ],
)
def test_outputs_follow_grammars(server, options, texts):
    import re

    message, _, end = chat(server, **options)
    body = options.get("extra_body", options)
    text = server.client.completions.create(
        model="demo", prompt="a", max_tokens=99, extra_body=body
    ).choices[0]
    for said in (message["content"], text.text):
        assert re.fullmatch(texts, said) if isinstance(texts, str) else said in texts
    assert end == text.finish_reason == "stop"


def test_any_object(server):
    form = {"response_format": {"type": "json_object"}}
    message, _, end = chat(server, **form, max_tokens=400)
    assert message["content"].startswith("{")
    assert end == "length" or json.loads(message["content"]) is not None


@pytest.mark.parametrize(
    ("options", "param", "told"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must have json_schema"),
        ({"structured_outputs": {}}, "structured_outputs", "one grammar, got 0"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "one grammar, got 2"),
        ({"structured_outputs": {"regex": "("}}, None, "the grammar (regex) is refused"),
        ({"structured_outputs": {"json": {"type": 3}}}, None, "(json_schema) is refused"),
        ({"structured_outputs": {"json": {"if": {}}}}, None, "(json_schema) is refused"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, None, "or recurses without end"),
        ({"tool_choice": "required"}, "tool_choice", "with tools 'required'"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "got 'some'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        ({"tools": [{"type": "web"}]}, "tools.0.type", "'function'"),
        (
            {"chat_template_kwargs": {"tokenize": 1}},
            None,
            "of the template, got tokenize",
        ),
        ({"chat_template_kwargs": {"effort": 1}}, None, "of the template, got effort"),
        ({"chat_template_kwargs": {"messages": []}}, None, "of the template, got messages"),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "tool_choice",
            "a grammar beside tools needs tool_choice: 'none'",
        ),
    ],
)
def test_refusals_are_400(server, options, param, told):
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(server, extra_body=options)
    assert told in str(refusal.value)
    assert param is None or refusal.value.param == param


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_forced_calls_have_valid_arguments(server, named, opens):
    choice = {"type": "function", "function": {"name": "find"}} if named else "required"
    options = {"tools": TOOLS[:1], "tool_choice": choice, "parallel_tool_calls": False}
    bias = {"logit_bias": {END_THINK: 99}} if opens else {}
    messages = [{"role": "user", "content": "think"}] if opens else ASKED
    message, (call,), end = chat(server, messages=messages, **options, **bias)
    assert call["name"] == "find"
    assert json.loads(call["arguments"])["word"] in ("größer", "b")
    assert (message["content"], end) == (None, "tool_calls")


END_THINK = byte_level().vocab_size + 1


@pytest.mark.parametrize("closes", ["", "no", "variable"])
def test_a_grammar_begins_after_open_thoughts(server, closes):
    messages = [{"role": "user", "content": "no" if closes == "no" else "think"}]
    options = {"extra_body": {"structured_outputs": {"choice": ["yes"]}}}
    if closes:
        if closes == "variable":
            messages = ASKED
            options["extra_body"]["chat_template_kwargs"] = {"enable_thinking": False}
        message, _, end = chat(server, messages=messages, **options)
        assert message.get("reasoning_content") is None
        assert (message["content"], end) == ("yes", "stop")
        return
    message, _, _ = chat(server, messages=messages, max_tokens=8, **options)
    assert message["reasoning_content"]
    assert message["content"] is None
    message, _, end = chat(server, messages=messages, logit_bias={END_THINK: 99}, **options)
    assert (message["content"], end) == ("yes", "stop")


@pytest.mark.parametrize("forced", [False, True])
def test_a_grammar_begins_after_a_border_of_several_tokens(monkeypatch, forced):
    """Kimi-K3 closes its thoughts and opens its response, each by three tokens."""
    server = start("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    server.engine.tokenizer.chat_template += "<|open|>think<|sep|>"
    begins = server.engine.tokenizer.encode("hm<|close|>think<|sep|><|open|>response<|sep|>")
    prepare = server.engine.prepare

    def saying(prompt, sampling, **options):
        first = prepare(prompt, sampling, **options)

        def say(tokens, logits):
            said = len(tokens) - len(first.prompt)
            logits[begins[said : said + 1]] = 99.0
            return logits

        return prepare(prompt, replace(sampling, logits_processor=say), **options)

    monkeypatch.setattr(server.engine, "prepare", saying)
    tools = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    choice = {"extra_body": {"structured_outputs": {"choice": ["yes"]}}}
    message, calls, end = chat(server, **(tools if forced else choice))
    assert message["reasoning_content"] == "hm"
    assert (message["content"], end) == ((None, "tool_calls") if forced else ("yes", "stop"))
    assert [call["name"] for call in calls] == ["find"] * forced
    server.close()


def test_calls_of_the_models_own_format(server, monkeypatch):
    called = '{"name": "find", "arguments": {"word": "größer"}}'
    block = f"<tool_call>{called}</tool_call>"
    says(server, monkeypatch, th.Grammar.choice([f"I look. {block}{block}"]))
    message, calls, end = chat(server, tools=TOOLS)
    expected = {"name": "find", "arguments": '{"word": "größer"}'}
    assert (message["content"], calls, end) == ("I look.", [expected] * 2, "tool_calls")
    _, calls, _ = chat(server, tools=TOOLS, parallel_tool_calls=False)
    assert calls == [expected]
    message, calls, end = chat(server, tools=TOOLS, tool_choice="none")
    assert (message["content"], calls, end) == (f"I look. {block}{block}", [], "stop")
    message, calls, end = chat(server, tools=TOOLS, max_tokens=30)
    assert (calls, end) == ([], "length")


def test_borders_that_are_special_tokens(monkeypatch):
    server = start("<|tool_call_start|>", "<|tool_call_end|>")
    lark = 'start: "hm" </think> "so" <|tool_call_start|> "[find(word=\'b\')]" <|tool_call_end|>'
    says(server, monkeypatch, th.Grammar.ebnf(lark))
    messages = [{"role": "user", "content": "think"}]
    message, calls, end = chat(server, messages=messages, tools=TOOLS)
    assert (message["reasoning_content"], message["content"]) == ("hm", "so")
    assert (calls, end) == ([{"name": "find", "arguments": '{"word": "b"}'}], "tool_calls")
    server.close()


def test_the_template_gets_tools_and_earlier_calls(server):
    call = {"id": "a", "type": "function"}
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "find", "arguments": '{"word": "b"}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "found"},
    ]
    prompts, prepare = [], server.engine.prepare

    def seen(*args, **options):
        prompts.append(prepare(*args, **options))
        return prompts[-1]

    server.engine.prepare = seen
    chat(server, messages=messages, tools=TOOLS, max_tokens=1)
    chat(server, messages=messages, max_tokens=1)
    server.engine.prepare = prepare
    texts = [server.engine.tokenizer.decode(list(prompt.prompt)) for prompt in prompts]
    told = "user: hi<end>assistant: <tool_call>b<end>tool: found<end><|assistant|>"
    assert texts[0].endswith(told)
    assert '"name": "find"' in texts[0]
    assert texts[-1] == told
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match="arguments, a JSON object"):
        chat(server, messages=messages)
