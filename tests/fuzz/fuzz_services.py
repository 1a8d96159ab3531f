"""Run an HTTP service in a separate process, as its command starts it, and report its resources on request.

    stdin "look" --> stdout {"rss_mb", "fds", "tasks", "threads"}        end of stdin --> SIGTERM to itself --> exit

The retriever has a small index with an encoder; the rollout server a real Redis and a scripted engine; the CPU
engine a tiny model of random weights. Services log to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from protocol.runtime.log import start_logging
from protocol.runtime.net import free_port

KINDS = ("retriever", "rollout", "engine")
BODIES = {
    "retriever": "retriever.api.base",
    "rollout": "rollout_server.api.app",
    "engine": "rollout_server.cpu_engine.server.validation",
}
"""Modules that read the bodies of requests."""
CONTEXT = 24
"""Tokens of the engine's model: what is asked of it is over soon."""
Running = tuple[Awaitable[None], Callable[[], int]]


def look() -> dict[str, float]:
    """Return the resources of this process after garbage collection."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mb": pages * mmap.PAGESIZE / 2**20,
        "fds": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
    }


@asynccontextmanager
async def retriever(scratch: Path) -> AsyncIterator[Running]:
    """Over 40 passages, with vectors."""
    from retriever.config import RetrieverSettings
    from retriever.server import serve

    corpus, port = scratch / "corpus.jsonl", scratch / "port"
    lines = [json.dumps({"id": f"d{i}", "contents": f'"Page {i}"\nnumber{i} and the number{i + 1}'}) for i in range(40)]
    corpus.write_text("\n".join([*lines, json.dumps({"id": "a/b c?d", "contents": '"Odd"\ntext'})]) + "\n")
    given = {"corpus": corpus, "port": 0, "index": {"type": "memory"}, "threads": 1, "window_ms": 0.5, "cache_mb": 1}
    yield serve(RetrieverSettings.model_validate(given), port_file=port), lambda: int(port.read_text())


@asynccontextmanager
async def rollout(scratch: Path) -> AsyncIterator[Running]:
    """With a Redis of its own and an engine that always answers."""
    import redis

    from deploy.run.redis_server import find_server
    from protocol.codec import encode
    from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
    from protocol.messages import EngineInfo, NodeState, WeightUpdate
    from protocol.runtime.redis.server import function_library
    from protocol.settings import RunSettings
    from rollout_server.config import RolloutSettings
    from rollout_server.environment.tokenizer import load_tokenizer
    from rollout_server.server import serve
    from tests.support.environments import write_tokenizer
    from tests.support.fake_engine import FakeServer
    from tests.support.fake_search import canned_retriever

    socket, port, model = scratch / "redis.sock", scratch / "port", write_tokenizer(scratch / "model", "words")
    tokens, keys = load_tokenizer(model), Keys("fuzz")
    argv = [str(find_server().path), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(scratch)]
    store = await asyncio.create_subprocess_exec(
        *argv, "--maxmemory-policy", "noeviction", stdout=asyncio.subprocess.DEVNULL
    )
    try:
        while not socket.exists():
            assert store.returncode is None, "Redis did not start"
            await asyncio.sleep(0.02)
        with redis.Redis(unix_socket_path=str(socket)) as client:
            client.function_load(function_library(), replace=True)
            client.xgroup_create(keys.tasks, TASK_GROUP, "0", mkstream=True)
            client.xgroup_create(keys.traj, TRAJ_GROUP, "0", mkstream=True)
            async with (
                FakeServer(lambda body: tokens.encode_trusted("<answer> c </answer>"), version="1.3") as engine,
                canned_retriever("t\nd e f") as retriever,
            ):
                info = EngineInfo(id="e", url=engine.url, state=NodeState.READY, incarnation="a", epoch=1, step=3)
                target = WeightUpdate(run="fuzz", epoch=1, step=3, digest="d", path="nowhere")
                client.hset(keys.target, mapping={"b": encode(target), "state": "ready"})
                client.hset(keys.engine("e"), "b", encode(info))
                client.zadd(keys.engines, {"e": int(client.time()[0]) + 1_000_000})
                run = RunSettings(id="fuzz", dir=scratch, redis_url=f"unix://{socket}", model=model)
                given = {"search": {"type": "http", "urls": retriever.url}, "episode": {"template": "demo"}}
                settings = RolloutSettings.model_validate(given | {"port": 0})
                yield serve(run, settings, port_file=port), lambda: int(port.read_text())
                engine.requests.clear()
    finally:
        store.terminate()
        await store.wait()


@asynccontextmanager
async def engine(scratch: Path) -> AsyncIterator[Running]:
    """Over random weights."""
    import torch
    from safetensors.torch import save_file

    from rollout_server.cpu_engine.config import EngineSettings
    from rollout_server.cpu_engine.model.config import read_model_config
    from rollout_server.cpu_engine.model.loader import Weights
    from rollout_server.cpu_engine.server import app as serve
    from tests.support.environments import write_tokenizer

    model = write_tokenizer(scratch / "model", "words")
    vocab = len(json.loads((model / "tokenizer.json").read_text())["model"]["vocab"])
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    }
    (model / "config.json").write_text(json.dumps(config | sizes))
    weights = Weights(read_model_config(model), torch.float32)
    torch.manual_seed(0)
    save_file(
        {name: torch.randn(place.view.shape) for name, place in weights.places.items()}, model / "model.safetensors"
    )
    settings = EngineSettings(model_path=model, port=0, max_running=512, max_total_tokens=1 << 14, update_timeout_s=0.3)
    made, tokenizer, read = serve.build_engine(settings)
    settings = settings.model_copy(update={"port": free_port()})
    app = serve.build_app(made, tokenizer, read, settings, ("", ""))
    made.start()

    async def run() -> None:
        await serve.run_until_signal(app, made, settings)

    def port() -> int:
        socket.create_connection((settings.host, settings.port), timeout=1).close()  # OSError until it listens
        return settings.port

    try:
        yield run(), port
    finally:
        made.stop()


async def main(kind: str, scratch: Path, body_s: float) -> None:
    """Starts the service, says its port, and looks whenever it is asked to. `body_s` > 0: its deadline for a body."""
    if body_s:
        importlib.import_module(BODIES[kind]).BODY_S = body_s  # type: ignore[attr-defined]
    start_logging(os.environ, "%(asctime)s %(levelname)s %(name)s %(message)s")
    async with {"retriever": retriever, "rollout": rollout, "engine": engine}[kind](scratch) as (serving, port):
        task = asyncio.ensure_future(serving)
        while True:
            await asyncio.sleep(0.05)
            if task.done():
                await task
            try:
                print(json.dumps({"port": port()}), flush=True)
                break
            except OSError:
                continue
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(look() if line.strip() == "look" else {}), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await task


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
    if sys.argv[1] == "engine":
        os._exit(0)  # a group that never came about may hold a thread of gloo's
