"""What structure costs and saves: guided answers beside free ones, forced tokens, and the first token."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from clients import AsyncGrpcClient
from loadtests.bench.compare import Section
from loadtests.bench.drivers import ROOT, BenchError, ServerDriver

if TYPE_CHECKING:
    from loadtests.bench.sections import Bench

CONCURRENCY = 32
_SPEC = ROOT / "build_engines" / "specs" / "smollm2-135m.yaml"
_FREE: dict[str, Any] = {"end_id": -1}
_PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 16},
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "age", "city", "is_member"],
    "additionalProperties": False,
}
# Longer than any answer asked for here, so that it ends by its length as free text does.
_PEOPLE = {"type": "array", "items": _PERSON, "minItems": 200}
_ORDER_PROPERTIES: dict[str, Any] = {
    "customer_identifier": {"type": "integer", "minimum": 1, "maximum": 9999},
    "shipping_address_country": {"enum": ["Germany", "France", "Japan"]},
    "is_express_delivery_requested": {"type": "boolean"},
    "number_of_items_in_the_order": {"type": "integer", "minimum": 1, "maximum": 20},
    "preferred_payment_method": {"enum": ["credit card", "bank transfer"]},
    "requires_customer_signature": {"type": "boolean"},
}
_ORDER = {
    "type": "object",
    "properties": _ORDER_PROPERTIES,
    "required": list(_ORDER_PROPERTIES),
    "additionalProperties": False,
}


def _guided(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(schema)}


@dataclass(frozen=True, slots=True)
class Timed:
    """One streamed answer; seconds since it was asked for."""

    ttft_s: float
    latency_s: float
    output_tokens: int

    @property
    def per_token_s(self) -> float:
        """Time per output token behind the first one."""
        return (self.latency_s - self.ttft_s) / max(1, self.output_tokens - 1)


def guided_vs_free(bench: Bench) -> Section:
    """Time per output token of JSON-schema answers over free ones, 16 of each at once, sampled; at most 1.05.

    `free_alone` is the same free text with nobody guided beside it: what masks cost others in the same steps.
    """
    sampled = {"temperature": 1.0, "top_p": 0.95, "max_tokens": bench.max_tokens}
    free, guided = {**sampled, **_FREE}, {**sampled, **_FREE, **_guided(_PEOPLE)}
    times: dict[str, list[float]] = {"guided": [], "free": [], "free_alone": []}
    with _server(bench, "mixed") as server:
        ask(server, _prompts(bench, 2), [guided, free])
        for number in range(bench.rounds):
            bench.say(f"round {number + 1} of {bench.rounds}")
            found = ask(server, _prompts(bench, CONCURRENCY), [guided, free] * (CONCURRENCY // 2))
            times["guided"] += [answer.per_token_s for answer in found[::2]]
            times["free"] += [answer.per_token_s for answer in found[1::2]]
            alone = ask(server, _prompts(bench, CONCURRENCY), [free] * CONCURRENCY)
            times["free_alone"] += [answer.per_token_s for answer in alone]
    medians = {side: median(found) for side, found in times.items()}
    raw = {side: {"tokens_per_s": 1 / value, "per_token_s": value} for side, value in medians.items()}
    return Section("guided_vs_free", {str(CONCURRENCY): medians["guided"] / medians["free"]}, {str(CONCURRENCY): raw})


def fast_forward(bench: Bench) -> Section:
    """Wall time of the same answers by a schema with long names, forced tokens without steps of their own over with.

    Greedy, one at a time; at most 0.8.
    """
    values = {"max_tokens": 256, **_guided(_ORDER)}
    found: dict[str, list[Timed]] = {"with": [], "without": []}
    with _server(bench, "with") as fast, _server(bench, "without", enable_fast_forward=False) as slow:
        sides = {"with": fast, "without": slow}
        for server in sides.values():
            ask(server, _prompts(bench, 1), [values])
        for number in range(3 * bench.rounds):
            bench.say(f"answer {number + 1} of {3 * bench.rounds}")
            prompt = _prompts(bench, 1)
            for name in sorted(sides, reverse=bool(number % 2)):
                found[name] += ask(sides[name], prompt, [values])
    walls = {name: median(answer.latency_s for answer in answers) for name, answers in found.items()}
    raw = {
        name: {
            "tokens_per_s": sum(a.output_tokens for a in answers) / sum(a.latency_s for a in answers),
            "wall_s": walls[name],
            "output_tokens": [answer.output_tokens for answer in answers],
        }
        for name, answers in found.items()
    }
    return Section("fast_forward", {"1": walls["with"] / walls["without"]}, {"1": raw})


def guide_warm_ttft(bench: Bench) -> Section:
    """Milliseconds that a guide which is compiled already adds to the time to first token, one at a time; at most 1."""
    free, guided = {"max_tokens": 2, **_FREE}, {"max_tokens": 2, **_FREE, **_guided(_PERSON)}
    times: dict[str, list[float]] = {"free": [], "guided": []}
    with _server(bench, "server") as server:
        ask(server, _prompts(bench, 2), [free, guided])
        for number in range(20 * bench.rounds):
            bench.say(f"pair {number + 1} of {20 * bench.rounds}")
            pair = [("free", free), ("guided", guided)]
            for name, values in pair if number % 2 else reversed(pair):
                times[name] += [answer.ttft_s for answer in ask(server, _prompts(bench, 1), [values])]
    medians = {side: median(found) for side, found in times.items()}
    added_ms = 1e3 * (medians["guided"] - medians["free"])
    return Section("guide_warm_ttft", {"1": added_ms}, {"ttft_s": medians})


def ask(server: ServerDriver, prompts: Sequence[str], values: Sequence[Mapping[str, Any]]) -> list[Timed]:
    """Stream one answer for each prompt, all at once; every request with values of its own."""

    async def one(client: AsyncGrpcClient, prompt: str, fields: Mapping[str, Any]) -> Timed:
        begun, first = time.monotonic(), 0.0
        async with await client.stream(prompt, return_num_output_tokens=True, **fields) as stream:
            async for _ in stream:
                first = first or time.monotonic()
        tokens = stream.result.usage.completion_tokens
        if not tokens:
            raise BenchError(f"An answer of {server.name} has no tokens ({stream.result.finish_reason}).")
        return Timed(first - begun, time.monotonic() - begun, tokens)

    async def all_of_them() -> list[Timed]:
        async with AsyncGrpcClient(server.grpc_url) as client:
            await client.info()
            return list(await asyncio.gather(*(one(client, *each) for each in zip(prompts, values, strict=True))))

    return asyncio.run(all_of_them())


def _prompts(bench: Bench, count: int) -> Sequence[str]:
    return bench.workload.same_length_text(count, bench.prompt_tokens, 1).texts


@contextmanager
def _server(bench: Bench, name: str, **limits: Any) -> Iterator[ServerDriver]:
    """A server of the demo model with some limits changed."""
    with tempfile.TemporaryDirectory(prefix="guided-bench-") as place:
        if not limits:
            driver = ServerDriver(name)
        else:
            content = yaml.safe_load(_SPEC.read_text())
            content.pop("lora", None)  # whose paths are relative to the spec
            content["source"] = {"hf": str((bench.engine / ".." / "checkpoint").resolve())}
            content |= {"name": "guided-bench", "limits": {**content.get("limits", {}), **limits}}
            spec = Path(place) / "spec.yaml"
            spec.write_text(yaml.safe_dump(content))
            driver = ServerDriver.of_spec(name, spec, Path(place) / "engines")
        try:
            yield driver
        finally:
            driver.close()
