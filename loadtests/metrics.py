"""The metrics, one class each with its formula, as AIPerf defines them.

Record metrics give a value (or a list) for one request, None where it has none; failed requests have none. Run metrics
give one value for a set of requests and a duration. Knows nothing of SLOs and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar

from loadtests.records import Record

IsGood = Callable[[Record], bool]


class RecordMetric:
    """A value per request."""

    tag: ClassVar[str]
    name: ClassVar[str]
    unit: ClassVar[str] = "s"

    @staticmethod
    def of(record: Record) -> float | None:
        """The value, or None."""
        raise NotImplementedError


class TimeToFirstToken(RecordMetric):
    """Formula: first response - intended start. Streams only."""

    tag, name = "ttft", "time to first token"

    @staticmethod
    def of(record: Record) -> float | None:
        """Seconds."""
        return record.chunk_s[0] if record.ok and record.streamed and record.chunk_s else None


class TimeToSecondToken(RecordMetric):
    """Formula: second response - first response."""

    tag, name = "ttst", "time to second token"

    @staticmethod
    def of(record: Record) -> float | None:
        """Seconds."""
        if not record.ok or not record.streamed or len(record.chunk_s) < 2:
            return None
        return record.chunk_s[1] - record.chunk_s[0]


class RequestLatency(RecordMetric):
    """Formula: last response - intended start."""

    tag, name = "latency", "end to end latency"

    @staticmethod
    def of(record: Record) -> float | None:
        """Seconds."""
        if not record.ok:
            return None
        return record.chunk_s[-1] if record.chunk_s else record.end_s


class InterTokenLatency(RecordMetric):
    """Formula: (latency - TTFT) / (output tokens - 1); needs two tokens."""

    tag, name = "itl", "inter-token latency"

    @staticmethod
    def of(record: Record) -> float | None:
        """Seconds."""
        first, latency = TimeToFirstToken.of(record), RequestLatency.of(record)
        if first is None or latency is None or record.output_tokens is None or record.output_tokens < 2:
            return None
        return (latency - first) / (record.output_tokens - 1)


class TimePerOutputToken(RecordMetric):
    """Formula: (latency - TTFT) / (output tokens - tokens of the first response), by the server's count per response.

    A first response of several tokens does not make it look faster than it is. With one token in the first response, or
    with a count that cannot be (none left to divide by), it is ITL.
    """

    tag, name = "tpot", "time per output token"

    @staticmethod
    def of(record: Record) -> float | None:
        """Seconds."""
        legacy = InterTokenLatency.of(record)
        if legacy is None or record.output_tokens is None:
            return None
        first = record.chunk_tokens[0] if record.chunk_tokens else 0
        rest = record.output_tokens - first
        return legacy if first < 1 or rest < 1 else (record.chunk_s[-1] - record.chunk_s[0]) / rest


class OutputTokenThroughputPerUser(RecordMetric):
    """Formula: 1 / ITL."""

    tag, name, unit = "tokens_per_s_per_user", "tokens per second of one user", "tokens/s"

    @staticmethod
    def of(record: Record) -> float | None:
        """Tokens per second."""
        itl = InterTokenLatency.of(record)
        return 1 / itl if itl else None


class QueueTime(RecordMetric):
    """Formula: first step - arrival, both by the server's clock. Asked of some requests only."""

    tag, name = "queue", "queue time"

    @staticmethod
    def of(record: Record) -> float | None:
        """Seconds."""
        return record.queue_s if record.ok else None


class ScheduleLag(RecordMetric):
    """Formula: actual send - intended send. Large: this tool, not the server, is the bottleneck."""

    tag, name = "lag", "sent later than intended"

    @staticmethod
    def of(record: Record) -> float | None:
        """Seconds."""
        return record.sent_s


class PromptTokens(RecordMetric):
    """Formula: the server's count of the prompt, chat template included."""

    tag, name, unit = "prompt_tokens", "prompt tokens", "tokens"

    @staticmethod
    def of(record: Record) -> float | None:
        """Tokens."""
        return record.prompt_tokens if record.ok else None


class OutputTokens(RecordMetric):
    """Formula: the server's count of the answer."""

    tag, name, unit = "output_tokens", "output tokens", "tokens"

    @staticmethod
    def of(record: Record) -> float | None:
        """Tokens."""
        return record.output_tokens if record.ok else None


RECORD_METRICS: tuple[type[RecordMetric], ...] = (
    TimeToFirstToken,
    TimeToSecondToken,
    TimePerOutputToken,
    InterTokenLatency,
    RequestLatency,
    QueueTime,
    ScheduleLag,
    OutputTokenThroughputPerUser,
    PromptTokens,
    OutputTokens,
)


class InterChunkLatency:
    """Formula: [response[i] - response[i-1]]; the values of all requests together are one sample."""

    tag, name, unit = "icl", "gap between responses", "s"

    @staticmethod
    def of(record: Record) -> list[float]:
        """Seconds, one per gap."""
        return [after - before for before, after in pairwise(record.chunk_s)] if record.ok and record.streamed else []


class BenchmarkDuration:
    """Formula: last response - first request."""

    @staticmethod
    def of(records: Sequence[Record]) -> float:
        """Seconds; 0 without records."""
        return max(r.end_at for r in records) - min(r.intended_at for r in records) if records else 0.0


class RequestThroughput:
    """Formula: complete requests / duration."""

    @staticmethod
    def of(records: Sequence[Record], duration_s: float) -> float:
        """Requests per second."""
        return sum(record.ok for record in records) / duration_s


class OutputTokenThroughput:
    """Formula: sum of output tokens / duration."""

    @staticmethod
    def of(records: Sequence[Record], duration_s: float) -> float:
        """Tokens per second."""
        return sum(record.output_tokens or 0 for record in records if record.ok) / duration_s


class TotalTokenThroughput:
    """Formula: (sum of prompt tokens + sum of output tokens) / duration."""

    @staticmethod
    def of(records: Sequence[Record], duration_s: float) -> float:
        """Tokens per second."""
        prompts = sum(record.prompt_tokens or 0 for record in records if record.ok)
        return prompts / duration_s + OutputTokenThroughput.of(records, duration_s)


class Goodput:
    """Formula: requests that meet every limit / duration."""

    @staticmethod
    def of(records: Sequence[Record], duration_s: float, is_good: IsGood) -> float:
        """Requests per second."""
        return sum(record.ok and is_good(record) for record in records) / duration_s


class GoodFraction:
    """Formula: requests that meet every limit / all requests, failed ones included."""

    @staticmethod
    def of(records: Sequence[Record], is_good: IsGood) -> float:
        """0 to 1; 0 without requests."""
        return sum(record.ok and is_good(record) for record in records) / len(records) if records else 0.0


class ErrorRate:
    """Formula: failed requests / all requests. An error inside a stream is a failure, whatever came before it."""

    @staticmethod
    def of(records: Sequence[Record]) -> float:
        """0 to 1; 0 without requests."""
        return sum(not record.ok for record in records) / len(records) if records else 0.0


def received_tokens(records: Sequence[Record], begin: float, end: float) -> int:
    """Output tokens that came between two moments (seconds since 1970), whoever asked for them and when.

    Over a window with steady load this counts neither a ramp up nor a ramp down.
    """
    found = 0
    for record in records:
        if record.end_at < begin or record.intended_at > end:
            continue
        if record.streamed:
            pieces = zip(record.chunk_s, record.chunk_tokens, strict=False)
            found += sum(tokens for when, tokens in pieces if begin <= record.intended_at + when < end)
        elif begin <= record.end_at < end:
            found += record.output_tokens or 0
    return found
