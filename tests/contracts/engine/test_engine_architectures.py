"""SGLang takes every tensor that the learner publishes, by the name that it is published under.

The engine is launched on a model whose every parameter is NaN. After one broadcast of the published tensors no NaN may
be left: the log-probs are those of transformers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers
from contract_client import PROMPT, Client
from contract_engines import PATIENCE_S, Server, sglang
from contract_group import FLATTENED, trainer
from contract_models import write_model
from contract_proof import close, reported
from safetensors.torch import load_file, save_file

from learner.config.model import ModelSettings
from learner.engine.deepspeed import saved_buffers
from learner.model.loading import as_saved, load_policy

PYTHON = os.environ.get("FORAY_SGLANG_PYTHON", "")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "llama": {},
    "mistral": {"sliding_window": None},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": {"rope_theta": 10000.0},
    "olmoe": {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "granite": {},
    "olmo2": {},
    "glm4": {"head_dim": 16},
    "granitemoe": {"num_local_experts": 4},
    "glm4_moe": {"head_dim": 16, **ROUTED},
    "cohere2": {"head_dim": 16, "layer_types": ["full_attention", "full_attention"]},
}
"""model_type -> settings. SGLang on the CPU does not run gemma2 (it stops responding while it builds the model),
gpt_oss (its attention backends need a GPU), qwen3_next, qwen3_5 (snapshots of their state), qwen2_moe (a kernel of
Triton) and lfm2 (a kernel of sgl_kernel): for these see test_engine_loaders.py."""
QUICK = {("qwen2", 2), ("qwen3_moe", 1)}
"""Those that `make test-sglang` runs; the others: `make test-sglang ARGS="-m architectures"`."""
BROKEN = {("olmoe", 2)}
"""The norms of queries and keys of SGLang 0.5.23's olmoe are as wide as all ranks together: the first token fails."""


def write_architecture(path: Path, kind: str) -> Path:
    """Write a random model of two layers of the architecture, float32, with the tokenizer of the other tests."""
    write_model(path, 0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, initializer_range=0.15, bos_token_id=None,
        eos_token_id=0, pad_token_id=None, dtype="float32", **{"num_key_value_heads": 2, **ARCHITECTURES[kind]},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # ones and zeros would hide a norm that was not loaded
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
        for file in path.glob("*.safetensors"):
            file.unlink()
        model.save_pretrained(path)
    return path


def poisoned(source: Path, target: Path) -> Path:
    """Copy a model, with NaN for every parameter."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def published(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a learner publishes of the model."""
    causal = load_policy(path, ModelSettings(attention="eager")).causal
    yield from as_saved(causal, ((n, p.detach()) for n, p in [*causal.named_parameters(), *saved_buffers(causal)]))


@pytest.mark.skipif(not PYTHON, reason="FORAY_SGLANG_PYTHON names no interpreter with SGLang")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param(kind, ranks, marks=() if (kind, ranks) in QUICK else pytest.mark.architectures)
        for kind in ARCHITECTURES
        for ranks in (1, 2)
        if (kind, ranks) not in BROKEN
    ],
)
async def test_no_parameter_is_left_out(kind: str, ranks: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = write_architecture(tmp_path / kind, kind)
    start = poisoned(model, tmp_path / "poisoned")
    with sglang(Path(PYTHON), start, tmp_path / "log", "--skip-tokenizer-init", ranks=ranks) as url:
        server = Server(url, "sglang", model, model, tmp_path)
        # SGLang closes a connection that is idle for 5 s, and sending a bucket stops this loop for longer
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
            client = Client(server, session)
            async with trainer(client, ranks) as there:
                await client.ok("/pause_generation", {"mode": "retract"})
                await client.ok("/begin_weight_update")
                named = list(published(model))
                for bucket in (named[::2], named[1::2]):
                    status, answer = await there.send(bucket, FLATTENED)
                    assert (status, answer["success"]) == (200, True), answer
                await client.ok("/end_weight_update")
                await client.ok("/continue_generation")
            answer = await client.generate(max_new_tokens=8, ignore_eos=True)
            close(reported(answer), server.logprobs(model, PROMPT + answer["output_ids"], len(PROMPT)))
