"""The peer: OpenVINO GenAI's ContinuousBatchingPipeline behind the same lines of JSON as our engine's driver.

Runs in an environment with openvino-genai; imports nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def main() -> int:
    """Serve runs until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.peer_genai", description=__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file or a directory with an OpenVINO model")
    parser.add_argument("--properties", default="{}", metavar="JSON", help="properties of the CPU plug-in")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    arguments = parser.parse_args()
    begun = time.monotonic()
    pipeline = _load(arguments)
    _answer({"ready_s": time.monotonic() - begun})
    for line in sys.stdin:
        _answer(_run(pipeline, json.loads(line)))
    return 0


def _load(arguments: argparse.Namespace) -> Any:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB; no run needs more
    scheduler.max_num_seqs = arguments.max_num_seqs
    scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = json.loads(arguments.properties)
    return openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)


def _run(pipeline: Any, asked: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import openvino
    import openvino_genai

    begun = time.monotonic()
    handles = {}
    for number, (prompt, length) in enumerate(zip(asked["prompts"], asked["max_tokens"], strict=True)):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = length
        config.ignore_eos = True
        config.do_sample = False
        handles[number] = pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    output_tokens = 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.monotonic()
        for number, handle in handles.items():
            while handle.can_read():
                output_tokens += sum(len(output.generated_ids) for output in handle.read().values())
                first.setdefault(number, now)
                last[number] = now
    return {
        "wall_s": time.monotonic() - begun,
        "output_tokens": output_tokens,
        "ttft_s": [first[number] - begun for number in sorted(first)],
        "latency_s": [last[number] - begun for number in sorted(last)],
    }


def _answer(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
