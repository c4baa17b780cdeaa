"""How many tokens a text has for the served tokenizer, asked of the server.

Knows nothing of workloads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import urllib3

from clients import ClientError, HttpClient
from loadtests.errors import EnvironmentFault

CHARACTERS_PER_TOKEN = 4.0
"""Assumed where a server counts nothing at all; what the requests really had is in the report all the same."""


class TokenCounter:
    """Counts by the model `preprocessing`, or where there is none by requests for one token."""

    def __init__(self, http_url: str) -> None:
        self._url = http_url
        self._pool = urllib3.PoolManager(retries=False, timeout=30)
        self._client = HttpClient(http_url)

    def __call__(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without what a chat template or a start token adds.

        Raises:
            EnvironmentFault: no server answers.
        """
        count = self._by_preprocessing if self._preprocessing(texts[0]) is not None else self._by_request
        base = count("a") - 1
        return [max(1, count(text) - base) for text in texts]

    def _by_preprocessing(self, text: str) -> int:
        found = self._preprocessing(text)
        assert found is not None, "asked before"
        return found

    def _preprocessing(self, text: str) -> int | None:
        body = json.dumps({"QUERY": text, "REQUEST_OUTPUT_LEN": 1})
        try:
            reply = self._pool.request("POST", f"{self._url}/v2/models/preprocessing/generate", body=body)
        except urllib3.exceptions.HTTPError as error:
            raise EnvironmentFault(f"No server answers at {self._url} ({error}).") from None
        length = json.loads(reply.data).get("REQUEST_INPUT_LEN") if reply.status == 200 else None
        return length if isinstance(length, int) else None

    def _by_request(self, text: str) -> int:
        try:
            found = self._client.generate(text, max_tokens=1).usage.prompt_tokens
        except ClientError as error:
            raise EnvironmentFault(f"The server at {self._url} cannot be asked for a token: {error}") from None
        return found or round(len(text) / CHARACTERS_PER_TOKEN)
