"""The command line's arguments and the request they make.

Knows nothing of servers or of printing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients import grpc_client, http_client
from clients.types import DATATYPES, DEFAULT_MAX_TOKENS

EXIT_CODES = """\
exit codes: 0 answered, 1 refused or failed, 2 wrong usage, 3 no server, 130 interrupted
examples:
  python -m clients "The capital of France is" --max-tokens 20
  python -m clients --chat --system "Answer in one sentence." "Why is the sky blue?" --temperature 0.7 --seed 1
  python -m clients "Name a colour:" --choice red --choice green --choice blue
  python -m clients "The capital of France is" --max-tokens 5 --top-logprobs 3
  python -m clients - --protocol http --json < prompt.txt
  python -m clients --chat                            (a conversation)
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed arguments; ends the process with code 2 and a message when they are wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.protocol is None:
        arguments.protocol = "http" if (arguments.url or "").startswith(("http://", "https://")) else "grpc"
    if arguments.url is None:
        arguments.url = grpc_client.DEFAULT_URL if arguments.protocol == "grpc" else http_client.DEFAULT_URL
    if arguments.system is not None and not arguments.chat:
        parser.error("--system needs --chat.")
    if arguments.tools is not None and not arguments.chat:
        parser.error("--tools needs --chat.")
    if arguments.stream is None:
        arguments.stream = not arguments.json
    try:
        arguments.values = _values(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return arguments


def messages(arguments: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    """The chat messages for a first turn."""
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": prompt}]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clients",
        description="Talk to the text models of a Triton server.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="text to continue, or with --chat what to say; - reads standard input")
    add("--stream", action=argparse.BooleanOptionalAction, help="print text as it comes (default, unless --json)")
    add("--chat", action="store_true", help="use the model's chat template; without a prompt: a conversation")
    add("--system", help="system message for --chat")
    _add_sampling(parser)
    _add_log_probs(parser)
    guide = parser.add_argument_group("constraints").add_mutually_exclusive_group()
    guide.add_argument("--json-schema", metavar="SCHEMA", help="answer in JSON by this schema; @FILE reads it")
    guide.add_argument("--regex", help="answer matching a regular expression")
    guide.add_argument("--grammar", metavar="EBNF", help="answer by an EBNF grammar with the rule root; @FILE reads it")
    guide.add_argument("--choice", action="append", metavar="TEXT", help="answer one of these; repeat it")
    parser.add_argument(
        "--close",
        action="store_true",
        default=None,
        dest="guided_decoding_close",
        help="complete the structure before --max-tokens",
    )
    add_tool = parser.add_argument_group("tools (with --chat)").add_argument
    add_tool("--tools", metavar="JSON", help="functions that may be called, in OpenAI's shape; @FILE reads them")
    add_tool("--tool-choice", metavar="CHOICE", help="auto (default), none, required, or a function's name")
    group = parser.add_argument_group("server and output")
    group.add_argument("--protocol", choices=("grpc", "http"), help="default: grpc, or what --url says")
    group.add_argument("--url", help=f"default {grpc_client.DEFAULT_URL} or {http_client.DEFAULT_URL}")
    group.add_argument("--model", default="ensemble", help="default %(default)s")
    group.add_argument("--timeout", type=float, metavar="S", help="seconds until the request is given up")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("--stats", action="store_true", help="print tokens, time to first token and speed to stderr")
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("generation").add_argument
    add("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default %(default)s")
    add("--min-tokens", type=int, metavar="N")
    add("--temperature", type=float, metavar="T", help="0 or absent: always the likeliest token")
    add("--top-k", type=int, metavar="K")
    add("--top-p", type=float, metavar="P")
    add("--seed", type=int, metavar="N", help="same seed, same answer")
    add("--repetition-penalty", type=float, metavar="X")
    add("--presence-penalty", type=float, metavar="X")
    add("--frequency-penalty", type=float, metavar="X")
    add("--stop", action="append", metavar="TEXT", dest="stop_words", help="end the answer here; repeat it")
    add("--bad", action="append", metavar="TEXT", dest="bad_words", help="never say this; repeat it")
    add("-n", type=int, metavar="N", dest="num_return_sequences", help="this many answers")
    add("--beam-width", type=int, metavar="N")
    add("--lora", metavar="NAME", dest="lora_name", help="adapter by name")
    add("--set", action="append", metavar="TENSOR=JSON", default=[], help="any other input, such as end_id=-1")


def _add_log_probs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log-probs")
    add = group.add_argument
    add("--logprobs", action="store_const", const=0, dest="top_logprobs", help="a table of how likely each token was")
    add("--top-logprobs", type=int, metavar="N", help="the same with the N likeliest tokens at each place, up to 20")
    add("--prompt-logprobs", action="store_const", const=0, dest="top_prompt_logprobs", help="a table of the prompt")
    add("--top-prompt-logprobs", type=int, metavar="N", help="the same with the N likeliest tokens at each place")
    add("--logprobs-mode", choices=("raw", "processed"), help="the model's own distribution, or what was drawn from")


def _values(arguments: argparse.Namespace) -> dict[str, Any]:
    given = vars(arguments)
    values = {name: given[name] for name in DATATYPES if given.get(name) is not None}
    values.pop("stream", None)
    if arguments.tools is not None:
        values["tools"] = _text_or_file(arguments.tools)
    kind, guide = _guide(arguments)
    if kind:
        values |= {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    for pair in arguments.set:
        name, equals, text = pair.partition("=")
        if not equals or name not in DATATYPES:
            raise ValueError(f"--set {pair}: give NAME=VALUE with one of {', '.join(DATATYPES)}.")
        values[name] = _json_or_text(text)
    return values


def _guide(arguments: argparse.Namespace) -> tuple[str | None, str]:
    if arguments.json_schema is not None:
        schema = _text_or_file(arguments.json_schema)
        try:
            json.loads(schema)
        except ValueError as error:
            raise ValueError(f"--json-schema is not JSON ({error}).") from None
        return "json_schema", schema
    if arguments.regex is not None:
        return "regex", arguments.regex
    if arguments.grammar is not None:
        return "ebnf_grammar", _text_or_file(arguments.grammar)
    if arguments.choice:
        return "choice", json.dumps(arguments.choice, ensure_ascii=False)
    return None, ""


def _text_or_file(value: str) -> str:
    return Path(value[1:]).read_text(encoding="utf-8") if value.startswith("@") else value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
