"""Our clients against the real server: four transports, streamed and whole, agree with each other."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest

import clients
from tests.server.launched import ROOT, ServerAddresses
from tests.unit.client_runs import EVERY_CLIENT, KINDS, generate, make_client, stream

PROMPT = "The three largest cities of Österreich 🇦🇹 are"


@dataclass(frozen=True)
class _Running:
    grpc_url: str
    http_url: str
    metrics_url: str

    def active(self) -> int:
        """Requests that the engine works on."""
        text = urllib.request.urlopen(self.metrics_url, timeout=5).read().decode()
        found = re.search(r'nv_trt_llm_request_metrics\{[^}]*request_type="active"[^}]*\} (\d+)', text)
        assert found
        return int(found[1])

    def wait_until(self, active: int, within_s: float = 2.0) -> None:
        deadline = time.monotonic() + within_s
        while self.active() != active:
            assert time.monotonic() < deadline, f"{self.active()} requests are active, not {active}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def running(server: ServerAddresses) -> _Running:
    return _Running(server.grpc, f"http://{server.http}", f"http://{server.metrics}/metrics")


def test_every_transport_gives_the_same_answer_streamed_and_whole(running: _Running) -> None:
    answers: dict[str, clients.Result] = {}
    for kind in KINDS:
        chunks, answers[f"{kind} streamed"] = stream(kind, running, PROMPT, max_tokens=24)
        assert len(chunks) > 12, "tokens come as they are made"
        assert "".join(chunk.text for chunk in chunks) == answers[f"{kind} streamed"].text
        answers[f"{kind} whole"] = generate(kind, running, PROMPT, max_tokens=24)
    texts = {answer.text for answer in answers.values()}
    assert len(texts) == 1, answers
    assert "\ufffd" not in texts.pop()
    assert {answer.finish_reason for answer in answers.values()} == {"length"}
    assert {answer.warnings for answer in answers.values()} == {()}
    whole = {answer.usage for name, answer in answers.items() if name.endswith("whole")}
    assert [usage.completion_tokens for usage in whole] == [24]


@EVERY_CLIENT
def test_a_seed_makes_sampling_repeatable(kind: str, running: _Running) -> None:
    once, again = (generate(kind, running, PROMPT, max_tokens=12, temperature=0.9, seed=5).text for _ in range(2))
    other = generate(kind, running, PROMPT, max_tokens=12, temperature=0.9, seed=6).text
    assert once == again != other


def test_a_temperature_without_a_seed_varies(running: _Running) -> None:
    texts = {generate("grpc", running, "Once upon a time", max_tokens=12, temperature=1.0).text for _ in range(4)}
    assert len(texts) > 1


def test_chat_messages_go_through_the_models_template(running: _Running) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    answers = [generate(kind, running, messages, max_tokens=24) for kind in KINDS]
    assert len({answer.text for answer in answers}) == 1
    assert "Paris" in answers[0].text
    assert answers[0].finish_reason == "stop"
    assert "<|im" not in answers[0].text
    assert (answers[0].usage.prompt_tokens or 0) > 12, "the template adds tokens"


@EVERY_CLIENT
def test_a_stop_word_ends_the_text(kind: str, running: _Running) -> None:
    result = generate(kind, running, "1, 2, 3, 4, 5,", max_tokens=32, stop_words=["9"])
    assert (result.text, result.finish_reason) == (" 6, 7, 8, 9", "stop")


@EVERY_CLIENT
def test_samples_and_beams_are_several_sequences(kind: str, running: _Running) -> None:
    samples = generate(kind, running, PROMPT, max_tokens=8, num_return_sequences=3, temperature=1.2, seed=1)
    assert len({sequence.text for sequence in samples.sequences}) == 3
    beams = generate(kind, running, PROMPT, max_tokens=8, beam_width=2, num_return_sequences=2)
    assert len({sequence.text for sequence in beams.sequences}) == 2
    assert {s.finish_reason for s in [*samples.sequences, *beams.sequences]} == {"length"}


def test_other_outputs_are_the_same_over_grpc_and_http(running: _Running) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "return_log_probs": True, "return_perf_metrics": True}
    grpc, http = (generate(kind, running, PROMPT, **asked).outputs for kind in ("grpc", "http"))
    assert set(grpc) == set(http)
    assert grpc["output_log_probs"].shape == (1, 1, 6)
    assert grpc["output_log_probs"].reshape(-1).tolist() == pytest.approx(http["output_log_probs"].tolist(), rel=1e-5)
    assert int(grpc["first_token_time_ns"].flat[0]) > int(grpc["arrival_time_ns"].flat[0])


@EVERY_CLIENT
def test_leaving_a_stream_frees_the_engine(kind: str, running: _Running) -> None:
    running.wait_until(active=0)
    chunks, result = stream(kind, running, PROMPT, leave_after=3, max_tokens=3000, end_id=-1)
    assert (len(chunks), result.finish_reason) == (3, None)
    running.wait_until(active=0)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_cancelling_at_once_leaves_nothing_running(kind: str, running: _Running) -> None:
    running.wait_until(active=0)
    with make_client(kind, running) as client:
        for _ in range(5):
            client.stream(PROMPT, max_tokens=3000, end_id=-1).cancel()
    time.sleep(0.3)
    running.wait_until(active=0)


def test_cancelling_a_task_frees_the_engine(running: _Running) -> None:
    running.wait_until(active=0)

    async def run() -> None:
        async with clients.AsyncGrpcClient(running.grpc_url) as client:
            task = asyncio.create_task(client.generate(PROMPT, max_tokens=3000, end_id=-1))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    running.wait_until(active=0)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_stop_request_of_somebody_else_raises_cancelled(kind: str, running: _Running) -> None:
    with make_client(kind, running) as client, client.stream(PROMPT, max_tokens=3000, end_id=-1) as answer:
        next(answer)
        with make_client("grpc" if kind == "http" else "http", running) as other:
            other.stop(answer.request_id)
        with pytest.raises(clients.Cancelled) as caught:
            list(answer)
    assert caught.value.text == answer.result.text != ""
    running.wait_until(active=0)


@EVERY_CLIENT
def test_a_timeout_fires_on_time_and_keeps_the_text(kind: str, running: _Running) -> None:
    begun = time.monotonic()
    with pytest.raises(clients.DeadlineExceeded) as caught:
        stream(kind, running, PROMPT, max_tokens=3000, end_id=-1, timeout=0.6)
    assert 0.6 <= time.monotonic() - begun < 1.6
    assert caught.value.text
    running.wait_until(active=0)


@EVERY_CLIENT
def test_timeout_ms_is_no_error_but_a_finish_reason(kind: str, running: _Running) -> None:
    result = generate(kind, running, PROMPT, max_tokens=3000, end_id=-1, timeout_ms=400)
    assert result.finish_reason == "timeout"
    assert result.text


@EVERY_CLIENT
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 0}, r"request_output_len is 0; allowed: >= 1"),
        ({"temperature": -1.0}, r"temperature is -1\.0; allowed: >= 0"),
        ({"beam_width": 99}, r"beam_width is 99; allowed"),
        ({"lora_name": "nobody"}, "nobody"),
    ],
)
def test_refusals_are_typed_and_keep_the_servers_words(
    kind: str, running: _Running, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(clients.RequestRefused, match=words):
        generate(kind, running, PROMPT, **values)


@EVERY_CLIENT
def test_a_prompt_that_is_too_long_is_refused_with_the_limit(kind: str, running: _Running) -> None:
    with pytest.raises(clients.RequestRefused, match="4095"):
        generate(kind, running, "word " * 5000, max_tokens=1)


@EVERY_CLIENT
def test_an_unknown_model_is_refused(kind: str, running: _Running) -> None:
    with pytest.raises(clients.RequestRefused, match="'nope'"):
        generate(kind, running, PROMPT, model="nope")


@pytest.mark.parametrize("kind", ["grpc_aio", "http_aio"])
def test_forty_streams_at_once_all_come_to_their_end(kind: str, running: _Running) -> None:
    async def run() -> list[clients.Result]:
        async with make_client(kind, running) as client:

            async def ask(number: int) -> clients.Result:
                async with await client.stream(f"{number} + {number} =", max_tokens=8, end_id=-1) as answer:
                    async for _ in answer:
                        pass
                return answer.result

            return await asyncio.gather(*(ask(number) for number in range(40)))

    results = asyncio.run(run())
    assert {result.finish_reason for result in results} == {"length"}
    assert all(result.text for result in results)


def test_the_unary_front_takes_the_same_requests(running: _Running) -> None:
    expected = generate("grpc", running, PROMPT, max_tokens=12)
    result = generate("grpc", running, PROMPT, max_tokens=12, model="ensemble_unary")
    assert (result.text, result.usage) == (expected.text, expected.usage)


@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--protocol", "http"]])
def test_the_command_line_answers(running: _Running, options: list[str]) -> None:
    url = running.http_url if "http" in options else running.grpc_url
    command = [
        sys.executable,
        "-m",
        "clients",
        "1, 2, 3, 4, 5,",
        "--max-tokens",
        "8",
        "--url",
        url,
        "--stats",
        *options,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, " 6, 7, 8\n"), done.stderr
    assert "finish_reason length, 14 prompt tokens" in done.stderr


_EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "clients.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(_EXAMPLES)))
def test_the_examples_of_the_docs_run(running: _Running, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = _EXAMPLES[number].replace("127.0.0.1:8001", running.grpc_url)
    exec(compile(code, f"docs/clients.md, example {number}", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out
    running.wait_until(active=0)
