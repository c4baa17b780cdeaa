"""Compiling beside the server: the cache, and guides that try to take it down."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from python_backend.errors import LimitExceeded, Overloaded, RequestError, Unsupported
from python_backend.guided.cache import GuideCache
from python_backend.guided.compiler import GuideCompiler
from python_backend.guided.limits import GuideLimits
from python_backend.guided.llguidance_backend import LLGuidanceBackend
from python_backend.request import GenerationRequest, Guide, SamplingParams
from python_backend.triton.guides import GuideService
from tests.unit.guided_helpers import END_ID, VOCAB_SIZE, tokenizer, write_tokenizer_json
from tests.unit.test_telemetry import FakeFactory

LIMITS = GuideLimits(num_workers=1, compile_cpu_s=1.0, cache_entries=20)


MANY = {f"p{i}": {"type": "string"} for i in range(5000)}
ANY_OF_4 = [{"properties": {f"p{i}": {"type": "string"}}, "required": [f"p{i}"]} for i in range(4)]


def chain(length: int) -> str:
    """References that follow each other, one stack frame or more for each."""
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)} | {f"d{length}": {}}
    return json.dumps({"$defs": defs, "$ref": "#/$defs/d0"})


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuideCompiler]:
    path = write_tokenizer_json(tmp_path_factory.mktemp("tokenizer"))
    made = GuideCompiler(path, VOCAB_SIZE, (END_ID,), limits=LIMITS)
    made.start()
    yield made
    made.stop()


def error_of(compiler: GuideCompiler, kind: str, text: str) -> BaseException | None:
    return compiler.submit(Guide(kind, text)).exception(timeout=90)


def test_the_second_time_a_guide_is_there_at_once(compiler):
    before = compiler.stats()
    first = compiler.submit(Guide("regex", "once")).result(timeout=90)
    again = compiler.submit(Guide("regex", "once"))
    assert again.done()
    assert again.result() is first
    after = compiler.stats()
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 1)


def test_guides_that_differ_in_one_field_are_not_the_same(compiler):
    guides = [Guide("json"), Guide("json", whitespace="free"), Guide("json", strict=False), Guide("json_schema", "{}")]
    ready = [compiler.submit(guide).result(timeout=90) for guide in guides]
    assert len({id(guide) for guide in ready}) == len(guides)


def test_the_key_holds_backend_version_tokenizer_and_guide(tmp_path, monkeypatch):
    path = write_tokenizer_json(tmp_path)

    plain = Guide("regex", "a")

    def key(guide: Guide = plain, end_ids: tuple[int, ...] = (END_ID,), vocab: int = VOCAB_SIZE) -> str:
        return GuideCompiler(path, vocab, end_ids)._key(guide)

    first = key()
    assert first == key()
    others = [key(Guide("regex", "b")), key(Guide("choice", "a")), key(end_ids=(END_ID, 1)), key(vocab=VOCAB_SIZE + 32)]
    monkeypatch.setattr(LLGuidanceBackend, "version", "0.0")
    others.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(LLGuidanceBackend, "name", "other")
    others.append(key())
    monkeypatch.undo()
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
    others.append(key())
    assert len({first, *others}) == 1 + len(others)


def test_the_warm_up_list_of_a_spec_is_compiled_at_the_start(tmp_path, caplog):
    write_tokenizer_json(tmp_path)
    service = GuideService(tokenizer(), tmp_path, VOCAB_SIZE, LIMITS, "llguidance")
    service.start(FakeFactory(), {"model": "m", "version": "1"}, [Guide("choice", '["warm"]'), Guide("regex", "(")])
    try:
        request = GenerationRequest("r", [1], SamplingParams(max_tokens=5), guide=Guide("choice", '["warm"]'))
        deadline = time.monotonic() + 60
        while not service.masks(request).done() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert service.masks(request).result()().forced_tokens()
        while "refused" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "A guide of the warm-up list is refused: " in caplog.text
    finally:
        service.stop()


def test_requests_that_come_together_wait_for_one_compilation(compiler):
    assert compiler.submit(Guide("regex", "same")) is compiler.submit(Guide("regex", "same"))


def test_a_refusal_comes_with_its_kind_and_is_remembered(compiler):
    guide = Guide("json_schema", '{"contains": {}}')
    assert isinstance(compiler.submit(guide).exception(timeout=90), Unsupported)
    assert compiler.submit(guide).done()


def test_a_guide_that_overflows_the_stack_is_refused_and_the_next_one_served(compiler):
    error = error_of(compiler, "json_schema", chain(6000))
    assert isinstance(error, LimitExceeded)
    assert "too complex" in str(error)
    assert compiler.submit(Guide("regex", "after")).result(timeout=90)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"type": "object", "properties": MANY})),
        ("json_schema", json.dumps({"allOf": [{"anyOf": ANY_OF_4}] * 12})),
        ("regex", "(" * 8000 + "a" + ")" * 8000),
        ("ebnf_grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    ],
)  # fmt: skip
def test_hostile_guides_are_refused_within_their_limits(compiler, kind, text):
    started = time.process_time()
    assert isinstance(error_of(compiler, kind, text), RequestError)
    assert time.process_time() - started < 0.5, "what is hostile is kept out of this process"


def test_a_guide_that_is_forgotten_is_compiled_anew(compiler):
    guide = Guide("regex", "forget me")
    first = compiler.submit(guide).result(timeout=90)
    compiler.forget(guide)
    assert compiler.submit(guide).result(timeout=90) is not first


def test_many_guides_leave_a_bounded_cache(compiler):
    for i in range(60):
        compiler.submit(Guide("choice", json.dumps([f"c{i}"]))).result(timeout=90)
    assert compiler.stats().entries == LIMITS.cache_entries


def test_too_many_guides_at_once_are_turned_away(tmp_path):
    limits = GuideLimits(num_workers=1, max_queued=2)
    compiler = GuideCompiler(write_tokenizer_json(tmp_path), VOCAB_SIZE, (END_ID,), limits=limits)
    waiting = [compiler.submit(Guide("regex", pattern)) for pattern in "ab"]
    with pytest.raises(Overloaded, match="2 structures wait to be compiled"):
        compiler.submit(Guide("regex", "c"))
    compiler.stop()
    assert all(isinstance(future.exception(timeout=5), Overloaded) for future in waiting)


def test_the_cache_drops_what_was_used_longest_ago():
    cache: GuideCache[int] = GuideCache(max_entries=3, max_bytes=100)
    for key, size in (("a", 10), ("b", 10), ("c", 10)):
        cache.put(key, size, size)
    assert cache.get("a") == 10
    cache.put("d", 10, 10)
    assert [cache.get(key) is not None for key in "abcd"] == [True, False, True, True]
    cache.put("big", 1, 85)
    assert (cache.stats().entries, cache.stats().size_bytes) == (2, 95)
    cache.put("too big", 1, 101)
    assert cache.get("too big") is None
    assert cache.stats().evictions == 3


def test_a_deployments_cache_size_changes_no_other_limit():
    with pytest.raises(TypeError):
        GuideLimits(20)
