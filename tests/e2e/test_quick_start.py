"""The four lines of Search-R1's quick start in docs/quickstart.md, as they stand, against a local hub with tiny files.

The third line loses its hardware. The last one gets more: settings for a machine without a GPU, and one small step
instead of 1,005 large ones.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from retriever.encoder import build_encoder
from retriever.encoder.config import TransformerEncoderSettings
from tests.support.encoders import tiny_model
from tests.support.environments import write_tokenizer
from tests.support.file_server import FileServer, file_server
from tests.support.shell_blocks import shell_blocks

ROOT = Path(__file__).parents[2]
PASSAGES = [f'"Town {n}"\nTown {n} lies on the river {n * 7 % 40}.' for n in range(40)]
SMALL = (
    *("run.steps=1", "run.groups_per_step=2", "learner.algorithm.minibatches=1", "rollout.concurrency_groups=2"),
    *("engine.kind={type: cpu}", "learner.model.dtype=float32", "learner.engine.zero_stage=0"),
    *("rollout.episode.max_new_tokens=16", "rollout.episode.max_obs_tokens=64", "launch.ready_s=180"),
)


def policy(folder: Path) -> None:
    write_tokenizer(folder, "bytes")
    vocab = json.loads((folder / "tokenizer.json").read_text())
    size = len(vocab["model"]["vocab"]) + len(vocab["added_tokens"])
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def fill(hub: FileServer, folder: Path) -> None:
    """Serve tiny files under the names of the catalogue."""
    policy(folder / "llama")
    tiny_model(folder / "e5-base-v2")
    for repo, model in (("meta-llama/Llama-3.2-3B", "llama"), ("intfloat/e5-base-v2", "e5-base-v2")):
        for path in (folder / model).iterdir():
            hub.files[f"{repo}/resolve/main/{path.name}"] = path.read_bytes()
    lines = "".join(json.dumps({"id": str(n), "contents": text}) + "\n" for n, text in enumerate(PASSAGES)).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        info = tarfile.TarInfo("wiki_dump.jsonl")
        info.size = len(lines)
        archive.addfile(info, io.BytesIO(lines))
    hub.files["datasets/PeterJinGo/wiki-18-corpus/resolve/main/wiki-18.jsonl.gz"] = packed.getvalue()
    encoder = build_encoder(TransformerEncoderSettings(model=folder / "e5-base-v2"))
    vectors = np.ascontiguousarray(encoder.encode_passages(PASSAGES), np.float32)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    raw = faiss.serialize_index(flat).tobytes()
    for name, part in (("part_aa", raw[:1000]), ("part_ab", raw[1000:])):
        hub.files[f"datasets/PeterJinGo/wiki-18-e5-index/resolve/main/{name}"] = part
    for split in ("train", "dev", "test"):
        asked = [{"id": f"{split}_{n}", "question": f"where is town {n}", "golden_answers": [f"river {n * 7 % 40}"]}
                 for n in range(8)]  # fmt: skip
        text = "".join(json.dumps(record) + "\n" for record in asked)
        hub.files[f"datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main/nq/{split}.jsonl"] = text.encode()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_four_lines_of_search_r1s_quick_start(tmp_path: Path) -> None:
    (block,) = [b for b in shell_blocks(ROOT / "docs" / "quickstart.md") if "wiki-18-e5" in b.text]
    joined = block.text.replace("\\\n", " ")
    commands = [line.partition("  #")[0] for line in joined.splitlines() if line and not line.startswith("#")]
    assert len(commands) == 4 and all(line.startswith("foray ") for line in commands)
    commands = [line.replace("--hardware 8xh100 ", "") for line in commands]
    commands[-1] += "".join(f" '{override}'" for override in SMALL)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with file_server() as hub:
        fill(hub, tmp_path / "made")
        hub.cuts = [500]
        env = {**os.environ, "PATH": path, "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1"}
        for command in commands:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    (step,) = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert step["step"] == 1 and step["source_groups/nq"] == 2
