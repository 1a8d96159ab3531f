"""200 trajectories, three weight updates in the middle of generation: is the version of every token the one recorded?

Through all of the product that lies between learner and engine (publisher, Redis, node, router, streaming client).
The proof is arithmetic: transformers, with the weights of the recorded version, must arrive at the engine's log-probs.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_engines import Server
from contract_models import write_model
from contract_ring import Mode, Ring, Transport, after_retract, in_place, moved, ring

from protocol.messages import Sampling
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion, GenerateRequest

TRAJECTORIES = 200
AT_ONCE, LENGTHS = 40, (48, 144)
UPDATES_AFTER = (20, 70, 120)
"""Trajectories that have ended when the next version is published, in the middle of AT_ONCE others."""
VERSIONS = [PolicyVersion(1, step) for step in range(4)]
HELD_BACK = 16
"""Trajectories that begin right after each update; the next update waits for one of them: each version samples tokens
and each update has trajectories to cross, however slow the updates are."""
CROSSING, ATTEMPTS = 3 * 8, 4
"""Trajectories that an update must cut. A machine that is busy with something else may load a version so late that all
have ended: then another attempt is made."""
TOLERANCE = 1e-3
FIRST_IDS = 290
Redone = Callable[[dict[PolicyVersion, Any], Sequence[int], Completion], torch.Tensor]

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def redis_url(redis_socket: str) -> str:
    return f"unix://{redis_socket}"


def prompts(mode: Mode) -> list[list[int]]:
    """In groups of eight with a common prompt, as the router meets them. In place no two begin alike: then it is known
    whose keys and values are in the cache, that of a request which waited through an update included."""
    rng = random.Random(0)
    first = rng.sample(range(3, FIRST_IDS), TRAJECTORIES) if mode == "in_place" else [5] * TRAJECTORIES
    heads = [[first[i], *(rng.randrange(3, FIRST_IDS) for _ in range(23))] for i in range(TRAJECTORIES)]
    return [heads[i // 8] if mode == "retract" else heads[i] for i in range(TRAJECTORIES)]


async def generate_through_updates(
    whole: Ring, policies: dict[PolicyVersion, Path], asked: list[list[int]]
) -> list[Completion]:
    """Every prompt's completion; the versions after the first are published while they are generated."""
    ended = 0
    progress, places, rng = asyncio.Event(), asyncio.Semaphore(AT_ONCE), random.Random(1)
    held = {version: asyncio.Event() for version in VERSIONS[1:]}
    ended_of = Counter[PolicyVersion]()
    first_held_back = len(asked) - HELD_BACK * len(held)

    async def one(number: int, prompt: list[int]) -> Completion:
        nonlocal ended
        request = GenerateRequest(
            ids=prompt,
            session=f"{number:032x}",
            group=f"{number // 8:032x}",
            max_new_tokens=rng.randint(*LENGTHS),
            sampling=Sampling(),
        )
        if number >= first_held_back:
            version = VERSIONS[1 + (number - first_held_back) // HELD_BACK]
            await held[version].wait()
            done = await whole.router(request)
            ended_of[version] += 1
        else:
            async with places:
                done = await whole.router(request)
        ended += 1
        progress.set()
        return done

    tasks = [asyncio.create_task(one(number, prompt)) for number, prompt in enumerate(asked)]
    for after, old, version in zip(UPDATES_AFTER, VERSIONS, VERSIONS[1:], strict=False):
        while ended < after or (old in held and not ended_of[old]):
            progress.clear()
            await progress.wait()
        await whole.publish(version, policies[version])
        await whole.until_held(version)
        held[version].set()
    return await asyncio.gather(*tasks)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_retract_samples_every_token_from_its_version_alone(
    server: Server, redis_url: str, tmp_path: Path, transport: Transport
) -> None:
    await check(server, redis_url, tmp_path, transport, "retract")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_in_place_versions_are_right_to_the_token(
    unlapped: Server, redis_url: str, tmp_path: Path, transport: Transport
) -> None:
    await check(unlapped, redis_url, tmp_path, transport, "in_place")


async def check(server: Server, redis_url: str, folder: Path, transport: Transport, mode: Mode) -> None:
    for attempt in range(ATTEMPTS):
        (place := folder / str(attempt)).mkdir()
        # nothing in common but their shape, so that a wrong label cannot hide
        policies = {VERSIONS[0]: server.first} | {v: write_model(place / v.label, 10 + v.step) for v in VERSIONS[1:]}
        asked = prompts(mode)
        async with ring(server, redis_url, place, transport, mode) as whole:
            done = await generate_through_updates(whole, policies, asked)
        models = {version: server.policy(path) for version, path in policies.items()}
        tokens = Counter(span.version.label for d in done for span in d.spans for _ in range(span.start, span.end))
        assert set(tokens) == {v.label for v in VERSIONS} and sum(tokens.values()) == sum(len(d.ids) for d in done)
        crossing = [(prompt, d) for prompt, d in zip(asked, done, strict=True) if len(d.spans) > 1]
        if len(crossing) >= CROSSING:
            break
    assert len(crossing) >= CROSSING, (
        f"updates must fall into the middle of trajectories, in one of {ATTEMPTS} attempts"
    )

    redone = after_retract if mode == "retract" else in_place
    worst = max(distance(redone, models, p, d) for p, d in zip(asked, done, strict=True))
    pure = torch.cat(
        [(torch.tensor(d.logprobs) - after_retract(models, p, d))[d.spans[0].end :].abs() for p, d in crossing]
    )
    print(
        f"\n{server.kind} {transport} {mode}: {len(done)} trajectories, {sum(tokens.values())} tokens "
        f"({', '.join(f'{n} of {label}' for label, n in sorted(tokens.items()))}), {len(crossing)} cross an update\n"
        f"  recomputed as the engine works: largest |d| {worst:.1e}; after an update, recomputed from a cache of the "
        f"token's own version: mean |d| {float(pure.mean()):.1e}, largest {float(pure.max()):.1e}"
    )
    assert worst <= TOLERANCE
    long = [(p, d) for p, d in crossing if all(span.end - span.start > 1 for span in d.spans)]
    for by in (-1, 1):
        # the border is proven to the token: one further left or right, and the numbers no longer agree
        wrong = sorted(distance(redone, models, p, shifted(d, by)) for p, d in long)
        assert wrong[len(wrong) // 2] > 10 * TOLERANCE


def distance(redone: Redone, models: dict[PolicyVersion, Any], prompt: list[int], done: Completion) -> float:
    return float((torch.tensor(done.logprobs) - redone(models, prompt, done)).abs().max())


def shifted(done: Completion, by: int) -> Completion:
    return Completion(done.ids, done.logprobs, moved(done.spans, by), done.finish_reason)
