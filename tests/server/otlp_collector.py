"""A collector for tests: takes OTLP over HTTP, protobuf (ours) and JSON (Triton's), and keeps the spans."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    """What the two formats have in common."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    service: str


class Collector:
    """Listens on a free port of 127.0.0.1 until it is closed."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                is_json = "json" in self.headers["Content-Type"]
                collector.spans += _from_json(json.loads(body)) if is_json else _from_protobuf(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]


def _from_json(body: dict[str, Any]) -> list[Span]:
    return [
        Span(
            span["name"],
            span["traceId"],
            span["spanId"],
            span.get("parentSpanId", ""),
            int(span["startTimeUnixNano"]),
            int(span["endTimeUnixNano"]),
            {entry["key"]: next(iter(entry["value"].values())) for entry in span.get("attributes", [])},
            next(e["value"]["stringValue"] for e in resource["resource"]["attributes"] if e["key"] == "service.name"),
        )
        for resource in body["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _from_protobuf(body: bytes) -> list[Span]:
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest.FromString(body)
    data = MessageToDict(message)
    for resource in message.resource_spans:  # JSON of protobuf has bytes in base64, OTLP's has them in hex
        for scope in resource.scope_spans:
            for span in scope.spans:
                assert span.span_id
    for resource, plain in zip(message.resource_spans, data["resourceSpans"], strict=True):
        for scope, plain_scope in zip(resource.scope_spans, plain["scopeSpans"], strict=True):
            for span, plain_span in zip(scope.spans, plain_scope["spans"], strict=True):
                ids = {"traceId": span.trace_id, "spanId": span.span_id, "parentSpanId": span.parent_span_id}
                plain_span.update({name: value.hex() for name, value in ids.items()})
    return _from_json(data)
