"""Build the engine and its HTTP application, serve until a signal, and shut down.

main thread (asyncio, aiohttp)                         engine thread (torch)
POST /generate -> parse -> Request  --queue-->  Engine -> Scheduler.step -> ModelRunner.step -> CausalLM.forward
     ^                                                                               |
     +--- answer <--- call_soon_threadsafe <--- Request.notify <--- StopCriteria <--- sample
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import torch
from aiohttp import web

from protocol.errors import UserError
from protocol.runtime.http.server import SERVER_OPTIONS, listening
from protocol.runtime.lifecycle import shutdown_on_signals
from protocol.runtime.log import start_logging
from protocol.runtime.number_format import resolve
from protocol.weights import DIGESTS
from rollout_server.cpu_engine.config import EngineSettings
from rollout_server.cpu_engine.model.config import ModelConfig, read_model_config
from rollout_server.cpu_engine.model.llama import CausalLM
from rollout_server.cpu_engine.model.loader import Weights, WeightsError
from rollout_server.cpu_engine.model.runner import ModelRunner
from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.scheduler.engine import Engine
from rollout_server.cpu_engine.scheduler.kv_cache import WIDTH_STEP, KVCache
from rollout_server.cpu_engine.scheduler.request import EngineCounters, StopCriteria
from rollout_server.cpu_engine.scheduler.scheduler import Scheduler
from rollout_server.cpu_engine.server.admin import AdminRoutes
from rollout_server.cpu_engine.server.auth import guard
from rollout_server.cpu_engine.server.generate import Generation
from rollout_server.cpu_engine.server.lora import LoraRoutes
from rollout_server.cpu_engine.server.openai_routes import OpenAIRoutes
from rollout_server.cpu_engine.server.validation import Limits
from rollout_server.cpu_engine.server.weights import WeightRoutes

log = logging.getLogger("rollout_server.cpu_engine")

SWITCH_INTERVAL = 0.0002
"""Switch interval of the GIL in seconds. With the default of 5 ms the HTTP thread would delay each of the about hundred
short torch calls per step of the engine thread."""
BODY_LIMIT = 64 << 20
UPDATES = web.AppKey("updates", WeightRoutes)


def build_engine(settings: EngineSettings) -> tuple[Engine, Tokenizer, ModelConfig]:
    """Return the engine (not started), the tokenizer and the model config. Raises UserError."""
    torch.set_num_threads(settings.threads)
    config = read_model_config(settings.model_path)
    chosen = resolve(settings.dtype, settings.model_path, log.warning, lambda: torch, gpu=False)
    dtype = getattr(torch, chosen)
    weights = Weights(config, dtype)
    try:
        weights.load(settings.model_path)
    except WeightsError as error:
        raise UserError(str(error), todo="set --model-path to a complete model directory") from None
    tokenizer = Tokenizer(settings.model_path)
    # a tokenizer may have more tokens than the model has outputs
    tokenizer.eos_ids = frozenset(token for token in tokenizer.eos_ids if token < config.vocab)
    budget = cache_tokens(settings, config, dtype.itemsize)
    kv = KVCache(config.layers, config.kv_heads, config.head_dim, dtype, budget)
    runner = ModelRunner(CausalLM(config, weights), kv, settings.max_running)
    scheduler = Scheduler(
        runner, StopCriteria(tokenizer), EngineCounters(), settings.max_running, settings.weight_version
    )
    return Engine(scheduler, settings.model_path, settings.threads), tokenizer, config


def cache_tokens(settings: EngineSettings, config: ModelConfig, itemsize: int) -> int:
    """Return the size of the KV cache in tokens, a multiple of WIDTH_STEP. Raises UserError if it is too small."""
    wanted = settings.max_total_tokens
    if not wanted:
        wanted = max(min((1 << 30) // config.kv_bytes_per_token(itemsize), 1 << 17), config.context + WIDTH_STEP)
    if wanted < 2 * WIDTH_STEP:
        raise UserError(f"--max-total-tokens {wanted} is too small", todo=f"set it to at least {2 * WIDTH_STEP}")
    return wanted // WIDTH_STEP * WIDTH_STEP


def build_app(
    engine: Engine, tokenizer: Tokenizer, config: ModelConfig, settings: EngineSettings, keys: tuple[str, str]
) -> web.Application:
    """Return the HTTP application of a started engine."""
    limits = Limits(config.vocab, config.context, engine.scheduler.runner.kv.budget)
    adapters = LoraRoutes(engine)
    generation = Generation(engine, tokenizer, limits, adapters, settings.seed, settings.incremental_streaming_output)
    info = {
        "served_model_name": settings.model_path.name or "model",
        "engine": "foray-cpu",
        "model_type": config.family,
        "vocab_size": config.vocab,
        "context_length": config.context,
        "is_generation": True,
        "eos_token_ids": sorted(tokenizer.eos_ids),
        "dtype": str(engine.scheduler.runner.kv.dtype).removeprefix("torch."),
        "checksums": list(DIGESTS),
    }
    updates = WeightRoutes(engine, settings.update_timeout_s)
    control = AdminRoutes(engine, generation, info, settings.model_dump(mode="json")).routes()
    control += updates.routes() + adapters.routes()
    admin = {route.path for route in control if route.method == "POST"}
    app = web.Application(client_max_size=BODY_LIMIT, middlewares=[guard(*keys, admin)], handler_args=SERVER_OPTIONS)
    app[UPDATES] = updates
    app.add_routes([web.post("/generate", generation.generate), web.put("/generate", generation.generate)])
    app.add_routes(OpenAIRoutes(generation, tokenizer, limits, adapters, settings.model_path, settings.date).routes())
    app.add_routes(control)
    return app


def serve(settings: EngineSettings, api_key: str, admin_key: str) -> None:
    """Run until SIGINT or SIGTERM. Raises UserError for an invalid model or a port in use."""
    start_logging(os.environ, "%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL)
    engine, tokenizer, config = build_engine(settings)
    app = build_app(engine, tokenizer, config, settings, (api_key, admin_key))
    engine.start()
    try:
        clean = asyncio.run(run_until_signal(app, engine, settings))
    finally:
        engine.stop()
    if not clean:
        # at interpreter exit, gloo's destructors would wait for the trainer until the timeout
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


async def run_until_signal(app: web.Application, engine: Engine, settings: EngineSettings) -> bool:
    """Serve requests until SIGINT or SIGTERM. Return whether all threads have ended."""
    serving = listening(
        app,
        settings.host,
        settings.port,
        access=None,  # `read_keys` rejects a non-loopback host without an API key
        setting="--host",
        todo="set another --port, or 0 to pick a free one",
        shutdown_s=1.0,
    )
    with shutdown_on_signals() as shutdown:
        async with serving as listener:
            print(f"listening on {listener.url}", flush=True)
            await shutdown.requested.wait()
        # while the loop still runs: it delivers the engine's last messages
        await asyncio.to_thread(engine.stop)
        return await app[UPDATES].close()
