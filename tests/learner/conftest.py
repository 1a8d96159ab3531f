"""A private Redis, and the makings of a run in a temporary directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from learner.config.learner import LearnerSettings
from learner.delivery import store as redis_client
from protocol.settings import RunSettings
from tests.support import tiny_learner


@pytest.fixture(autouse=True)
def short_blocking_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner stops when its blocked read returns; tests stop many."""
    monkeypatch.setattr(redis_client, "BLOCK_MS", 50)


@pytest.fixture
def address(redis_socket: str) -> dict[str, Any]:
    return {"unix_socket_path": redis_socket}


@pytest.fixture
def db(address: dict[str, Any]) -> Iterator[redis.Redis]:
    client = redis.Redis(**address, retry=Retry(NoBackoff(), 0))
    client.flushall()
    client.function_flush()
    client.config_set("maxmemory", 0)
    yield client
    client.config_set("maxmemory", 0)
    client.close()


@pytest.fixture
def run(tmp_path: Path, redis_socket: str, db: redis.Redis) -> RunSettings:
    """A run of 8 steps of 4 groups of 4 trajectories, on an empty Redis."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "tiny"}')
    return RunSettings(
        id="t1",
        dir=tmp_path / "run",
        redis_url=f"unix://{redis_socket}",
        model=model,
        group_size=4,
        groups_per_step=4,
        max_lag=2,
        steps=8,
    )


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        "\n".join(json.dumps({"id": f"q{i}", "question": f"what is {i} ?", "answers": [str(i)]}) for i in range(7))
    )
    return path


@pytest.fixture
def settings(questions: Path) -> LearnerSettings:
    """Everything that waits, waits briefly."""
    return LearnerSettings(questions=questions, checkpoint_every=3, lease_s=3, reconcile_s=0.3)


@pytest.fixture
def serve() -> Callable[..., int]:
    """`learner.main.serve` with the tiny engine; keyword arguments beside `takeover` are the engine's."""
    from learner.main import serve as real

    def call(run: RunSettings, settings: LearnerSettings, *, takeover: bool = False, **engine: Any) -> int:
        return real(run, settings, takeover=takeover, make_engine=lambda r, s: tiny_learner.TinyEngine(r, s, **engine))

    return call


@pytest.fixture
def store(run: RunSettings) -> Iterator[Any]:
    """The run's Redis, prepared, with the lease of epoch 1."""
    from learner.delivery.store import RunStore

    made = RunStore(run.redis_url, run.id)
    made.prepare()
    assert made.acquire("me", 0, 60_000, takeover=False) == 1
    made.set_owner(1, "me")
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 40 words and two layers, initial weights large enough that its tokens differ."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("tiny-qwen")
    config = transformers.Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory
