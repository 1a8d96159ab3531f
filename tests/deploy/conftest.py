"""The session's Redis as a run finds it, and children that are killed when a test ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from deploy.child import Child
from deploy.redis_child import connect
from protocol.functions import source
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys

TINY = {
    **{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096},
}
"""config.json of a model that the CPU engine serves."""


@pytest.fixture(scope="session")
def redis_url(redis_socket: str) -> str:
    """URL of the session's Redis."""
    return f"unix://{redis_socket}"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """An empty Redis with our functions loaded, and the streams and groups of run `test`."""
    client, keys = connect(redis_url), Keys("test")
    client.flushall()
    client.config_set("maxmemory", 64 << 20)
    client.function_load(source(), replace=True)
    client.xgroup_create(keys.tasks, TASK_GROUP, "0", mkstream=True)
    client.xgroup_create(keys.traj, TRAJ_GROUP, "0", mkstream=True)
    yield client
    client.config_set("maxmemory", 0)
    client.close()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Children that a test leaves here are killed when it ends."""
    left: list[Child] = []
    yield left
    for child in left:
        child.kill()
        child.wait(5)


@pytest.fixture
def run_files(tmp_path: Path) -> Path:
    """A directory with all files of a run that may start: model (8 words), corpus.jsonl, questions.jsonl."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 7}}}')
    save_file({"weight": np.zeros(4, np.float32)}, model / "model.safetensors")
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "\\"Paris\\"\\nA city."}\n')
    (tmp_path / "questions.jsonl").write_text('{"id": "q1", "question": "where ?", "answers": ["Paris"]}\n')
    return tmp_path
