"""Clients for the text models of a Triton server: gRPC and HTTP, blocking and asyncio. They know only the wire."""

from __future__ import annotations

from clients.errors import (
    Cancelled,
    ClientError,
    DeadlineExceeded,
    IncompleteAnswer,
    QueueFull,
    RequestRefused,
    ServerFailure,
    ServerUnavailable,
    StreamBroken,
)
from clients.grpc_aio import AsyncGrpcClient, AsyncStream
from clients.grpc_client import GrpcClient, Stream
from clients.http_aio import AsyncHttpClient, AsyncHttpStream
from clients.http_client import HttpClient, HttpStream
from clients.log_probs import LogProb
from clients.structured import generate_as, parse_as, schema_values
from clients.tool_calls import ToolCall
from clients.toolbox import Toolbox
from clients.types import Chunk, GenerateRequest, Result, SequenceResult, Usage

__all__ = [
    "AsyncGrpcClient",
    "AsyncHttpClient",
    "AsyncHttpStream",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "ClientError",
    "DeadlineExceeded",
    "GenerateRequest",
    "GrpcClient",
    "HttpClient",
    "HttpStream",
    "IncompleteAnswer",
    "LogProb",
    "QueueFull",
    "RequestRefused",
    "Result",
    "SequenceResult",
    "ServerFailure",
    "ServerUnavailable",
    "Stream",
    "StreamBroken",
    "ToolCall",
    "Toolbox",
    "Usage",
    "generate_as",
    "parse_as",
    "schema_values",
]
