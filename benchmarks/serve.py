"""`foray bench serve`: tokens/s of `foray serve` for many clients, against its own engine bare.

All clients ask at the same time and read streams: greedy, with the same prompts, token ids and limits on every way. The
baseline is the engine of the same server, asked at its own port with the ids of the rendered prompts, in chunks of as
many tokens. The ways take turns in each round, forwards and backwards, since the engine's cache holds the prompts of
the way before. The model has random weights, so the loop takes all its turns and searches nothing: its row is the rate
of its turns.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from benchmarks.base import BenchResult, BenchSettings, Say, Target

if TYPE_CHECKING:
    import aiohttp

WORDS = "question answer search reason information document passage think inside given each time find knowledge"
EPISODE = {"template": "search_r1", "max_turns": 1, "max_context": 2048}


class ServeBench(BenchSettings):
    """Settings of `foray bench serve`."""

    help: ClassVar[str] = "tokens/s of foray serve for many clients, against its engine bare"
    quick: ClassVar[dict[str, Any]] = {"clients": 4, "new_tokens": 8, "rounds": 1, "shape": "tiny"}
    targets: ClassVar[tuple[Target, ...]] = (
        Target("ratio", 0.8, "tokens a second of NAME-bare / of the same engine bare"),
    )
    modules: ClassVar[tuple[str, ...]] = (
        *("rollout_server/chat", "rollout_server/agents", "rollout_server/engine", "rollout_server/cpu_engine"),
        "benchmarks/serve.py",
    )

    shape: Literal["tiny", "small", "135m"] = "small"
    """Size of the model, as in `foray bench learner`."""
    clients: int = Field(default=64, ge=1)
    """Clients that ask at the same time."""
    new_tokens: int = Field(default=96, ge=1)
    """Limit of an answer, and of a turn of the loop."""
    prompt_words: int = Field(default=24, ge=1)
    """Words of a question."""
    rounds: int = Field(default=4, ge=1)
    """Rounds that count, after a warm-up."""
    seed: int = 0
    """Random seed of the prompts."""

    def measure(self, say: Say) -> BenchResult:
        """Serve the model, ask in all ways, and stop."""
        import foray
        from benchmarks.learner.settings import LearnerBench
        from benchmarks.learner.workload import write_model
        from rollout_server.agents.config import OwnAgentSettings
        from rollout_server.agents.native import build_renderer
        from rollout_server.engine.client import STREAM_INTERVAL
        from tests.support.environments import make_environment

        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            directory = Path(name)
            model = directory / "model"
            episode: dict[str, Any] = EPISODE | {"max_new_tokens": self.new_tokens}
            environment = make_environment(model, "bytes", **episode)
            write_model(LearnerBench.model_validate({"shape": self.shape, "vocabulary": 640}), model)
            renderer = build_renderer(OwnAgentSettings(type="builtin"), environment)
            overrides = [f"rollout.episode={json.dumps(episode)}", "rollout.search.type=none"]
            with foray.serve(model, name="policy", out=directory / "serving", overrides=overrides) as server:
                engine = foray.Run(server.directory / "serve").status()["engines"][0]["url"]
                greedy = {"temperature": 0, "stream_options": {"include_usage": True}}

                def chat(model: str, text: str, **limit: int) -> tuple[str, dict[str, Any], str]:
                    body = {"model": model, "messages": [_user(text)], **greedy, **limit}
                    return f"{server.url}/chat/completions", body, server.token

                def bare(text: str) -> tuple[str, dict[str, Any]]:
                    limits = {"max_new_tokens": self.new_tokens, "temperature": 0.0, "stream_interval": STREAM_INTERVAL}
                    ids = renderer.begin([_user(text)], ())
                    return f"{engine}/generate", {"input_ids": ids, "sampling_params": limits}

                ways: dict[str, _Way] = {
                    "engine": bare,
                    "alone": lambda text: chat(server.models[1], text, max_tokens=self.new_tokens),
                    "loop": lambda text: chat(server.models[0], text),
                }
                rows = asyncio.run(_rounds(self, ways, say))
        rates = {way: row["tokens"] / row["seconds"] for way, row in rows.items()}
        return BenchResult(
            value=rates["alone"],
            unit="tokens/s of NAME-bare",
            baseline={"name": "the same engine bare", "tokens_per_s": rates["engine"]},
            ratio=rates["alone"] / rates["engine"],
            details={
                "loop_tokens_per_s": rates["loop"],
                "first_text_s": rows["alone"]["first_s"] / rows["alone"]["answers"],
                "tokens": {way: row["tokens"] for way, row in rows.items()},
            },
        )


_Way = Callable[[str], tuple[Any, ...]]
"""Returns URL, body and token of a question."""


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _rounds(settings: ServeBench, ways: dict[str, _Way], say: Say) -> dict[str, dict[str, float]]:
    """Return way -> sums over the rounds: tokens, seconds, answers, seconds to the first text."""
    import aiohttp

    draw = random.Random(settings.seed)
    sums = {way: dict.fromkeys(("tokens", "seconds", "answers", "first_s"), 0.0) for way in ways}
    unlimited = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=unlimited) as session:
        for number in range(settings.rounds + 1):
            texts = [" ".join(draw.choices(WORDS.split(), k=settings.prompt_words)) for _ in range(settings.clients)]
            shown = []
            for way in list(ways) if number % 2 else list(reversed(ways)):
                began = time.monotonic()
                answers = await asyncio.gather(*(_asked(session, *ways[way](text)) for text in texts))
                seconds, tokens = time.monotonic() - began, sum(count for count, _ in answers)
                shown.append(f"{way} {tokens / seconds:.0f}")
                if number:
                    first_s = sum(first - began for _, first in answers)
                    row = {"tokens": tokens, "seconds": seconds, "answers": len(answers), "first_s": first_s}
                    sums[way] = {name: sums[way][name] + value for name, value in row.items()}
            say(f"{f'round {number}' if number else 'warm-up'}, tokens/s: {', '.join(shown)}")
    return sums


async def _asked(session: aiohttp.ClientSession, url: str, body: dict[str, Any], token: str = "") -> tuple[int, float]:
    """Return the number of tokens that a stream says it has, and when its first event came."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    last, first = b"", 0.0
    async with session.post(url, json={**body, "stream": True}, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                last, first = line[6:], first or time.monotonic()
    told = json.loads(last)
    return int((told.get("usage") or told["meta_info"])["completion_tokens"]), first
