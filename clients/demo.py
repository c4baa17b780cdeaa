"""`make demo`: starts a server, shows what it can do, ends it. Exit code 0 only when everything held.

Knows the server by its command line and the wire only.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from clients import ClientError, GenerateRequest, GrpcClient
from clients.log_probs import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SYSTEM = "You are a helpful assistant. Answer in one short sentence."
READY = re.compile(r"^READY .*grpc://([\d.]+:\d+)")


class NotHeld(Exception):
    """A promise of the demo was broken."""


def stream(client: GrpcClient) -> None:
    """A chat answer, printed as it comes."""
    chunks = 0
    for chunk in client.stream(GenerateRequest(messages=_ask("What is the capital of France?"), max_tokens=40)):
        print(chunk.text, end="", flush=True)
        chunks += 1
    print(f"\n({chunks} pieces)")
    _hold(chunks > 1, "an answer comes in several pieces")


def seeds(client: GrpcClient) -> None:
    """Sampling: the same seed gives the same answer, another seed another one."""
    texts = []
    for seed in (1, 1, 2):
        request = GenerateRequest(text_input="Once upon a time", max_tokens=16, temperature=1.0, seed=seed)
        texts.append(client.generate(request).sequences[0].text)
        print(f"seed {seed}:{texts[-1]!r}")
    _hold(texts[0] == texts[1], "the same seed gives the same answer")
    _hold(texts[1] != texts[2], "another seed gives another answer")


def stop_words(client: GrpcClient) -> None:
    """A stop word that is cut exactly, wherever it lies in a token."""
    request = GenerateRequest(text_input="1, 2, 3, 4, 5, 6,", max_tokens=40, stop_words=["9"])
    answer = client.generate(request).sequences[0]
    print(f"{answer.text!r} ({answer.finish_reason})")
    _hold(answer.text.endswith("9") and answer.finish_reason == "stop", "the answer ends at its stop word")


def structure(client: GrpcClient) -> None:
    """JSON that satisfies a schema, sampled at temperature 1: valid because nothing else can be written."""
    properties = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}
    request = GenerateRequest(
        text_input="A person:",
        max_tokens=48,
        temperature=1.0,
        seed=1,
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide=json.dumps(schema),
    )
    text = client.generate(request).sequences[0].text
    print(text)
    person = json.loads(text)
    _hold(list(person) == ["name", "age"] and 0 <= person["age"] <= 120, "the answer satisfies its schema")


def tool_call(client: GrpcClient) -> None:
    """A call of a function, its arguments by the function's schema."""
    properties = {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}}
    schema = {"type": "object", "properties": properties, "required": ["city", "unit"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    request = GenerateRequest(
        messages=_ask("What is the weather in Paris?"), max_tokens=60, tools=[tool], tool_choice="get_weather"
    )
    (call,) = client.generate(request).tool_calls
    print(f"{call.name}({call.arguments})")
    arguments = json.loads(call.arguments)
    _hold(list(arguments) == ["city", "unit"] and arguments["unit"] in ("celsius", "fahrenheit"), "a call is valid")


def log_probs(client: GrpcClient) -> None:
    """How likely every token was, what else might have come, and how surprising the prompt is."""
    request = GenerateRequest(
        text_input="The capital of France is", max_tokens=6, top_logprobs=3, top_prompt_logprobs=0
    )
    result = client.generate(request)
    for entries in (result.prompt_logprobs, result.logprobs):
        print(*table(entries), sep="\n")
    values = [entry.logprob for entry in result.logprobs]
    _hold(
        len(values) == 6 and all(value is not None and value < 0 for value in values),
        "every token has a log-prob, and it is no zero",
    )
    _hold("".join(entry.token for entry in result.logprobs) == result.text, "the tokens join to the text")
    _hold(all(entry.top_logprobs[0].id == entry.id for entry in result.logprobs), "greedy takes the likeliest token")


def adapter(client: GrpcClient) -> None:
    """LoRA adapters, named by the request: the same question to the model and to two of them."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answers = {}
    for name in (None, "pirate", "json"):  # the first one waits for the compiler
        request = GenerateRequest(messages=question, max_tokens=40, lora_name=name)
        answers[name] = client.generate(request).sequences[0].text
        print(f"{name or 'no adapter'}: {answers[name]}")
    _hold(len(set(answers.values())) == 3, "an adapter changes the answer")
    _hold("Arr" in answers["pirate"] and "Arr" not in answers[None], "the adapter pirate speaks like one")
    _hold("answer" in json.loads(answers["json"]), "the adapter json answers as JSON without being made to")


def prefix_reuse(client: GrpcClient) -> None:
    """KV cache blocks that a second request with the same beginning does not compute again."""
    text = "A long text that many requests share. " * 20
    reused = []
    for question in ("Who?", "Where?"):
        request = GenerateRequest(text_input=text + question, max_tokens=1, return_perf_metrics=True)
        reused.append(int(client.generate(request).outputs["kv_cache_reused_blocks"].reshape(-1)[0]))
    print(f"blocks reused: {reused[0]} by the first request, {reused[1]} by the second")
    _hold(reused[1] >= 4, "the second request reuses the first one's blocks")


SHOWS: dict[str, Callable[[GrpcClient], None]] = {
    "A streamed answer": stream,
    "Seeds": seeds,
    "A stop word": stop_words,
    "JSON by a schema": structure,
    "A tool call": tool_call,
    "Adapters": adapter,
    "Log-probs": log_probs,
    "Prefix reuse": prefix_reuse,
}


def main() -> int:
    """Run every show; returns the exit code."""
    try:
        with _server() as url, GrpcClient(url) as client:
            for title, show in SHOWS.items():
                print(f"\n── {title} ──")
                show(client)
    except (NotHeld, ClientError) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    print("\nAll of it held.")
    return 0


@contextmanager
def _server() -> Iterator[str]:
    """A server on free ports; gives its gRPC address."""
    command = [sys.executable, "-m", "python_backend.server", "--exit-with-parent"]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield _wait_ready(process.stdout)
        finally:
            process.send_signal(signal.SIGTERM)


def _wait_ready(lines: Iterator[str]) -> str:
    for line in lines:
        print(line, end="", flush=True)
        ready = READY.match(line)
        if ready:
            return ready[1]
    raise NotHeld("the server did not start; the lines above say why")


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def _hold(held: bool, promise: str) -> None:
    if not held:
        raise NotHeld(f"this did not hold: {promise}")


if __name__ == "__main__":
    sys.exit(main())
