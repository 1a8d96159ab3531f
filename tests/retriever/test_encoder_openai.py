"""The client of `/v1/embeddings` against a scripted server: retries, checks, caps, named failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from protocol.errors import UserError
from retriever.backends.base import QueryFailure, QueryResult
from retriever.backends.index import IndexBackend
from retriever.encoder import build_encoder, encoder_identity
from retriever.encoder.base import Encoder, EncoderUnavailable, NotFinite
from retriever.encoder.config import OpenAIEncoderSettings

DIM = 4


def honest(asked: dict[str, Any]) -> dict[str, Any]:
    """Vectors that encode the text's length."""
    rows = [[float(len(text)), 1.0, 0.0, 0.0] for text in asked["input"]]
    return {"data": [{"index": i, "embedding": row} for i, row in enumerate(rows)]}


@dataclass
class Server:
    """Plays `script` (status, body or None for an honest one, headers), then is honest; keeps what it was asked."""

    url: str = ""
    script: list[tuple[int, bytes | None, dict[str, str]]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            state.connections += 1
            super().setup()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append(asked)
            state.headers.append(dict(self.headers))
            status, body, headers = state.script.pop(0) if state.script else (200, None, {})
            body = json.dumps(honest(asked)).encode() if body is None else body
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = headers.get("Connection") == "close"

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # a client that hangs up is what some tests are about
    http.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def client(server: Server) -> Callable[..., Encoder]:
    def make(**fields: Any) -> Encoder:
        chosen = {"url": server.url, "dim": DIM, "retries": 2, "backoff_s": 0.001, "timeout_s": 5.0, **fields}
        return build_encoder(OpenAIEncoderSettings.model_validate(chosen))

    return make


def test_texts_go_with_their_prefix_in_batches_over_one_connection(
    server: Server, client: Callable[..., Encoder]
) -> None:
    encoder = client(query_prefix="q: ", passage_prefix="p: ", batch=2, normalize=False, model="m", max_chars=16)
    texts = ["a", "bb", "c" * 40, "dddd", "e"]
    assert encoder.encode_queries(texts)[:, 0].tolist() == [4, 5, 16, 7, 4]
    assert [asked["input"] for asked in server.asked] == [["q: a", "q: bb"], ["q: " + "c" * 13, "q: dddd"], ["q: e"]]
    assert {asked["model"] for asked in server.asked} == {"m"}
    assert encoder.encode_passages(["a"])[0, 0] == 4
    assert server.asked[-1]["input"] == ["p: a"]
    assert server.connections == 1


def test_blank_texts_are_not_sent_and_have_the_zero_vector(server: Server, client: Callable[..., Encoder]) -> None:
    vectors = client().encode_passages(["", "abc", " \n"])
    assert server.asked[0]["input"] == ["abc"]
    assert np.linalg.norm(vectors, axis=1).tolist() == pytest.approx([0, 1, 0])
    assert client().encode_passages([""]).tolist() == [[0.0] * DIM]
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_transient_failures_are_retried(server: Server, client: Callable[..., Encoder], status: int) -> None:
    server.script = [(status, b"busy", {"Retry-After": "0.01"}), (status, b"busy", {"Connection": "close"})]
    assert client().encode_queries(["a"]).shape == (1, DIM)
    assert len(server.asked) == 3


@pytest.mark.parametrize(("status", "times"), [(400, 1), (401, 1), (302, 1), (502, 3)])
def test_what_stays_is_a_failure_with_its_status_as_the_cause(
    server: Server, client: Callable[..., Encoder], status: int, times: int
) -> None:
    server.script = [(status, b"no", {"Location": server.url + "/elsewhere/embeddings"})] * 5
    with pytest.raises(EncoderUnavailable) as caught:
        client().encode_queries(["a"])
    assert caught.value.cause == f"http_{status}"
    assert caught.value.for_all == (times > 1)
    assert len(server.asked) == times


def body(rows: list[Any], indexes: list[Any] | None = None) -> bytes:
    indexes = list(range(len(rows))) if indexes is None else indexes
    return json.dumps({"data": [{"index": i, "embedding": row} for i, row in zip(indexes, rows, strict=True)]}).encode()


ROW = [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>welcome</html>",
        b"[]",
        b'{"data": 3}',
        b'{"data": [{"index": 0}, {"index": 1}]}',
        body([ROW]),
        body([ROW, ROW, ROW]),
        body([ROW, ROW], [0, 0]),
        body([ROW, ROW], [1, 2]),
        body([ROW, ROW], [0, None]),
        body([ROW, ROW[:3]]),
        body([ROW, ["a", "b", "c", "d"]]),
        body([ROW, "text"]),
        b"[" * 50_000,
    ],
)
def test_an_answer_of_another_shape_is_garbage(server: Server, client: Callable[..., Encoder], answer: bytes) -> None:
    server.script = [(200, answer, {})]
    with pytest.raises(EncoderUnavailable) as caught:
        client().encode_queries(["a", "b"])
    assert caught.value.cause == "garbage"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e300])
def test_a_number_that_is_not_finite_is_refused(server: Server, client: Callable[..., Encoder], wrong: float) -> None:
    server.script = [(200, body([ROW, [wrong, 0.0, 0.0, 0.0]]), {})]
    with pytest.raises(NotFinite, match="1 of 2 texts, the first being 'b'"):
        client().encode_queries(["a", "b"])


def test_vectors_come_back_in_the_order_of_the_texts(server: Server, client: Callable[..., Encoder]) -> None:
    server.script = [(200, body([[0.0, 1.0, 0.0, 0.0], ROW], [1, 0]), {})]
    assert client().encode_queries(["a", "b"]).tolist() == [ROW, [0.0, 1.0, 0.0, 0.0]]


def test_an_answer_that_is_too_large_is_cut_off(server: Server, client: Callable[..., Encoder]) -> None:
    server.script = [(200, b" " * 200_000, {})]
    with pytest.raises(EncoderUnavailable, match="too_large"):
        client().encode_queries(["a"])


def test_no_server_is_unreachable_and_silence_a_timeout(server: Server, client: Callable[..., Encoder]) -> None:
    with pytest.raises(EncoderUnavailable, match="unreachable"):
        client(url="http://127.0.0.1:9").encode_queries(["a"])
    # more is announced than comes
    server.script = [(200, b"{}", {"Content-Length": "100"})]
    with pytest.raises(EncoderUnavailable, match="timeout"):
        client(timeout_s=0.2, retries=0).encode_queries(["a"])


def test_a_kept_connection_that_died_is_reopened(server: Server, client: Callable[..., Encoder]) -> None:
    encoder = client(retries=0)
    for _ in range(2):
        # closed without saying so
        server.script = [(200, None, {"Connection": "keep-alive"})]
        encoder.encode_queries(["a"])
        encoder._connection.sock.shutdown(2)  # type: ignore[attr-defined]
    encoder.encode_queries(["a"])
    assert server.connections == 3


def test_the_key_comes_from_the_environment_and_its_absence_is_reported(
    server: Server, client: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDDING_KEY", "sesame")
    client(api_key_variable="EMBEDDING_KEY").encode_queries(["a"])
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    monkeypatch.delenv("EMBEDDING_KEY")
    with pytest.raises(UserError, match="EMBEDDING_KEY is empty"):
        client(api_key_variable="EMBEDDING_KEY")


async def test_a_services_failure_is_a_named_fault_of_every_query_and_is_not_multiplied(
    server: Server, client: Callable[..., Encoder]
) -> None:
    class Searching:
        """A searcher as far as `IndexBackend` asks one."""

        encoder = client(retries=1)

        def search(self, queries: Sequence[str], k: int) -> list[QueryResult]:
            self.encoder.encode_queries(queries)
            return [QueryResult((), ()) for _ in queries]

    with ThreadPoolExecutor(1) as owner:
        backend = IndexBackend(Searching(), owner)  # type: ignore[arg-type]
        server.script = [(503, b"down", {})] * 2
        outcomes = await backend.search(["a", "b", "c"], 3)
        assert [outcome.cause for outcome in outcomes if isinstance(outcome, QueryFailure)] == ["http_503"] * 3
        assert len(server.asked) == 2
        # refused as a batch: possibly because of one text, so each is sent alone
        server.script = [(413, b"too long", {}), (200, None, {}), (413, b"too long", {})]
        outcomes = await backend.search(["a", "b", "c"], 3)
        assert [isinstance(outcome, QueryFailure) for outcome in outcomes] == [False, True, False]


def test_identity_is_what_decides_vectors() -> None:
    base = OpenAIEncoderSettings()
    same = OpenAIEncoderSettings(url="https://elsewhere/v1", retries=0, api_key_variable="KEY", batch=3)
    assert encoder_identity(same) == encoder_identity(base)
    for other in ({"model": "m"}, {"dim": 3}, {"query_prefix": "q"}, {"passage_prefix": "p"}, {"normalize": False}):
        assert encoder_identity(OpenAIEncoderSettings.model_validate(other)) != encoder_identity(base)
