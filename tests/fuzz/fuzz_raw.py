"""HTTP requests that no client library would send: drawn from a service's description, then mutated in every layer.

Bodies (trees, bytes, deep nesting, NaN, huge numbers, doubled keys, wrong encodings), heads (methods, paths, types,
lengths, huge or broken headers), framing (chunked nonsense, truncation, pipelining) and pace (piece by piece, gone too
early). Each goes over a socket of its own; the answer is read as far as there is one.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fuzz_mutate import CONTROLS, NUMBERS, TEXTS, Mutator

ANSWER_S = 5.0
"""Timeout for the answer to a complete request."""
PATIENCE_S = 0.2
"""The same for one whose framing is wrong: the server may well wait for more."""
FINE = {("engine", b"/health_generate", 503), ("engine", b"/ready", 503), ("rollout", b"/ready", 503)}
"""(service, path, status) of 500 and more that are no bug: a paused engine is not ready, and says so."""

EXAMPLES: dict[str, Any] = {
    "/retrieve": {"queries": ["number3"], "topk": 3, "return_scores": True, "partial": True},
    "/search": {"query": "number3", "top_n": 3, "return_score": True},
    "/batch_search": {"query": ["number3", "number4"], "top_n": 3},
    "/v1/embeddings": {"input": ["a", "b"], "model": "m", "encoding_format": "base64", "input_type": "query"},
    "/v1/episodes": {"questions": [{"id": "q", "question": "a ?", "answers": ["c"]}], "n": 1, "stream": False},
    "/generate": {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 4, "stop": ["x"], "top_k": 3}},
    "/abort_request": {"rid": "r", "abort_all": False},
    "/pause_generation": {"mode": "retract"},
    "/update_weights_from_disk": {"model_path": "nowhere", "weight_version": "1.0", "flush_cache": True},
    "/update_weight_version": {"new_version": "1.2", "abort_all_requests": False},
    "/weights_checker": {"action": "checksum"},
    "/destroy_weights_update_group": {"group_name": "g"},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "nowhere"},
    "/unload_lora_adapter": {"lora_name": "a"},
    "/init_weights_update_group": {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2},
}
MORE: dict[str, tuple[Any, ...]] = {
    "/generate": (
        {"text": "a b c", "stream": True, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True},
        {"text": ["a", "b"], "sampling_params": [{"n": 2}, {}], "rid": ["x", "y"], "top_logprobs_num": 2},
        {
            "input_ids": [3],
            "sampling_params": {"temperature": 0.5, "top_p": 0.5, "sampling_seed": 3, "max_new_tokens": 2},
        },
    ),
    "/v1/episodes": ({"questions": [{"id": "q", "text": "a ?"}], "n": 3, "stream": True, "temperature": 0},),
}
METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"PATCH",
    b"HEAD",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"get",
    b"FUZZ",
    b"G\x00T",
    b"",
)
PATHS = (
    *(
        b"/",
        b"//",
        b"/..",
        b"/%2e%2e/etc/passwd",
        b"/%00",
        b"/%ff",
        b"/\xff",
        b"/passages?id=%00",
        b"/passages/%ed%a0%80",
    ),
    *(
        b"*",
        b"http://[::1",
        b"//[",
        b"/?" + b"a=b&" * 500,
        b"/" + b"a" * 9000,
        b"/#",
        b"/health?x[]=1",
        b"http://x:99999/health",
    ),
)
HEADERS = (
    *(b"Host: [", b"Host: evil.example", b"Host: \xff", b"Authorization: Bearer \xff\xfe", b"Authorization: Basic ="),
    *(b"Content-Type: text/plain", b"Content-Type: \xff", b"Content-Type: application/json; charset=nonsense"),
    *(
        b"Content-Type: application/json; charset=utf-16",
        b"Content-Type: multipart/form-data",
        b"Content-Encoding: gzip",
    ),
    *(b"Content-Encoding: deflate", b"Content-Encoding: br", b"Content-Encoding: zstd", b"Content-Encoding: fuzz"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Expect: 100-continue", b"Expect: fuzz"),
    *(b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: a", b"Content-Length: 3"),
    *(b"Upgrade: websocket", b"Connection: upgrade, keep-alive, close", b"Range: bytes=9-1", b"X: " + b"a" * 9000),
    *(
        b"Cookie: " + b"a=b;" * 500,
        b"NoColon",
        b": empty",
        b"Na me: x",
        b"X\x00: y",
        b" folded",
        b"If-Modified-Since: 99",
    ),
)


STATUS = re.compile(rb"^HTTP/1\.[01] (\d{3}) ", re.MULTILINE)


@dataclass
class Tally:
    """Results of the requests. `bad`: [finding, request] of answers that are bugs."""

    sent: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[str, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Draw:
    """One connection's bytes in pieces.

    whole  it is HTTP as it should be: the server must answer
    gone   the client leaves after the last piece without reading
    """

    pieces: Sequence[bytes]
    whole: bool = True
    gone: bool = False
    pause_s: float = 0.0

    @property
    def raw(self) -> bytes:
        return b"".join(self.pieces)


class Requests:
    """Draws requests to one service from its OpenAPI `document`."""

    def __init__(self, rng: random.Random, document: dict[str, Any]) -> None:
        self._rng = rng
        self._routes = [(path, method) for path, methods in document["paths"].items() for method in methods]
        self._bodies = {
            path: Mutator(
                rng, "json", [json.dumps(body).encode() for body in (EXAMPLES.get(path, {}), *MORE.get(path, ()))]
            )
            for path, _ in self._routes
        }

    def draw(self) -> Draw:
        """One request, or several on one connection."""
        rng = self._rng
        # what takes a body has more to get wrong
        path, method = rng.choice([r for r in self._routes if r[1] != "get"] if rng.random() < 0.8 else self._routes)
        body = self._body(path) if method != "get" or rng.random() < 0.1 else b""
        if rng.random() < 0.7:  # framed correctly, so that the body is parsed
            return Draw([self._plain(path, method, body, close=True)], gone=rng.random() < 0.02)
        raw = self._framed(self._line(path, method), self._headers(), body)
        if rng.random() < 0.15:
            raw = self._plain(path, method, body, close=False) * rng.randrange(1, 4) + raw
        if rng.random() < 0.1:
            raw = _hurt(rng, raw)
        if rng.random() < 0.1:
            return Draw([raw[: rng.randrange(len(raw) + 1)]], whole=False, gone=rng.random() < 0.8)
        if rng.random() < 0.15:
            at = sorted(rng.randrange(len(raw) + 1) for _ in range(3))
            pieces = [raw[: at[0]], raw[at[0] : at[1]], raw[at[1] :]]
            return Draw(pieces, whole=False, pause_s=0.01, gone=rng.random() < 0.3)
        return Draw([raw], whole=False, gone=rng.random() < 0.1)

    def _plain(self, path: str, method: str, body: bytes, *, close: bool) -> bytes:
        headers = [b"Host: 127.0.0.1", b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
        headers += [b"Connection: close"] if close else []
        target = path.replace("{id}", "d3").encode()
        return b"\r\n".join([method.upper().encode() + b" " + target + b" HTTP/1.1", *headers, b"", body])

    def _body(self, path: str) -> bytes:
        rng = self._rng
        chance = rng.random()
        if chance < 0.75:
            return self._bodies[path].draw()[: 1 << 20]
        body = json.dumps(EXAMPLES.get(path, {})).encode()
        if chance < 0.8:
            return body
        if chance < 0.85:
            return body.decode().encode(rng.choice(("utf-16", "utf-32", "utf-7", "utf-8-sig")))
        if chance < 0.9:
            key = rng.choice(re.findall(rb'"(\w+)":', body) or [b"a"])
            return body[:-1] + b',"' + key + b'":' + json.dumps(rng.choice(TEXTS + NUMBERS)).encode() + b"}"
        if chance < 0.95:
            return re.sub(
                rb"\d+|true|false", lambda m: rng.choice((b"NaN", b"-Infinity", b"1e999", b"1" * 5000, m[0])), body
            )
        return b"[" * rng.choice((10, 1000, 100_000)) + b"]"

    def _line(self, path: str, method: str) -> bytes:
        rng = self._rng
        target = path.replace("{id}", rng.choice(("d3", "a/b%20c%3Fd", "%ff", "none", ".", "%2e%2e"))).encode()
        if path == "/passages":
            target += b"?id=" + rng.choice((b"d3", b"", b"%00", b"%ff", b"a" * 3000))
        if rng.random() < 0.03:
            target = rng.choice(PATHS)
        verb = rng.choice(METHODS) if rng.random() < 0.04 else method.upper().encode()
        version = (
            b"HTTP/1.1"
            if rng.random() < 0.97
            else rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"", b"HTTP/1.1 x"))
        )
        return verb + b" " + target + b" " + version

    def _headers(self) -> list[bytes]:
        rng = self._rng
        headers = [b"Host: 127.0.0.1"] if rng.random() < 0.98 else []
        headers += [b"Content-Type: application/json"] if rng.random() < 0.9 else []
        while rng.random() < 0.15:
            headers.append(rng.choice(HEADERS))
        if rng.random() < 0.005:
            headers += [b"X-%d: y" % i for i in range(2000)]
        return headers

    def _framed(self, line: bytes, headers: list[bytes], body: bytes) -> bytes:
        """The request with the length of its body, or in chunks, now and then neither as it should be."""
        rng = self._rng
        chance = rng.random()
        if chance < 0.85:
            headers = [*headers, b"Content-Length: %d" % len(body)]
        elif chance < 0.92:
            headers, body = [*headers, b"Transfer-Encoding: chunked"], self._chunks(body)
        elif chance < 0.96:
            headers = [*headers, b"Content-Length: %d" % max(0, len(body) + rng.choice((-3, -1, 1)))]
        return b"\r\n".join([line, *headers, b"", body])

    def _chunks(self, body: bytes) -> bytes:
        rng, parts = self._rng, []
        while body:
            size = rng.randrange(1, 400)
            parts.append(b"%x\r\n%b\r\n" % (len(body[:size]), body[:size]))
            body = body[size:]
        raw = b"".join(parts) + b"0\r\n\r\n"
        return _hurt(rng, raw) if rng.random() < 0.5 else raw


def _hurt(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + rng.choice((rng.randbytes(3), rng.choice(CONTROLS), b"")) + raw[at + rng.randrange(4) :]


async def send_all(kind: str, port: int, requests: Requests, count: int, lanes: int = 12) -> Tally:
    """Send `count` requests over several concurrent connections."""
    tally = Tally()

    async def lane() -> None:
        while tally.sent < count:
            tally.sent += 1
            draw = requests.draw()
            for status in await _one(port, draw):
                tally.statuses[status] += 1
                code = int(status) if status.isdigit() else 0
                fine = any(service == kind and code == c and path in draw.raw for service, path, c in FINE)
                if status == "no answer in time" or (code >= 500 and not fine):
                    tally.bad.append((status, draw.raw))

    await asyncio.gather(*(lane() for _ in range(lanes)))
    return tally


async def _one(port: int, draw: Draw) -> list[str]:
    """Return the status of each answer, or what was received instead."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        for piece in draw.pieces:
            writer.write(piece)
            if draw.pause_s:
                await asyncio.sleep(draw.pause_s)
        await writer.drain()
        if draw.gone:
            return ["(left)"]
        raw = bytearray()
        try:
            async with asyncio.timeout(ANSWER_S if draw.whole else PATIENCE_S):
                while piece := await reader.read(1 << 16):
                    raw += piece
        except TimeoutError:
            if draw.whole:
                return ["no answer in time"]
        return [code.decode() for code in STATUS.findall(raw)] or ["(none)"]
    except OSError:
        return ["(reset)"]
    finally:
        writer.close()
