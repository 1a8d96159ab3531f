"""The baseline: Search-R1's loop over the same draws. In each turn all trajectories wait for the slowest.

`python -m benchmarks.rollout.barrier SCRIPT SEED PLAY SEARCH_URL ENGINE_URL...` prints one JSON object. Per turn: one
batched generation of all trajectories (all requests are sent at the same time with Foray's client, and awaited), then
one blocking search call with all queries, then the observations are appended. (`LLMGenerationManager.run_llm_loop` and
`batch_search` of Search-R1, arXiv:2503.09516.) The last turn does not search.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.rollout.latency_engine import FIRST_VERSION
from benchmarks.rollout.script import Script
from protocol.messages import Sampling
from protocol.search import SearchRequest, SearchResponse
from rollout_server.engine.base import GenerateRequest
from rollout_server.engine.client import SglangClient
from rollout_server.environment.actions import AnswerAction, SearchAction, parse
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.environment.environment import Environment, build_environment
from rollout_server.rollout.transcript import Transcript

TIMEOUT_S = 600.0


async def play(script: Script, seed: int, number: int, search_url: str, engines: Sequence[SglangClient]) -> int:
    """Run all trajectories of one seed to their answers. Return the number of generated turns."""
    environment = build_environment(EnvironmentSettings(template="demo"), script.directory)
    groups = range(script.draws.trajectories // script.group_size)
    prompts = [environment.prompt(script.question(number, seed, group)) for group in groups]
    batch = [
        Transcript(prompt, environment.settings.max_context) for prompt in prompts for _ in range(script.group_size)
    ]
    for turn in range(script.draws.turns):
        texts = await _generate(environment, batch, engines)
        actions = [parse(text) for text in texts]
        if turn == script.draws.turns - 1:
            if not all(isinstance(action, AnswerAction) for action in actions):
                raise RuntimeError("a trajectory did not end in an answer")
            break
        queries = [action.query for action in actions if isinstance(action, SearchAction)]
        found = _search(search_url, queries)
        for transcript, hits in zip(batch, found.result, strict=True):
            passages = [hit.document for hit in hits]
            transcript.observe(environment.observation(passages, environment.settings.max_obs_tokens))
    return len(batch) * script.draws.turns


async def _generate(
    environment: Environment, batch: Sequence[Transcript], engines: Sequence[SglangClient]
) -> list[str]:
    """Generate one turn of each trajectory concurrently. Return the texts when all have finished."""

    async def one(index: int, transcript: Transcript) -> str:
        request = GenerateRequest(
            ids=transcript.ids,
            session=f"{index:032x}",
            group="",
            max_new_tokens=environment.settings.max_new_tokens,
            sampling=Sampling(),
            stop=environment.template.stops,
        )
        client = engines[index % len(engines)]
        completion = await client.generate(request, version=FIRST_VERSION, timeout_s=TIMEOUT_S)
        transcript.write(completion)
        return environment.tokenizer.decode_turn(completion.ids)

    return await asyncio.gather(*(one(i, transcript) for i, transcript in enumerate(batch)))


def _search(url: str, queries: Sequence[str]) -> SearchResponse:
    """Search all queries in one blocking call, as in the original."""
    body = SearchRequest(queries=list(queries), topk=3, return_scores=True).model_dump_json().encode()
    request = urllib.request.Request(f"{url}/retrieve", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return SearchResponse.model_validate_json(response.read())


async def measure(argv: Sequence[str]) -> dict[str, Any]:
    """Return wall-clock and CPU seconds for one seed, without imports and start-up."""
    script, seed, number = Script.load(Path(argv[0])), int(argv[1]), int(argv[2])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        engines = [SglangClient(session, url, name=url) for url in argv[4:]]
        begun, cpu = time.monotonic(), time.process_time()
        turns = await play(script, seed, number, argv[3], engines)
        return {"seconds": time.monotonic() - begun, "cpu_s": time.process_time() - cpu, "turns": turns}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1:]))))
