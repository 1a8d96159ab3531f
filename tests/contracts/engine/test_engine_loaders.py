"""Published weights through SGLang's own loaders, also of model types that it runs only on a GPU: no kernel is needed.

SGLang's model class is built in its environment, filled with NaN, and given every tensor that the learner publishes.
Afterwards each layer, and each expert of it, has exactly the numbers that were published for it, and no NaN. What is
not checked here is the order of numbers within a layer or expert, which is SGLang's own code for original checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from sglang_loaders import PUBLISHED, numbers_of

from learner.config.model import ModelSettings
from learner.engine.deepspeed import saved_buffers
from learner.model.loading import as_saved, load_policy
from tests.support.tiny_families import FAMILIES, write_family

PYTHON = os.environ.get("FORAY_SGLANG_PYTHON", "")
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
DEEPSEEK = {"moe_layer_freq": 1, "rope_scaling": YARN, "rope_parameters": YARN}
DELTA = {
    "full_attention_interval": 2,
    **{"linear_num_value_heads_cpu": 4, "linear_num_key_heads_cpu": 2},  # which SGLang sets itself when it serves
}
LIKE_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": DEEPSEEK | {"scoring_func": "softmax"},
    "deepseek_v3": DEEPSEEK | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "hunyuan_v1_moe": {
        "moe_intermediate_size": 48,
        "use_mixed_mlp_moe": True,
        "num_shared_expert": 1,
        "use_qk_norm": True,
    },
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA),
}
"""Keys of original checkpoints' config.json that SGLang reads, and transformers' own config.json does not have."""
CHANGED: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": []}}
"""SGLang 0.5.23 ignores `mlp_only_layers` of Qwen3-MoE: experts of such layers would stay random."""
ABSENT = ("bamba", "falcon_mamba", "jamba", "olmo_hybrid", "zamba2")
"""Model types that SGLang does not have."""
OTHER = ("gemma4_text", "longcat_flash", "minimax", "nemotron_h", "phimoe")
"""Not tried: config.json of transformers is not one that SGLang reads, or the learner refuses the type."""
UNUSED = {"falcon_h1": ("q_norm.weight", "k_norm.weight")}
"""Parameters that SGLang creates and does not use."""
LOADED = sorted(FAMILIES.keys() - {*ABSENT, *OTHER})

pytestmark = pytest.mark.skipif(not PYTHON, reason="FORAY_SGLANG_PYTHON names no interpreter with SGLang")


def write(kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a tiny model with what a learner publishes of it."""
    monkeypatch.setitem(FAMILIES, kind, FAMILIES[kind] | CHANGED.get(kind, {}))
    write_family(kind, directory)
    if kind not in ABSENT:
        causal = load_policy(directory, ModelSettings(attention="eager"), packed=False).causal
        weights = [(name, p.detach()) for name, p in [*causal.named_parameters(), *saved_buffers(causal)]]
        # SGLang keeps gpt-oss' sinks in bfloat16
        published = {n: t.bfloat16().float() if "sinks" in n else t for n, t in as_saved(causal, weights)}
        save_file(published, directory / PUBLISHED)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | LIKE_CHECKPOINTS.get(kind, {})))
    return directory


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What SGLang's loaders say of each model, in one process."""
    at = tmp_path_factory.mktemp("loaders")
    with pytest.MonkeyPatch.context() as patch:
        directories = [write(kind, at / kind, patch) for kind in (*LOADED, *ABSENT)]
    command = [PYTHON, str(Path(__file__).with_name("sglang_loaders.py")), *map(str, directories)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, stdin=subprocess.DEVNULL)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(directories), done.stderr[-2000:]
    return {line["model"]: line | {"at": at / line["model"]} for line in found}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", LOADED)
def test_sglang_loads_every_number_into_its_layer_and_expert(kind: str, lines: dict[str, dict[str, Any]]) -> None:
    line = lines[kind]
    assert "error" not in line, line["error"]
    assert [name for name in line["left"] if not name.endswith(UNUSED.get(kind, ()))] == []
    published = numbers_of(load_file(line["at"] / PUBLISHED).items())
    if kind not in UNUSED:
        assert line["numbers"] == published


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ABSENT)
def test_types_that_sglang_does_not_have(kind: str, lines: dict[str, dict[str, Any]]) -> None:
    assert "has no SGlang implementation" in lines[kind]["error"]
