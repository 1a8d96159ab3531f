"""The blocks of docs/reproduce-search-r1.md, in order, against a local hub with tiny files and without a GPU.

`foray init` loses its hardware and gets settings for a CPU. What starts a run gets smaller ones.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from retriever.encoder import build_encoder
from retriever.encoder.config import TransformerEncoderSettings
from tests.support.encoders import tiny_model
from tests.support.environments import write_tokenizer
from tests.support.file_server import FileServer, file_server
from tests.support.shell_blocks import run_shell, shell_lines

PAGE = Path(__file__).parents[2] / "docs" / "reproduce-search-r1.md"
PASSAGES = [f'"Town {n}"\nTown {n} lies on the river {n * 7 % 40}.' for n in range(40)]
SPLITS = {
    **dict.fromkeys(("nq", "triviaqa"), ("train", "dev", "test")),
    **dict.fromkeys(("popqa", "bamboogle"), ("test",)),
    **dict.fromkeys(("hotpotqa", "2wikimultihopqa", "musique"), ("train", "dev")),
}
ON_A_CPU = (
    *("engine.kind={type: cpu}", "learner.model.dtype=float32", "learner.engine.zero_stage=0", "launch.ready_s=180"),
    *("rollout.episode.max_new_tokens=16", "rollout.episode.max_obs_tokens=64", "rollout.concurrency_groups=2"),
)
SMALL = ("run.steps=2", "run.groups_per_step=2", "learner.algorithm.minibatches=1", "learner.checkpoint_every=1")
OPINION = ("foray status", "foray diagnose")
"""Commands whose exit code 1 is what they have to say: nothing is learned here."""


def policy(folder: Path) -> None:
    write_tokenizer(folder, "bytes")
    vocab = json.loads((folder / "tokenizer.json").read_text())
    size = len(vocab["model"]["vocab"]) + len(vocab["added_tokens"])
    config = Qwen2Config(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def fill(hub: FileServer, folder: Path) -> None:
    """Serve tiny files under the names of the catalogue."""
    policy(folder / "qwen")
    tiny_model(folder / "e5-base-v2")
    for repo, model in (("Qwen/Qwen2.5-7B", "qwen"), ("intfloat/e5-base-v2", "e5-base-v2")):
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
    asked = [(f"where is town {n}?", f"river {n * 7 % 40}") for n in range(8)]
    for data_set, splits in SPLITS.items():
        for split in splits:
            rows = [{"id": f"{split}_{n}", "question": q, "golden_answers": [a]} for n, (q, a) in enumerate(asked[:3])]
            text = "".join(json.dumps(record) + "\n" for record in rows)
            hub.files[f"datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main/{data_set}/{split}.jsonl"] = text.encode()
    rows = [
        {
            "data_source": ("nq", "hotpotqa")[n % 2],
            "prompt": [{"role": "user", "content": f"Answer the given question. Question: {q}"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [a]}},
            "extra_info": {"split": "train", "index": n},
            "question": q,
        }
        for n, (q, a) in enumerate(asked)
    ]
    for split in ("train", "test"):
        out = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), out)
        hub.files[f"datasets/PeterJinGo/nq_hotpotqa_train/resolve/main/{split}.parquet"] = out.getvalue()


def commands() -> list[str]:
    """Return the lines of the page, as a machine without a GPU can run them."""
    out = []
    for line in shell_lines(PAGE):
        extra = ON_A_CPU if line.startswith("foray init") else SMALL if line.startswith("foray up") else ()
        out.append(line.replace("--hardware 8xh100 ", "") + "".join(f" '{override}'" for override in extra))
    return out


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_page_runs_from_the_data_to_the_scores(tmp_path: Path) -> None:
    with file_server() as hub:
        fill(hub, tmp_path / "made")
        hub.cuts = [500]
        for command in commands():
            run_shell(command, tmp_path, allowed=(0, 1) if command.startswith(OPINION) else (0,), HF_ENDPOINT=hub.url)
    for run in ("smoke", "search-r1"):
        steps = [json.loads(line) for line in (tmp_path / f"runs/{run}/metrics.jsonl").read_text().splitlines()]
        assert [step["step"] for step in steps] == [1, 2]
    assert (tmp_path / "runs/search-r1/validation.jsonl").is_file()
    assert (tmp_path / "search-r1-7b" / "config.json").is_file()
    scored = json.loads((tmp_path / "final" / "result.json").read_text())
    assert all(name in json.dumps(scored) for name in SPLITS)
