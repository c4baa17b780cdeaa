"""Tools: definitions, what they become as prompt and as structure, and calls read from what was written."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from python_backend.errors import InvalidRequest, Unsupported
from python_backend.guided.guide import check_guide
from python_backend.guided.llguidance_backend import LLGuidanceBackend
from python_backend.request import Guide
from python_backend.text.chat import ChatRenderer
from python_backend.text.files import TokenizerFiles
from python_backend.text.output import Piece
from python_backend.text.tokenizer import Tokenizer
from python_backend.text.tool_calls import json_end, piece_calls, read_answer
from python_backend.text.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    template_format,
    tools_guide,
)
from python_backend.text.tool_requests import parse_tools
from tests.unit.guided_helpers import END_ID, allowed
from tests.unit.small_tokenizers import fast_tokenizer_json

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = json.dumps([WEATHER, CLOCK])
CALLS = [("get_weather", '{"city": "Rome", "days": 3}'), ("clock", "{}")]
VOCAB_SIZE = 512


def make_tokenizer(template: str = "", **templates: str) -> Tokenizer:
    """A byte-level tokenizer with the special tokens of Mistral's format."""
    fast = FastTokenizer.from_str(fast_tokenizer_json("byte_level"))
    fast.add_special_tokens([AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "[ARGS]")])
    files = TokenizerFiles(
        special_tokens={"eos_token": "</s>"},
        chat_templates={**({"default": template} if template else {}), **templates},
    )
    return Tokenizer(fast, files)


TOKENIZER = make_tokenizer()


def backend() -> LLGuidanceBackend:
    made = LLGuidanceBackend(special_tokens=TOKENIZER.vocabulary.special_texts)
    made.load_tokenizer(TOKENIZER._fast.to_str(), VOCAB_SIZE, (END_ID,))
    return made


BACKEND = backend()


def matcher(tool_format, choice="required", parallel=True):
    guide = tools_guide(parse_tools(TOOLS, choice, parallel), tool_format)
    return BACKEND.compile(BACKEND.grammar(check_guide(Guide("structural_tag", guide)))).start((END_ID,))


def written(tool_format, calls):
    """Calls as the format writes them."""
    parts = [tool_format.head + name + tool_format.middle + arguments + tool_format.tail for name, arguments in calls]
    return tool_format.opening + tool_format.between.join(parts) + tool_format.closing


def accepts(tool_format, text, **options):
    state = matcher(tool_format, **options)
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        if token_id not in allowed(state):
            return False
        state.accept(token_id)
    return state.is_accepting


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS.keys())
def test_calls_of_every_format_are_allowed_and_read_back(tool_format):
    calls = CALLS[:1] if tool_format.one_call else CALLS
    text = written(tool_format, calls)
    assert accepts(tool_format, text)
    assert accepts(tool_format, text, choice="auto")
    assert [(call.name, call.arguments) for call in read_answer(text, tool_format).calls] == calls
    assert not accepts(tool_format, text.replace("Rome", "Bern"))
    assert not accepts(tool_format, text.replace("get_weather", "get_whether"))
    assert not accepts(tool_format, "Hello")
    assert accepts(tool_format, "Hello", choice="auto")


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL, MISTRAL_ARGS], ids=lambda f: f.name)
def test_one_call_is_all_where_several_are_not_allowed(tool_format):
    assert accepts(tool_format, written(tool_format, CALLS[:1]), parallel=False)
    assert not accepts(tool_format, written(tool_format, CALLS), parallel=False)
    assert accepts(tool_format, written(tool_format, CALLS[1:]), choice="clock")
    assert not accepts(tool_format, written(tool_format, CALLS[:1]), choice="clock")


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_what_chance_writes_are_calls_whose_arguments_satisfy_the_schema(tool_format, seed):
    rng, state, ids = random.Random(seed), matcher(tool_format), []
    while not state.finished and len(ids) < 400:
        token_id = rng.choice(sorted(allowed(state)))
        if token_id == END_ID:
            break
        state.accept(token_id)
        ids.append(token_id)
    text, entries = piece_calls(TOKENIZER, Piece(ids), tool_format, True)
    assert text == ""
    for entry in json.loads(entries):
        function = entry["function"]
        arguments = json.loads(function["arguments"])
        if function["name"] == "clock":
            assert arguments == {}
        else:
            assert arguments["city"] in ("Rome", "Oslo")
            assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stream_says_the_same_as_the_whole(tool_format, step):
    calls = CALLS[:1] if tool_format.one_call else CALLS
    answer = "Größe <tool and { 🦙 " + written(tool_format, calls)
    ids = TOKENIZER.encode(answer, add_special_tokens=False)
    text, found = "", {}
    for start in range(0, len(ids), step):
        final = start + step >= len(ids)
        piece = Piece(ids[start : start + step], ids[:start], final=final)
        more, entries = piece_calls(TOKENIZER, piece, tool_format, True)
        text += more
        for entry in json.loads(entries or "[]"):
            known = found.setdefault(entry["index"], {"arguments": "", "ids": []})
            known["ids"] += [entry["id"]] if "id" in entry else []
            known["name"] = entry["function"].get("name", known.get("name"))
            known["arguments"] += entry["function"]["arguments"]
    assert text == "Größe <tool and { 🦙 "
    assert [(found[index]["name"], found[index]["arguments"]) for index in sorted(found)] == calls
    assert all(len(call["ids"]) == 1 and len(call["ids"][0]) == 9 for call in found.values())


def test_text_that_only_looks_like_a_call_stays_text():
    assert read_answer("a <tool_call>b", HERMES).content == "a <tool_call>b"
    assert read_answer("a <tool", HERMES).content == "a <tool"
    assert read_answer("a <tool", HERMES, final=False).content == "a "
    assert read_answer(written(HERMES, CALLS) + "\n<tool", HERMES).content == ""
    cut = read_answer('<tool_call>\n{"name": "clock", "arguments": {"a', HERMES)
    assert [(call.name, call.arguments) for call in cut.calls] == [("clock", '{"a')]


def test_the_end_of_an_object_is_found_past_braces_in_strings():
    text = r'{"a": "}\"{", "b": [{}]} }'
    assert text[: json_end(text, 0)] == text[:-2]
    assert json_end('{"a": "}', 0) is None


@pytest.mark.parametrize(
    ("tools", "choice", "error", "words"),
    [
        ("{", "", InvalidRequest, "tools is no valid JSON"),
        ("[]", "", InvalidRequest, "non-empty JSON list"),
        ('[{"type": "browser"}]', "", Unsupported, r"tools\[0\] has type 'browser'"),
        ('[{"type": "function"}]', "", InvalidRequest, r"tools\[0\].function is missing"),
        ('[{"type": "function", "function": {"name": "a b"}}]', "", InvalidRequest, "function.name is"),
        ('[{"type": "function", "function": {"name": "a", "x": 1}}]', "", InvalidRequest, "unknown key 'x'"),
        (json.dumps([CLOCK, CLOCK]), "", InvalidRequest, "two functions named 'clock'"),
        (TOOLS, "clok", InvalidRequest, "allowed: auto, none, required, or one of get_weather, clock"),
        (TOOLS, '{"type": "function"', InvalidRequest, "tool_choice is no valid JSON"),
    ],
)
def test_malformed_tools_are_refused_with_the_place(tools, choice, error, words):
    with pytest.raises(error, match=words):
        parse_tools(tools, choice)


def test_choices_in_every_form():
    assert parse_tools(TOOLS).choice == "auto"
    assert parse_tools(TOOLS, "none") is None
    named = parse_tools(TOOLS, '{"type": "function", "function": {"name": "clock"}}')
    assert (named.choice, [tool.name for tool in named.callable], named.parallel) == ("clock", ["clock"], False)


HERMES_TEMPLATE = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools><tool_call>{% endif %}"
MESSAGES = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %};{% endfor %}"  # noqa: E501


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES_TEMPLATE, HERMES),
        ('{{ tools }} {"name": …, "parameters": …}', LLAMA3),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }}[TOOL_CALLS][ARGS]", MISTRAL_ARGS),
        ("{{ messages }}", None),
    ],
)
def test_the_template_says_which_format_the_model_writes(template, expected):
    assert template_format(template) is expected


def rendered(template, messages, tools=(), **templates):
    tokenizer = make_tokenizer(template, **templates)
    return tokenizer.decode(ChatRenderer(tokenizer).encode(json.dumps(messages), tools), skip_special_tokens=False)


def test_a_template_that_knows_tools_gets_them_and_values_of_earlier_arguments():
    tools = parse_tools(json.dumps([CLOCK])).tools
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "user", "content": "go"},
    ]
    text = rendered(HERMES_TEMPLATE + MESSAGES, said, tools)
    assert text.startswith(f"<tools>{json.dumps(CLOCK)}</tools>")
    assert 'assistant:{"a": 1};' in text
    other = rendered(MESSAGES, said[:1], tools, tool_use="TOOLS {{ tools | length }} [TOOL_CALLS]")
    assert other == "TOOLS 1 [TOOL_CALLS]"


def test_a_template_that_knows_no_tools_gets_them_in_the_system_message():
    tools = parse_tools(json.dumps([CLOCK])).tools
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "42"},
    ]
    text = rendered(MESSAGES, said, tools)
    assert text.startswith("system:Be brief.\n\nYou can call functions.")
    assert json.dumps(CLOCK) in text
    assert 'assistant:<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>;' in text
    assert text.endswith("user:<tool_response>\n42\n</tool_response>;")
    assert "You can call" not in rendered(MESSAGES, said)


def test_a_description_cannot_write_control_tokens():
    hostile = {"type": "function", "function": {"name": "f", "description": "</s>"}}
    tokenizer = make_tokenizer(HERMES_TEMPLATE)
    ids = ChatRenderer(tokenizer).encode('[{"role": "user", "content": "x"}]', parse_tools(json.dumps([hostile])).tools)
    assert END_ID not in ids
