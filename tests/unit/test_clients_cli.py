"""The command line: what it sends, what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from clients import adapter_list, cli
from tests.unit.client_fakes import FakeServer, Step, send

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        running.inputs += ["guided_decoding_guide_type", "guided_decoding_guide", "lora_name", "bad_words", "end_id"]
        running.scripts["hi"] = [send("Grüße "), send("🦙", "stop")]
        yield running


def _sent(server: FakeServer) -> dict[str, Any]:
    return {
        name: value[0] if isinstance(value, list) else value.item() for name, value in server.seen[-1].tensors.items()
    }


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("mode", ["--stream", "--no-stream"])
def test_text_goes_to_stdout(server: FakeServer, capsys: pytest.CaptureFixture[str], protocol: str, mode: str) -> None:
    if mode == "--no-stream":
        server.scripts["hi"] = [send("Grüße 🦙", "stop")]
    url = server.grpc_url if protocol == "grpc" else server.http_url
    assert cli.main(["hi", mode, "--protocol", protocol, "--url", url]) == cli.OK
    assert capsys.readouterr() == ("Grüße 🦙\n", "")


def test_options_become_tensors(server: FakeServer) -> None:
    options = ["--max-tokens", "5", "--temperature", "0.5", "--seed", "7", "--stop", "END", "--lora", "pirate"]
    more = ["--bad", "no", "--set", "end_id=-1", "--json-schema", '{"type":"object"}', "--url", server.grpc_url]
    assert cli.main(["hi", *options, *more]) == cli.OK
    assert _sent(server) == {
        "text_input": "hi",
        "max_tokens": 5,
        "stream": True,
        "temperature": 0.5,
        "top_p": 1.0,
        "seed": 7,
        "stop_words": "END",
        "bad_words": "no",
        "end_id": -1,
        "lora_name": "pirate",
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": '{"type":"object"}',
    }


def test_choices_are_sent_as_they_are(server: FakeServer) -> None:
    choices = ["a.b", "(x)", "back\\slash", "é"]
    options = [part for choice in choices for part in ("--choice", choice)]
    assert cli.main(["hi", *options, "--close", "--url", server.grpc_url]) == cli.OK
    sent = _sent(server)
    assert (sent["guided_decoding_guide_type"], json.loads(sent["guided_decoding_guide"])) == ("choice", choices)
    assert sent["guided_decoding_close"] is True


def test_a_schema_may_come_from_a_file(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    assert cli.main(["hi", "--json-schema", f"@{tmp_path / 'schema.json'}", "--url", server.grpc_url]) == cli.OK
    assert _sent(server)["guided_decoding_guide"] == '{"type": "array"}'


def test_chat_sends_messages_with_the_system_message_first(server: FakeServer) -> None:
    said = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]'
    server.scripts[said] = [send("ok", "stop")]
    assert cli.main(["--chat", "--system", "Be brief.", "hi", "--url", server.grpc_url]) == cli.OK


def test_json_holds_the_whole_result(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"num_input_tokens": np.array([[3]], np.int32), "num_output_tokens": np.array([[2]], np.int32)}
    server.scripts["hi"] = [send("ho", "length", **counts)]
    assert cli.main(["hi", "--json", "--url", server.grpc_url]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["finish_reason"]) == ("ho", "length")
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}


ENTRY = {"token": "ho", "logprob": -0.5, "bytes": [104, 111], "id": 7, "text_offset": 0, "top_logprobs": []}


def test_log_probs_are_a_table_on_stderr_and_objects_in_json(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = {"logprobs": [json.dumps([ENTRY])], "logprobs_distribution": ["raw"]}
    server.scripts["hi"] = [send("ho", "length", **outputs, prompt_logprobs=[json.dumps([ENTRY])])]
    asked = ["hi", "--top-logprobs", "0", "--prompt-logprobs", "--url", server.grpc_url]
    assert cli.main(asked) == cli.OK
    out, err = capsys.readouterr()
    assert out == "ho\n"
    assert err.count("'ho'   60.7 %") == 2
    assert "prompt (raw)" in err
    assert "answer (raw)" in err
    assert _sent(server)["top_logprobs"] == _sent(server)["top_prompt_logprobs"] == 0
    assert cli.main([*asked, "--json"]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    for entries in (found["sequences"][0]["logprobs"], found["prompt_logprobs"]):
        assert [entry["id"] for entry in entries] == [7]


def test_stats_and_warnings_go_to_stderr(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"num_input_tokens": np.array([[3]], np.int32), "num_output_tokens": np.array([[2]], np.int32)}
    server.scripts["hi"] = [send("ho", "length", warnings=["clipped"], **counts)]
    assert cli.main(["hi", "--stats", "--url", server.grpc_url]) == cli.OK
    out, err = capsys.readouterr()
    assert out == "ho\n"
    assert "warning: clipped" in err
    assert re.search(r"finish_reason length, 3 prompt tokens, first token after \d+ ms, 2 tokens in", err)


def test_the_prompt_may_come_from_stdin(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    assert cli.main(["-", "--url", server.grpc_url]) == cli.OK


def test_a_refusal_is_one_sentence_and_code_1(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = "max_tokens is 0; allowed: >= 1."
    server.scripts["hi"] = [Step("error", message=words, code=grpc.StatusCode.INVALID_ARGUMENT)]
    assert cli.main(["hi", "--url", server.grpc_url]) == cli.REFUSED
    assert capsys.readouterr() == ("", f"error: {words}\n")


def test_no_server_is_code_3_for_the_list_of_adapters_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        url = f"127.0.0.1:{busy.getsockname()[1]}"
    assert adapter_list.main(["--url", url]) == 3
    assert capsys.readouterr().err.startswith(f"error: No server answers at {url} (Connection refused). Start one")


def test_no_server_is_code_3_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as gone:
        pass
    assert cli.main(["hi", "--url", gone.grpc_url]) == cli.NO_SERVER
    out, err = capsys.readouterr()
    assert out == ""
    assert "`make serve`" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv",
    [
        ["hi", "--json-schema", "{"],
        ["hi", "--set", "nonsense=1"],
        ["hi", "--system", "x"],
        ["hi", "--regex", "a", "--choice", "b"],
        ["hi", "--json-schema", "@/does/not/exist"],
    ],
)
def test_wrong_usage_is_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == cli.USAGE


def test_no_prompt_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main([]) == cli.USAGE


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_conversation_sends_all_that_was_said(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [{"role": "user", "content": "one"}]
    second = [*first, {"role": "assistant", "content": "eins"}, {"role": "user", "content": "two"}]
    server.scripts[json.dumps(first)] = [send("eins", "stop")]
    server.scripts[json.dumps(second)] = [send("zwei", "stop")]
    monkeypatch.setattr("sys.stdin", _Terminal("one\n\ntwo\n"))
    assert cli.main(["--chat", "--url", server.grpc_url]) == cli.OK
    assert "eins\n" in capsys.readouterr().out
    assert len(server.seen) == 2


def test_ctrl_c_cancels_the_request_on_the_server(server: FakeServer) -> None:
    server.scripts["hi"] = [send("begun"), Step("wait_for_stop"), send("", "cancelled")]
    command = [sys.executable, "-m", "clients", "hi", "--url", server.grpc_url]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.read(5) == b"begun"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == cli.INTERRUPTED
    assert b"cancelled" in err
    assert b"Traceback" not in err
    assert server.stops == [server.seen[0].request_id]


def test_a_reader_that_leaves_is_no_error(server: FakeServer) -> None:
    server.scripts["hi"] = [send("x" * 70000) for _ in range(4)] + [send("y", "stop")]
    command = f"{sys.executable} -m clients hi --url {server.grpc_url} | head -c 3"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, timeout=20, check=False)
    assert done.stdout == b"xxx"
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


@pytest.mark.parametrize("kind", ["GrpcClient", "HttpClient"])
def test_a_program_that_ends_with_a_stream_open_ends_and_cancels_it(server: FakeServer, kind: str) -> None:
    server.scripts["hi"] = [send("begun"), Step("wait_for_stop"), send("", "cancelled")]
    url = server.grpc_url if kind == "GrpcClient" else server.http_url
    code = f"import clients; stream = clients.{kind}({url!r}).stream('hi'); print(next(stream).text)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"begun\n", b"")
    assert server.stops == [server.seen[0].request_id]
