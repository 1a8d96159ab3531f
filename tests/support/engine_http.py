"""A tiny policy with a byte-level tokenizer and a chat template, served by the CPU engine in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout_server.cpu_engine.config import EngineSettings
from rollout_server.cpu_engine.server.app import build_app, build_engine

Client = TestClient[Any, Any]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if strict and messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_policy(path: Path) -> Path:
    """A random Qwen2 of 512 tokens of context."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["where is müller? <search>"] * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    torch.manual_seed(0)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "hidden_size": 48, "intermediate_size": 80}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 0}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, num_hidden_layers=2, initializer_range=0.2)).save_pretrained(path)
    return path


@asynccontextmanager
async def serving(model: Path, **given: Any) -> AsyncIterator[Client]:
    """A client of the engine with the model as version 7 unless `given` has another, and with `given` settings.

    With a fixed seed: at a random one an answer may end by chance before the tokens that a test counts.
    """
    settings = EngineSettings(model_path=model, **{"weight_version": "7", "seed": 0} | given)
    engine, tokenizer, config = build_engine(settings)
    engine.start()
    try:
        async with TestClient(TestServer(build_app(engine, tokenizer, config, settings, ("", "")))) as client:
            yield client
    finally:
        await asyncio.to_thread(engine.stop)


async def post(client: Client, path: str, status: int = 200, **body: Any) -> Any:
    """The decoded answer, which must have this status."""
    answer = await client.post(path, json=body)
    assert answer.status == status, await answer.text()
    return await answer.json()
