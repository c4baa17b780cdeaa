"""Sends seeded guided requests, so many at a time, and judges every answer.

`python -m tests.server.guided_run --url 127.0.0.1:8001 --requests 1000` prints the counts and ends with 1 when an
answer is wrong.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from clients import GrpcClient
from tests.server.guided_cases import GuidedCase, cases

PROMPTS = ["Describe a person:", "The weather in Paris today is", "A list of numbers: 1, 2,", "名前は", "Answer:"]


@dataclass(slots=True)
class Outcome:
    """Counts of answers by kind and finish_reason, and the wrong ones in words."""

    counts: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, case: GuidedCase, text: str, reason: str | None) -> None:
        self.counts[case.kind, reason] += 1
        problem = None
        if reason == "stop":
            problem = case.judge(text)
        elif reason != "length":
            problem = f"finish_reason is {reason}"
        if problem is not None:
            self.wrong.append(f"{case.kind} {case.guide}\n  {text!r}\n  {problem}")

    def total(self, reason: str) -> int:
        return sum(count for (_, ended), count in self.counts.items() if ended == reason)


def run(url: str, *, requests: int, seed: int = 0, concurrency: int = 32, max_tokens: int = 96) -> Outcome:
    """Sample at temperature 1.0, `concurrency` requests at once."""
    outcome = Outcome()
    with GrpcClient(url) as client, ThreadPoolExecutor(concurrency) as pool:

        def ask(index: int, case: GuidedCase) -> tuple[GuidedCase, str, str | None]:
            prompt = PROMPTS[index % len(PROMPTS)]
            answer = client.generate(
                prompt, max_tokens=max_tokens, temperature=1.0, top_p=1.0, seed=index, **case.tensors()
            )
            return case, answer.text, answer.finish_reason

        for answer in pool.map(ask, range(requests), cases(seed, requests)):
            outcome.add(*answer)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8001")
    for name, default in (("requests", 1000), ("seed", 0), ("concurrency", 32), ("max-tokens", 96)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = vars(parser.parse_args())
    started = time.monotonic()
    outcome = run(arguments.pop("url"), **arguments)
    for (kind, reason), count in sorted(outcome.counts.items(), key=str):
        print(f"{kind:16} {reason:10} {count}")
    print("\n".join(outcome.wrong))
    print(
        f"{outcome.total('stop')} complete and valid but for {len(outcome.wrong)}, {outcome.total('length')} cut off "
        f"by max_tokens, in {time.monotonic() - started:.0f} s"
    )
    return bool(outcome.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
