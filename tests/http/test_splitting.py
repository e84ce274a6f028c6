"""Outputs in the formats of all families, split anywhere, give the thoughts, content and calls."""

import pytest

pytest.importorskip("pydantic")

from torch_hybrid.http.splitting import Said, Splitter, thinking_of
from torch_hybrid.http.tools import find_format, forced

SCHEMAS = {"find": {"properties": {"word": {"type": "string"}, "count": {"type": "integer"}}}}
CALLS = [("find", {"word": "größer </b> 7", "count": 3}), ("find", {"word": "12"})]
JSON_CALLS = (
    '{"name": "find", "arguments": {"word": "größer </b> 7", "count": 3}}',
    '{"name": "find", "arguments": {"word": "12"}}',
)
KIMI_CALL = "<|tool_call_begin|>functions.find:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
XML_CALL = "<tool_call>\n<function=find>\n{}</function>\n</tool_call>"
XML_VALUE = "<parameter={}>\n{}\n</parameter>\n"
GLM_VALUE = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
TEXTS = {  # by a part of the template
    "<tool_call>": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in JSON_CALLS),
    "<tool_call> <function=": "\n".join(
        (
            XML_CALL.format(
                XML_VALUE.format("word", "größer </b> 7") + XML_VALUE.format("count", 3)
            ),
            XML_CALL.format(XML_VALUE.format("word", "12")),
        )
    ),
    "<tool_call> <arg_key>": (
        f"<tool_call>find\n{GLM_VALUE.format('word', 'größer </b> 7')}"
        f"{GLM_VALUE.format('count', 3)}</tool_call>\n"
        f"<tool_call>find\n{GLM_VALUE.format('word', '12')}</tool_call>"
    ),
    "<|tool_calls_section_begin|>": (
        "<|tool_calls_section_begin|>"
        + KIMI_CALL.format(0, '{"word": "größer </b> 7", "count": 3}')
        + KIMI_CALL.format(1, '{"word": "12"}')
        + "<|tool_calls_section_end|>"
    ),
    "<|tool_list_start|>": (
        '<|tool_call_start|>[find(word="größer </b> 7", count=3), '
        "find(word='12')]<|tool_call_end|>"
    ),
    "<TOOLCALL>": f"<TOOLCALL>[{', '.join(JSON_CALLS)}]</TOOLCALL>",
    "<|tool_call|>": f"<|tool_call|>[{', '.join(JSON_CALLS)}]",
    "<tool_calls>": "<tool_calls>\n{}\n{}\n</tool_calls>".format(*JSON_CALLS),
}


def split(pieces, template="", thinking="none", form=None):
    """Parts of an output that comes in pieces."""
    splitter = Splitter(thinking, form or find_format(template), SCHEMAS)
    parts = [splitter.feed(piece) for piece in pieces[:-1]]
    parts.append(splitter.feed(pieces[-1], ends=True))
    return Said(
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        [call if call.id else (call.name, call.arguments) for part in parts for call in part.calls],
    )


def split_anywhere(text, **options):
    """Parts of an output, which must not depend on the pieces that it comes in."""
    whole = split([text], **options)
    for at in range(len(text) + 1):
        assert split([text[:at], text[at:]], **options) == whole, text[:at]
    assert split([*text], **options) == whole
    return whole


@pytest.mark.parametrize("template", TEXTS)
def test_calls_of_each_format(template):
    calls, expected = TEXTS[template], CALLS
    if "section" in template:
        expected = [(*call, f"functions.find:{at}") for at, call in enumerate(CALLS)]
    assert split_anywhere(calls, template=template) == Said("", "", expected)
    said = split_anywhere(f"Let me 日本 look.\n\n{calls}", template=template)
    assert said == Said("", "Let me 日本 look.", expected)
    text = f"\nI must <b>look\n</think>\n\nSo:\n{calls}"
    said = split_anywhere(text, template=template, thinking="open")
    assert said == Said("I must <b>look", "So:", expected)


@pytest.mark.parametrize("template", TEXTS)
def test_a_block_that_is_no_call_is_content(template):
    begin, end = find_format(template).begin, find_format(template).end
    for body in ("{not JSON", "", '{"name": 3}', "5", "[f(", "[1]", "[" * 5000):
        if body == "5" and "arg_key" in template:
            continue  # a function's name
        for text in (f"a {begin}{body}{end}", f"a {begin}{body}"):
            said = split([text], template=template)
            assert (said.content.replace(" ", ""), said.calls) == (text.replace(" ", ""), [])
            assert split([*text], template=template) == said


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_arguments_that_cannot_be_sent_are_content(value):
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'
    assert split_anywhere(text, template="<tool_call>") == Said("", text, [])
    text = f"<|tool_call_start|>[f(x={value})]<|tool_call_end|>"
    assert split_anywhere(text, template="<|tool_call_start|>").content == text
    for literal in ("b'x'", "2j", "{(1,): 2}", "g()", "{**{}}"):
        text = f"<|tool_call_start|>[f(x={literal})]<|tool_call_end|>"
        assert split([text], template="<|tool_call_start|>").content == text


def test_a_block_ends_after_its_strings():
    text = '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call>b"}}</tool_call> end '
    said = split_anywhere(text, template="<tool_call>")
    assert said == Said("", "end ", [("f", {"x": "a</tool_call>b"})])
    text = "<|tool_call_start|>[f(x='<|tool_call_end|>', y=[true, None])]<|tool_call_end|>"
    said = split_anywhere(text, template="<|tool_call_start|>")
    assert said == Said("", "", [("f", {"x": "<|tool_call_end|>", "y": [True, None]})])


# What models of the families write, and what it means.
OUTPUTS = [
    (
        "<tool_call>",
        '<tool_call> {"name": "find", "arguments": "{\\"x\\": [1.5]}"} </tool_call>',
        {"x": [1.5]},
    ),
    ("<tool_call> <arg_key>", "<tool_call>find</tool_call>", {}),
    ("<tool_call> <arg_key>", "<tool_call>find\n</tool_call>", {}),
    (
        "<tool_call> <arg_key>",
        "<tool_call>find<arg_key>word</arg_key><arg_value>12</arg_value></tool_call>",
        {"word": "12"},
    ),
    (
        "<tool_call> <arg_key>",
        "<tool_call>find\\n<arg_key>count</arg_key><arg_value>12</arg_value></tool_call>",
        {"count": 12},
    ),
    ("<|tool_call|>", '<|tool_call|> [{"arguments": {"x": 4}, "name": "find"}]', {"x": 4}),
    (
        "<TOOLCALL>",
        '<TOOLCALL>[{"name": "find", "arguments": {"x": null}}]</TOOLCALL>',
        {"x": None},
    ),
    (
        "<|tool_call_start|>",
        "<|tool_call_start|> [find(word='cat > f << EOF\nimport csv\r\nEOF', from=1, "
        "tags={'b', 'a'})]<|tool_call_end|>",
        {"word": "cat > f << EOF\nimport csv\r\nEOF", "from": 1, "tags": ["b", "a"]},
    ),
    (
        "<|tool_call_start|>",
        '<|tool_call_start|>[find(word=\'Martha\\\'s, from=\', x="]", y={"a": true})]'
        "<|tool_call_end|>",
        {"word": "Martha's, from=", "x": "]", "y": {"a": True}},
    ),
    (
        "<|tool_call_start|>",
        '<|tool_call_start|>[{"name": "find", "arguments": {"x": "a\\nb"}}]<|tool_call_end|>',
        {"x": "a\nb"},
    ),
]


@pytest.mark.parametrize(("template", "text", "arguments"), OUTPUTS)
def test_what_models_write(template, text, arguments):
    assert split_anywhere(text, template=template) == Said("", "", [("find", arguments)])


@pytest.mark.parametrize(
    ("own_id", "name"),
    [("functions.find:0", "find"), ("a.b:12", "a.b"), ("3", "find"), ("functions.3", "find")],
)
def test_ids_are_the_models_own(own_id, name):
    """Kimi's template writes them in the next turn; its calls may come within thoughts."""
    begin = "<|tool_calls_section_begin|>"
    call = f'<|tool_call_begin|>{own_id} <|tool_call_argument_begin|> {{"x": 1}} <|tool_call_end|>'
    text = f"hm {begin}{call}<|tool_calls_section_end|>"
    said = split_anywhere(text, template=begin, thinking="open")
    assert said == Said("hm", "", [(name, {"x": 1}, own_id)])


def channel(name, text, **attributes):
    told = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<|open|>{name}{told}<|sep|>{text}<|close|>{name}<|sep|>"


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("calls", [CALLS, []])
def test_channels_of_kimi_3(thinks, calls):
    """Thoughts, response and calls have tags, with and without calls."""
    types = {str: "string", int: "number"}
    blocks = [
        "".join(channel("argument", x, key=key, type=types[type(x)]) for key, x in given.items())
        for _, given in calls
    ]
    told = [channel("call", each, tool="find", index=1) for each in blocks]
    text = channel("response", "So:") + (channel("tools", "".join(told)) if calls else "")
    if thinks:
        text = "hm" + channel("think", "").removeprefix("<|open|>think<|sep|>") + text
    else:
        text = text.removeprefix("<|open|>response<|sep|>")
    form = find_format("<|end_of_msg|>")
    begin = f"<|open|>{'think' if thinks else 'response'}<|sep|>"
    thinking = thinking_of("<|end_of_msg|>", begin, form)
    assert split_anywhere(text, form=form, thinking=thinking) == Said("hm" * thinks, "So:", calls)
    text = text.partition("<|close|>response")[0]
    text = text.replace("So:", f"[{JSON_CALLS[1]}]")  # a grammar's, where calls must come
    said = split_anywhere(text, form=forced(form), thinking=thinking)
    assert said == Said("hm" * thinks, "", CALLS[1:])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (channel("argument", "12", key="a &amp; &quot;b&quot;", type="string"), {'a & "b"': "12"}),
        (channel("argument", "12", key="a", type="number"), {"a": 12}),
        (channel("argument", '{"b": null}', key="a", type="object"), {"a": {"b": None}}),
        ("", {}),
        (channel("json", '{"a": [1]}', type="object"), {"a": [1]}),
    ],
)
def test_arguments_of_kimi_3_have_types(body, arguments):
    call = channel("call", body, tool="f", index=1)
    text = f"<|close|>response<|sep|>{channel('tools', call)}<|close|>message<|sep|>"
    assert split_anywhere(text, template="<|end_of_msg|>").calls == [("f", arguments)]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({}, "None", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "integer"}, "many", "many"),
        ({"type": 3, "anyOf": {}, "enum": 5}, "7", 7),
    ],
)
def test_values_in_tags_follow_the_schema(schema, text, value):
    splitter = Splitter("none", find_format("<function="), {"f": {"properties": {"x": schema}}})
    block = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n"
    (call,) = splitter.feed(f"{block}</tool_call>", ends=True).calls
    assert call.arguments == {"x": value}
    assert type(call.arguments["x"]) is type(value)


def test_values_in_tags_are_of_the_schemas_types():
    values = {"word": "true", "count": "[1]", "other": "a, 5"}
    text = XML_CALL.format("".join(XML_VALUE.format(*item) for item in values.items()))
    said = split([text], template="<function=")
    assert said.calls == [("find", {"word": "true", "count": [1], "other": "a, 5"})]


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        ("none", " a <think> b</think> \n", Said("", " a <think> b</think> \n")),
        ("possible", "\n<think>\na\n</think>\n\nb ", Said("a", "b ")),
        ("possible", " <thin", Said("", " <thin")),
        ("possible", " a</think>", Said("", " a</think>")),
        ("open", "a b </thin", Said("a b </thin", "")),
        ("open", "\n\n</think>\n\n", Said("", "")),
    ],
)
def test_thoughts(thinking, text, expected):
    assert split_anywhere(text, thinking=thinking) == expected


def test_forced_calls_are_the_whole_output():
    text = f"[{', '.join(JSON_CALLS)}]"
    assert split_anywhere(text, form=forced(None)) == Said("", "", CALLS)
    assert split_anywhere(text[:40], form=forced(None)) == Said("", text[:40], [])
    said = split_anywhere(f"x</think>{text}", form=forced(None), thinking="open")
    assert said == Said("x", "", CALLS)


@pytest.mark.parametrize(
    ("template", "prompt_end", "thinking"),
    [
        ("<think></think>", "<|assistant|>\n<think>\n", "open"),
        ("<think></think>", "<|assistant|>\n<think>\n\n</think>\n\n", "none"),
        ("<think></think>", "<|assistant|>\n", "possible"),
        ("", "user: <think>", "none"),
    ],
)
def test_the_prompt_tells_where_an_output_begins(template, prompt_end, thinking):
    assert thinking_of(template, prompt_end) == thinking
