"""Tool calls of the real server: through the model's template, enforced, whole and streamed, on every transport."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from clients import ClientError, GrpcClient, HttpClient, Toolbox, cli
from tests.server.launched import ROOT, ServerAddresses

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def get_weather(city: Literal["Paris", "Rome"], days: int = 1) -> dict[str, object]:
    """The weather of a city."""
    return {"city": city, "sky": "blue", "days": days}


class Reminder(BaseModel):
    """Remind the user of something."""

    text: str = Field(max_length=20)
    minutes: int = Field(ge=1, le=90)


TOOLBOX = Toolbox(get_weather, Reminder)


@pytest.fixture(scope="module")
def client(server: ServerAddresses) -> Iterator[GrpcClient]:
    with GrpcClient(server.grpc) as made:
        yield made


def test_a_required_call_comes_back_as_an_object_and_runs(client):
    answer = client.generate(QUESTION, max_tokens=80, **TOOLBOX.values("get_weather"))
    (call,) = answer.tool_calls
    assert (call.name, answer.text, answer.finish_reason) == ("get_weather", "", "stop")
    assert TOOLBOX.parse(call).city in ("Paris", "Rome")
    said = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call.as_message_entry()]}, TOOLBOX.run(call)]
    assert client.generate(said, max_tokens=8, **TOOLBOX.values("none")).tool_calls == ()


@pytest.mark.parametrize("seed", range(4))
def test_sampled_calls_satisfy_their_schemas(client, seed):
    values = TOOLBOX.values("required", parallel=False)
    answer = client.generate(QUESTION, max_tokens=120, temperature=1.0, seed=seed, num_return_sequences=2, **values)
    for sequence in answer.sequences:
        assert sequence.finish_reason == "stop"
        (call,) = sequence.tool_calls
        assert TOOLBOX.parse(call) is not None


def test_a_stream_and_every_transport_give_the_same_calls(client, server):
    values = {"max_tokens": 120, **TOOLBOX.values("required", parallel=False)}
    whole = client.generate(QUESTION, **values)
    with client.stream(QUESTION, **values) as stream:
        pieces = [entry for chunk in stream for entries in chunk.tool_calls for entry in entries]
    assert len(pieces) > 2
    assert [entry["function"].get("name") for entry in pieces if "id" in entry] == [whole.tool_calls[0].name]
    assert stream.result.tool_calls[0].arguments == whole.tool_calls[0].arguments
    with HttpClient(f"http://{server.http}") as http:
        assert http.generate(QUESTION, **values).tool_calls[0].arguments == whole.tool_calls[0].arguments
        with http.stream(QUESTION, **values) as stream:
            list(stream)
        assert stream.result.tool_calls[0].arguments == whole.tool_calls[0].arguments


def test_without_need_the_model_may_just_answer(client):
    answer = client.generate([{"role": "user", "content": "Say hello."}], max_tokens=12, **TOOLBOX.values())
    plain = client.generate([{"role": "user", "content": "Say hello."}], max_tokens=12, **TOOLBOX.values("none"))
    assert plain.tool_calls == ()
    assert answer.text or answer.tool_calls


def test_closing_in_time_closes_a_call(client):
    values = TOOLBOX.values("Reminder")
    answer = client.generate(QUESTION, max_tokens=40, temperature=1.0, seed=3, guided_decoding_close=True, **values)
    assert [type(found) for found in TOOLBOX.parse_all(answer)] == [Reminder]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tools": "[]"}, "non-empty JSON list"),
        ({"tool_choice": "auto"}, "tool_choice was sent without tools"),
        ({**TOOLBOX.values("weather")}, "allowed: auto, none, required, or one of get_weather, Reminder"),
        ({**TOOLBOX.values(), "guided_decoding_guide_type": "json"}, "exclude each other"),
        ({**TOOLBOX.values(), "guided_decoding_whitespace": "free"}, "tool calls are written with single"),
        ({**TOOLBOX.values(), "beam_width": 2}, "beam_width is 2"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(client, values, words):
    with pytest.raises(ClientError, match=words):
        client.generate(QUESTION, **values)
    with pytest.raises(ClientError, match="tools need messages"):
        client.generate("no messages", **TOOLBOX.values())


def test_a_schema_that_cannot_be_enforced_is_refused_with_the_keyword(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}]
    with pytest.raises(ClientError, match="keyword not at"):
        client.generate(QUESTION, tools=tools)


def test_the_command_line_prints_calls(server, tmp_path: Path, capsys):
    (tmp_path / "tools.json").write_text(json.dumps(TOOLBOX.definitions))
    options = ["--tools", f"@{tmp_path / 'tools.json'}", "--tool-choice", "get_weather", "--url", server.grpc]
    assert cli.main(["--chat", "The weather in Rome?", *options]) == cli.OK
    assert json.loads(capsys.readouterr().out)["name"] == "get_weather"


def test_the_code_of_the_page_runs(server):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), flags=re.DOTALL)
    code = code.replace("GrpcClient()", f"GrpcClient({server.grpc!r})")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("get_weather city='")
