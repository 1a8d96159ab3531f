"""Vectors from an OpenAI-compatible `POST /v1/embeddings`; synchronous, because the owner thread waits anyway.

    texts --> prefix, cut --> requests of BATCH texts --> retries --> checks --> rows in the order of the texts

Responses are untrusted: their size is capped while reading, and count, indexes, dimension and finiteness are
checked before use. Redirects are not followed (they would receive the key), and proxies from the
environment are not used. A failure is `EncoderUnavailable` with a cause that counters can use: unreachable, timeout,
http_NNN, too_large, garbage.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from protocol.errors import UserError
from protocol.runtime.timing import backoff_s
from retriever.encoder.base import EncoderUnavailable, Vectors, check_finite
from retriever.encoder.config import OpenAIEncoderSettings

RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})
BATCH = 64
"""Maximum texts per request."""
MAX_CHARS = 8192
"""Maximum characters of a text, including its prefix; longer ones are cut, because services refuse them."""
BACKOFF_S, MAX_BACKOFF_S, MAX_RETRY_AFTER_S = 0.5, 30.0, 60.0
"""First pause before a retry, doubled each time up to the second, times a random number from 0.5 to 1. A longer
Retry-After of the service is respected, up to the third."""
NUMBER_BYTES, SLACK_BYTES = 40, 64 * 1024
"""A float as text has up to 25 characters; a response may have NUMBER_BYTES per number, plus SLACK_BYTES for names."""


class OpenAIEncoder:
    """See the module's docstring. One connection, kept alive; one thread."""

    def __init__(self, settings: OpenAIEncoderSettings) -> None:
        self._connection: http.client.HTTPConnection | None = None
        self._settings = settings
        self.dim, self.normalized = settings.dim, settings.normalize
        self._parts = urlsplit(settings.url.rstrip("/") + "/embeddings")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"} | _authorization(settings)

    def __del__(self) -> None:
        # encoders have no close(): they end with the index that owns them
        self._close()

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return float32 [len(texts), dim]. Raises EncoderUnavailable if the service returns none."""
        return self._encode([self._settings.passage_prefix + text for text in texts])

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return float32 [len(texts), dim]. Raises EncoderUnavailable if the service returns none."""
        return self._encode([self._settings.query_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> Vectors:
        vectors: Vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        texts = [text[:MAX_CHARS] for text in texts]
        # services refuse blank texts; here they get the zero vector
        rows = [row for row, text in enumerate(texts) if text.strip()]
        for start in range(0, len(rows), BATCH):
            chunk = rows[start : start + BATCH]
            vectors[chunk] = self._ask([texts[row] for row in chunk])
        check_finite(vectors, texts, f"the service at {self._settings.url}")
        if self._settings.normalize:
            lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
            vectors = np.divide(vectors, lengths, where=lengths > 0, out=vectors.astype(np.float64)).astype(np.float32)
        return vectors

    def _ask(self, texts: list[str]) -> Vectors:
        """Send one request, with retries; return its vectors."""
        settings = self._settings
        payload: dict[str, Any] = {"model": settings.model, "input": texts, "encoding_format": "float"}
        if settings.send_dimensions:
            payload["dimensions"] = settings.dim
        body = json.dumps(payload).encode()
        for attempt in range(settings.retries + 1):
            wait = backoff_s(attempt + 1, BACKOFF_S, MAX_BACKOFF_S) * random.uniform(0.5, 1)
            try:
                status, retry_after, answer = self._request(body, len(texts))
            except (OSError, http.client.HTTPException) as error:
                self._close()
                cause = "timeout" if isinstance(error, TimeoutError) else "unreachable"
                message = str(error) or type(error).__name__
                failure = EncoderUnavailable(cause, f"{settings.url}: {message}", for_all=True)
            else:
                if status == 200:
                    return self._parse(answer, len(texts))
                message, again = answer[:200].decode(errors="replace"), status in RETRIED
                failure = EncoderUnavailable(f"http_{status}", f"{settings.url}: {message}", for_all=again)
                if not again:
                    raise failure
                wait = max(wait, retry_after)
            if attempt == settings.retries:
                raise failure
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _request(self, body: bytes, count: int) -> tuple[int, float, bytes]:
        """Return (status, seconds of Retry-After, body). Reopens a kept connection that was closed."""
        for fresh in (self._connection is None, True):
            connection = self._connection or self._connect()
            try:
                connection.request("POST", self._parts.path, body, self._headers)
                response = connection.getresponse()
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                self._close()
                if fresh:
                    raise
                continue
            answer = self._read(response, count * self.dim * NUMBER_BYTES + SLACK_BYTES)
            if response.will_close:
                self._close()
            return response.status, _seconds(response.getheader("Retry-After")), answer
        raise AssertionError("the second connection is fresh")

    def _read(self, response: http.client.HTTPResponse, limit: int) -> bytes:
        deadline, answer = time.monotonic() + self._settings.timeout_s, bytearray()
        while piece := response.read1(1 << 16):
            answer += piece
            if len(answer) > limit:
                self._close()
                raise EncoderUnavailable("too_large", f"{self._settings.url}: more than {limit} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the response was incomplete after {self._settings.timeout_s:g} s")
        missing = response.length
        response.close()  # otherwise the connection accepts no further request
        if missing:
            raise http.client.IncompleteRead(bytes(answer[:0]), missing)
        return bytes(answer)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._settings.timeout_s)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _parse(self, answer: bytes, count: int) -> Vectors:
        """Return the rows in the order of the request; `index` gives their order in the answer."""
        try:
            data = json.loads(answer)["data"]
            order = sorted(range(len(data)), key=lambda i: data[i]["index"])
            if [data[i]["index"] for i in order] != list(range(count)):
                raise ValueError(f"requested {count} vectors, received {len(data)} or other indexes")
            rows = [data[i]["embedding"] for i in order]
            widths = {len(row) for row in rows}
            if widths != {self.dim}:
                raise ValueError(f"vectors have dimension {sorted(widths)}, but encoder.dim is {self.dim}")
            with np.errstate(over="ignore"):  # infinity is refused below, with its text
                vectors = np.array(rows, dtype=np.float32)
            if vectors.shape != (count, self.dim):
                raise ValueError(f"numbers of shape {vectors.shape}")
            return vectors
        except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError) as error:
            self._close()
            raise EncoderUnavailable("garbage", f"{self._settings.url}: {type(error).__name__}: {error}") from error


def _authorization(settings: OpenAIEncoderSettings) -> dict[str, str]:
    name = settings.api_key_variable
    if not name:
        return {}
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(
            f"the environment variable {name} is empty or not set",
            why="encoder.api_key_variable names it",
            todo=f"export {name}=..",
        )
    return {"Authorization": f"Bearer {key}"}


def _seconds(header: str | None) -> float:
    """Return Retry-After in seconds; 0 if missing or a date."""
    try:
        return min(max(float(header or 0), 0.0), MAX_RETRY_AFTER_S)
    except ValueError:
        return 0.0
