"""Client calls of the contract tests, and a generation that is observed while it runs."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from contract_engines import PATIENCE_S, Server

PROMPT = list(range(40, 60))
DONE = "[DONE]"
LONG, ENDLESS = 600, 900
"""Tokens of a generation that something shall meet in the middle, and of one that something shall end."""


class Client:
    """Every answer is (status, decoded body). `key` goes with each call."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(self.server.url + path, json=body, **kwargs) as response:
            return response.status, _decoded(await response.text())

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(self.server.url + path, **kwargs) as response:
            return response.status, _decoded(await response.text())

    async def ok(self, path: str, body: Any = None) -> Any:
        status, answer = await self.post(path, body or {})
        assert status == 200, (path, answer)
        return answer

    async def generate(self, ids: Any = PROMPT, fields: dict[str, Any] | None = None, **sampling: Any) -> Any:
        """A whole answer; `ids` may be a list of prompts."""
        status, answer = await self.post("/generate", _body(ids, fields, sampling))
        assert status == 200, answer
        return answer

    async def chunks(
        self, ids: list[int] = PROMPT, fields: dict[str, Any] | None = None, **sampling: Any
    ) -> AsyncIterator[Any]:
        """The events of a stream; the last one must be DONE, and is checked and left out."""
        last = ""
        body = _body(ids, {"stream": True, **(fields or {})}, sampling)
        async with self.session.post(self.server.url + "/generate", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: "):
                    last = line[6:].decode().strip()
                    if last != DONE:
                        yield json.loads(last)
        assert last == DONE

    async def begin(self, rid: str = "", tokens: int = ENDLESS, at_least: int = 8, **sampling: Any) -> Run:
        """Start a long generation and wait for at least this many tokens."""
        # every fourth chunk: a reader that falls behind would meet a generation that is over
        asked = {"max_new_tokens": tokens, "ignore_eos": True, "stream_interval": 4, **sampling}
        run = Run(self, rid or uuid.uuid4().hex, asked)
        await run.reached(at_least)
        return run

    async def version(self) -> str:
        status, info = await self.get("/model_info")
        assert status == 200, info
        return str(info["weight_version"])

    async def checksums(self) -> dict[str, str]:
        """Checksum of each tensor of rank 0, under the engine's own names."""
        answer = await self.ok("/weights_checker", {"action": "checksum"})
        sums: dict[str, str] = answer["ranks"][0]["checksums"]
        assert sums
        return sums

    async def load(self, path: Path, version: str | None, **more: Any) -> tuple[int, Any]:
        return await self.post(
            "/update_weights_from_disk", {"model_path": str(path), "weight_version": version, **more}
        )

    async def swap(self, path: Path, version: str | None) -> None:
        """Other weights as a node brings them: in a pause. Without one, SGLang may still count the request that it has
        just answered, then cannot flush its cache, and ends."""
        await self.ok("/pause_generation", {"mode": "retract"})
        status, answer = await self.load(path, version)
        assert (status, answer["success"]) == (200, True), answer
        await self.ok("/continue_generation")

    async def running(self) -> int:
        """Requests that run, as the engine last said: SGLang says so after each step, so not while it is paused."""
        _, loads = await self.get("/v1/loads")
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads["loads"])

    async def until_running(self, count: int, seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while await self.running() != count:
            assert time.monotonic() < deadline, f"{await self.running()} requests run, expected {count}"
            await asyncio.sleep(0.02)


class Run:
    """One streamed generation; `chunks` grows while it runs. Waiting for it fails with what made it fail."""

    def __init__(self, client: Client, rid: str, sampling: dict[str, Any]) -> None:
        self.rid = rid
        self.chunks: list[Any] = []
        self._grown = asyncio.Condition()
        self._task = asyncio.create_task(self._read(client, sampling))

    async def _read(self, client: Client, sampling: dict[str, Any]) -> Any:
        async for chunk in client.chunks(fields={"rid": self.rid}, **sampling):
            async with self._grown:
                self.chunks.append(chunk)
                self._grown.notify_all()
        return self.chunks[-1]

    @property
    def count(self) -> int:
        """Tokens that have come."""
        return self.chunks[-1]["meta_info"]["completion_tokens"] if self.chunks else 0

    @property
    def done(self) -> bool:
        return self._task.done()

    async def reached(self, tokens: int) -> None:
        """Wait for at least this many tokens."""
        watch = asyncio.ensure_future(self._until(lambda: self.count >= tokens))
        await asyncio.wait({watch, self._task}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not watch.done():
            watch.cancel()
            if self._task.done():
                self._task.result()
            raise AssertionError(f"{self.count} tokens, expected {tokens}")

    async def _until(self, true: Callable[[], bool]) -> None:
        async with self._grown:
            await self._grown.wait_for(true)

    async def answer(self) -> Any:
        """The last chunk, which holds all of it."""
        return await asyncio.wait_for(self._task, PATIENCE_S)


def _body(ids: Any, fields: dict[str, Any] | None, sampling: dict[str, Any]) -> dict[str, Any]:
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": sampling, **(fields or {})}
    if ids and not isinstance(ids[0], list) and sampling.get("n", 1) == 1:
        # the scheduler matches an abort's rid by prefix: only names of one length are safe
        body.setdefault("rid", uuid.uuid4().hex)
    return body


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
