"""The methods of `foray eval` on the engines of a run: what happens while one restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from foray.evaluation import models
from foray.evaluation.models import EngineModel, EpisodeFailed, Generated, ModelPrompt, PromptPiece
from protocol.messages import EngineInfo, NodeState, Sampling
from rollout_server.environment.tokenizer import load_tokenizer
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, Fault

PROMPT = ModelPrompt((PromptPiece("a b"),), chat=False)


async def ask(model: EngineModel) -> Generated:
    return await model.complete(PROMPT, max_tokens=4, stop=(), sampling=Sampling(temperature=0.0))


async def test_a_turn_waits_for_an_engine_that_restarts_but_not_for_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "PAUSE_S", 0.01)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "words"))
    answer = tokenizer.encode_trusted("c")
    async with FakeServer(lambda body: answer, version="1.3") as engine, aiohttp.ClientSession() as session:
        info = EngineInfo(id="e", url=engine.url, state=NodeState.READY, epoch=1, step=3)
        model = EngineModel(session, [info], tokenizer, max_context=64)
        await engine.stop()
        asked = asyncio.create_task(ask(model))
        done, _ = await asyncio.wait([asked], timeout=0.3)
        assert not done, "it waits"
        await engine.start()
        said = await asyncio.wait_for(asked, 30)
        assert (said.text.strip(), said.version) == ("c", "1.3")

        engine.faults["/generate"] = Fault(status=401)
        before = engine.calls.count("/generate")
        with pytest.raises(EpisodeFailed, match="denied"):
            await asyncio.wait_for(ask(model), 30)
        assert engine.calls.count("/generate") == before + 1

        monkeypatch.setattr(models, "OUTAGE_S", 0.2)
        await engine.stop()
        with pytest.raises(EpisodeFailed, match="unreachable"):
            await asyncio.wait_for(ask(model), 30)
