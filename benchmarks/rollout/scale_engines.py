"""Simulated engines for `foray bench rollout_scale`: any number of them in one process, at the paths of one port.

    python -m benchmarks.rollout.scale_engines SPEC.json PORT

`POST /NAME/generate` streams SGLang's incremental chunks at a fixed pace. SPEC: `ids` of a turn, `pace_s` a token,
`prompt` tokens before a turn, so that a continued one gets the rest; null: every request starts a turn. With `hold` a
stream gets no more than so many tokens.

    loop       consumes    produces              waits for           unblocked by
    generate   a request   its turn, in chunks   the next chunk      the clock; a client that leaves
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from protocol.runtime.net import allow_many_files

VERSION = "1.0"


def app(spec: dict[str, Any]) -> web.Application:
    """Return the routes of all engines."""

    async def generate(http: web.Request) -> web.StreamResponse:
        body = await http.json()
        params, given = body["sampling_params"], len(body["input_ids"])
        said = given - spec["prompt"] if spec["prompt"] is not None else 0
        ids = spec["ids"][said : said + params["max_new_tokens"]]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        loop, interval, sent = asyncio.get_running_loop(), params["stream_interval"], 0
        begun = loop.time()
        while sent < len(ids):
            upto = min(len(ids), sent + interval)
            if upto > spec.get("hold", len(ids)):
                await asyncio.Event().wait()
            await asyncio.sleep(begun + upto * spec["pace_s"] - loop.time())
            stopped = {"type": "stop", "matched": None} if len(ids) < params["max_new_tokens"] else {"type": "length"}
            meta = {
                "id": body["rid"],
                "finish_reason": stopped if upto == len(ids) else None,
                "prompt_tokens": given,
                "completion_tokens": upto,
                "weight_version": VERSION,
                "output_token_logprobs": [[-0.25, i, None] for i in ids[sent:upto]],
            }
            chunk = {"text": "", "output_ids": ids[sent:upto], "meta_info": meta}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            sent = upto
        with suppress(ConnectionResetError):  # a client that stops needs no end
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    routes = web.Application(client_max_size=64 << 20)
    routes.router.add_post("/{name}/generate", generate)
    return routes


def main(argv: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    allow_many_files()
    web.run_app(
        app(json.loads(Path(argv[0]).read_text())),
        host="127.0.0.1",
        port=int(argv[1]),
        access_log=None,
        print=None,
        handler_cancellation=True,
        backlog=4096,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
