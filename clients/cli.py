"""`python -m clients`: ask a server from a terminal.

Text goes to standard output; everything about it (statistics, warnings, errors) to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from clients import arguments as args
from clients import log_probs
from clients.errors import ClientError, ServerUnavailable
from clients.grpc_client import GrpcClient
from clients.http_client import HttpClient
from clients.types import GenerateRequest, Prompt, Result

Client: TypeAlias = "GrpcClient | HttpClient"

OK, REFUSED, USAGE, NO_SERVER, INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(slots=True)
class _Clock:
    """When things happened, in time.monotonic() seconds."""

    start: float
    first: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = args.parse(argv)
    prompt = arguments.prompt
    if prompt == "-":
        prompt = sys.stdin.read()
    if prompt is None and not (arguments.chat and sys.stdin.isatty()):
        _note("Give a prompt, or - to read it from standard input, or --chat in a terminal for a conversation.")
        return USAGE
    kind = GrpcClient if arguments.protocol == "grpc" else HttpClient
    try:
        with kind(arguments.url, model=arguments.model) as client:
            if prompt is None:
                return _converse(client, arguments)
            _ask(client, arguments, args.messages(arguments, prompt) if arguments.chat else prompt)
            return OK
    except ClientError as error:
        _note(f"error: {error}")
        return NO_SERVER if isinstance(error, ServerUnavailable) else REFUSED
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        _note("interrupted; the request was cancelled")
        return INTERRUPTED


def _ask(client: Client, arguments: argparse.Namespace, prompt: Prompt) -> Result:
    """Send one request and print its answer; leaving it by an exception cancels it on the server."""
    request = GenerateRequest.of(prompt, **arguments.values)
    if arguments.stats or arguments.json:
        request = client.info().with_usage(request)
    live = arguments.stream and not arguments.json and request.num_sequences == 1
    clock = _Clock(time.monotonic())
    if arguments.stream:
        with client.stream(request, timeout=arguments.timeout) as stream:
            try:
                for chunk in stream:
                    clock.first = clock.first or time.monotonic()
                    if live:
                        sys.stdout.write(chunk.text)
                        sys.stdout.flush()
            finally:
                if live and stream.result.text:
                    print(flush=True)
        result = stream.result
    else:
        result = client.generate(request, timeout=arguments.timeout)
    _show(result, arguments, clock, printed=live)
    return result


def _converse(client: Client, arguments: argparse.Namespace) -> int:
    """A conversation: every turn sends all that was said. Ctrl-C ends an answer, Ctrl-D the conversation."""
    _note("Say something. Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation.")
    client.info()
    said: list[dict[str, Any]] = []
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            _note("")
            return OK
        if line.strip() == "/exit":
            return OK
        if not line.strip():
            continue
        turn = [{"role": "user", "content": line}] if said else args.messages(arguments, line)
        try:
            result = _ask(client, arguments, said + turn)
        except ServerUnavailable:
            raise
        except ClientError as error:
            _note(f"error: {error}")
        except KeyboardInterrupt:
            _note("stopped")
        else:
            calls = [call.as_message_entry() for call in result.tool_calls]
            said += [*turn, {"role": "assistant", "content": result.text, **({"tool_calls": calls} if calls else {})}]


def _show(result: Result, arguments: argparse.Namespace, clock: _Clock, *, printed: bool) -> None:
    elapsed = time.monotonic() - clock.start
    if arguments.json:
        print(json.dumps(_as_json(result), ensure_ascii=False), flush=True)
    elif not printed:
        several = len(result.sequences) > 1
        for index, sequence in enumerate(result.sequences):
            if sequence.text or not sequence.tool_calls:
                print(f"[{index}] {sequence.text}" if several else sequence.text, flush=True)
    if not arguments.json:
        _show_tool_calls(result)
    for warning in result.warnings:
        _note(f"warning: {warning}")
    if not arguments.json:
        _show_log_probs(result)
    if arguments.stats:
        _note(_stats_line(result, clock, elapsed))


def _as_json(result: Result) -> dict[str, Any]:
    found = asdict(result)
    found["prompt_logprobs"] = [asdict(entry) for entry in result.prompt_logprobs]
    for shown, sequence in zip(found["sequences"], result.sequences, strict=True):
        shown["logprobs"] = [asdict(entry) for entry in sequence.logprobs]
    found["outputs"] = {name: value.tolist() for name, value in result.outputs.items() if hasattr(value, "tolist")}
    return {"text": result.text, "finish_reason": result.finish_reason, **found}


def _show_tool_calls(result: Result) -> None:
    """One line of JSON for each call, to standard output."""
    for sequence in result.sequences:
        for call in sequence.tool_calls:
            print(f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}', flush=True)


def _show_log_probs(result: Result) -> None:
    if result.prompt_logprobs:
        _note("\nprompt (raw)")
        for line in log_probs.table(result.prompt_logprobs):
            _note(line)
    for index, sequence in enumerate(result.sequences):
        if sequence.logprobs:
            name = f"answer {index}" if len(result.sequences) > 1 else "answer"
            _note(f"\n{name} ({result.logprobs_distribution})")
            for line in log_probs.table(sequence.logprobs):
                _note(line)


def _stats_line(result: Result, clock: _Clock, elapsed: float) -> str:
    parts = [f"finish_reason {result.finish_reason or 'unknown'}"]
    usage = result.usage
    if usage.prompt_tokens is not None:
        parts.append(f"{usage.prompt_tokens} prompt tokens")
    if clock.first is not None:
        parts.append(f"first token after {1000 * (clock.first - clock.start):.0f} ms")
    if usage.completion_tokens is not None:
        speed = usage.completion_tokens / elapsed
        parts.append(f"{usage.completion_tokens} tokens in {elapsed:.2f} s ({speed:.1f} tokens/s)")
    return ", ".join(parts)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
