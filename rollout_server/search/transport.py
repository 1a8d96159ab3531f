"""Send one request to a retriever and read the answer up to a size limit. Every failure is a named `SearchError`.

Redirects are not followed, and compression is not accepted: a few kilobytes must not expand to gigabytes. Two JSON
dialects:

    search_r1  POST /retrieve      {"queries": [q, ..], "topk": k, "return_scores": true}
               -> {"result": [[{"document": {"id", "contents"}, "score"}, ..], ..], "errors": [null, ..]?}
    flashrag   POST /batch_search  {"query": [q, ..], "top_n": k, "return_score": false}
               -> [[{"id", "contents"}, ..], ..]                      (ReSearch, ReCall)

Scores are not read: passages are ordered, best first. Answers are untrusted: every part is validated, every failure has
a name, and only the first k hits are read. Lone surrogates, which some servers send, are replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.runtime.http.auth import read_access
from protocol.runtime.http.body import AnswerTooLarge, bounded_session, parse_json, read_bounded
from protocol.runtime.net import lacks_files
from protocol.runtime.timing import loop_timeout
from protocol.search import Passage
from rollout_server.search.base import (
    BAD_SHAPE,
    NO_FILES,
    NOT_JSON,
    TIMEOUT,
    TOO_LARGE,
    UNREACHABLE,
    WRONG_COUNT,
    SearchError,
    error_named_by_server,
    error_of_status,
)

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL


Dialect = Literal["search_r1", "flashrag"]
PATHS: dict[Dialect, str] = {"search_r1": "/retrieve", "flashrag": "/batch_search"}

CONNECT_S = 3.0
"""Connection timeout in seconds: a host that drops packets must not use up the time of the other replicas."""


class _Document(BaseModel):
    """The document of a hit. Some corpora have numbers as ids."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    id: str = ""
    contents: str


Answer = tuple[Passage, ...] | SearchError
"""The passages of one query, best first, or why there are none."""


def request_body(dialect: Dialect, queries: Sequence[str], topk: int) -> bytes:
    """Return the request body for one or more queries."""
    body: dict[str, Any]
    if dialect == "flashrag":
        body = {"query": queries, "top_n": topk, "return_score": False}
    else:
        # `partial`: a named failure of the query is more informative than a 500. Other servers ignore it.
        body = {"queries": queries, "topk": topk, "return_scores": True, "partial": True}
    return json.dumps(body).encode()


def read_answers(dialect: Dialect, raw: bytes, topk: int, count: int) -> list[Answer]:
    """Return for each of `count` queries at most `topk` passages, or its error: bad_shape, failed_WORD.

    Raises SearchError if no query has an answer: not_json, bad_shape, wrong_count.
    """
    try:
        answer = parse_json(raw)
    except ValueError:
        raise SearchError(NOT_JSON) from None
    try:
        lists = answer if dialect == "flashrag" else answer["result"]
        errors = None if dialect == "flashrag" else answer.get("errors")
    except (TypeError, KeyError):
        raise SearchError(BAD_SHAPE) from None
    if not isinstance(lists, list) or not isinstance(errors, list | None):
        raise SearchError(BAD_SHAPE)
    if errors is None:
        errors = [None] * count
    if not len(lists) == len(errors) == count:
        raise SearchError(WRONG_COUNT)
    return [
        _read_hits(dialect, hits, topk) if error is None else error_named_by_server(str(error))
        for hits, error in zip(lists, errors, strict=True)
    ]


def _read_hits(dialect: Dialect, hits: Any, topk: int) -> Answer:
    try:
        if not isinstance(hits, list):
            raise TypeError("not a list of hits")
        hits = hits[:topk]
        found = [_Document.model_validate(hit if dialect == "flashrag" else hit["document"]) for hit in hits]
        scores = [None if dialect == "flashrag" else hit.get("score") for hit in hits]
    except (TypeError, KeyError, AttributeError, IndexError, ValidationError):
        return SearchError(BAD_SHAPE)
    return tuple(
        # a further field, for those who show it: a policy and its rewards do not read it
        Passage(id=one.id, contents=one.contents, **({"score": score} if isinstance(score, float) else {}))
        for one, score in zip(found, scores, strict=True)
    )


MAX_BYTES = 4 << 20
"""Maximum size of a reply: hundreds of passages; a larger one is dropped unread."""


class HttpConnections:
    """Pooled connections to one or more servers. The session is opened by the first request, in its event loop.

    limit    maximum number of concurrent requests; further ones wait within their timeout; 0: no limit
    headers  sent with every request
    """

    def __init__(
        self, *, max_bytes: int = 0, limit: int = 0, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._max_bytes, self._limit, self._headers = max_bytes or MAX_BYTES, limit, headers
        self._session: aiohttp.ClientSession | None = None

    async def exchange(
        self,
        method: str,
        url: str | URL,
        timeout_s: float,
        body: bytes | None = None,
        also: Collection[int] = (),
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        received: MutableMapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Return status and body of an answer with status 200 or one of `also`; its headers in `received`,
        with names in lower case.

        Raises SearchError.
        """
        import aiohttp

        try:
            async with (
                loop_timeout(timeout_s),
                self._open().request(method, url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                if received is not None:
                    received.update((name.lower(), value) for name, value in response.headers.items())
                if response.status != 200 and response.status not in also:
                    raise error_of_status(response.status, response.headers.get("Retry-After", ""))
                return response.status, await read_bounded(response, self._max_bytes)
        except AnswerTooLarge as error:
            raise SearchError(TOO_LARGE, retryable=False) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if lacks_files(error):
                raise SearchError(NO_FILES, served=False) from error
            refused = not isinstance(error, aiohttp.ConnectionTimeoutError)
            raise SearchError(UNREACHABLE, served=False, refused=refused) from error
        except TimeoutError as error:
            raise SearchError(TIMEOUT, served=False) from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError) as error:
            raise SearchError(UNREACHABLE, served=False) from error
        except aiohttp.ClientError as error:
            raise SearchError(NOT_JSON) from error  # the answer is not HTTP

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json", **self._headers}
            self._session = bounded_session(connect_s=CONNECT_S, limit=self._limit, headers=headers)
        return self._session

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class SearchTransport(HttpConnections):
    """Connections to retrievers, in their dialect. `GradientLimit` limits the queries in flight."""

    def __init__(self, dialect: Dialect, *, topk: int) -> None:
        super().__init__(headers=read_access(os.environ).headers("node", "operator"))
        self._dialect, self.topk = dialect, topk

    @property
    def path(self) -> str:
        """Path of the search route, relative to the base URL."""
        return PATHS[self._dialect]

    async def search(self, url: str, query: str, timeout_s: float) -> tuple[Passage, ...]:
        """Return the passages for one query, best first. Raises SearchError."""
        (answer,) = await self.search_all(url, (query,), timeout_s)
        if isinstance(answer, SearchError):
            raise answer
        return answer

    async def search_all(self, url: str, queries: Sequence[str], timeout_s: float) -> list[Answer]:
        """Return an answer for each query, in order, by one request. Raises SearchError if none has one."""
        body = request_body(self._dialect, queries, self.topk)
        raw = await self.request("POST", url + self.path, timeout_s, body)
        return read_answers(self._dialect, raw, self.topk, len(queries))

    async def request(self, method: str, url: str, timeout_s: float, body: bytes | None = None) -> bytes:
        """Return the body of an answer with status 200. Raises SearchError."""
        return (await self.exchange(method, url, timeout_s, body))[1]
