"""The work of the learner benchmark: a model with random weights and one batch, on disk for every contender.

`batch.npz` says all that a GRPO step needs, one trajectory after the other, so that a contender with nothing of ours
installed can read it: ids and lengths, which tokens are trained, their log-probs when sampled, advantages.

`python -m deploy.bench.learner_work DIR` writes it, from the settings in DIR: in a process of its own, since
libraries print where the report belongs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protocol.errors import ForayError

if TYPE_CHECKING:
    from deploy.bench.learner import LearnerBench
    from learner.batch import Batch

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 160},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
}
"""Qwen2 without the embeddings; two key and value heads each, as Qwen2.5 0.5B and 1.5B have."""


SETTINGS, SPEC = "settings.json", "spec.json"


@dataclass(frozen=True)
class Work:
    """What the contenders are given. `spec`: file with everything; `facts`: numbers for the report."""

    spec: Path
    facts: dict[str, float]


def write_work(settings: LearnerBench, directory: Path) -> Work:
    """Model, batch and specification in `directory`. Raises ForayError when they cannot be made."""
    (directory / SETTINGS).write_text(settings.model_dump_json())
    argv = (sys.executable, "-m", "deploy.bench.learner_work", str(directory))
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ForayError(f"model and batch could not be made: {done.stdout[-2000:].strip()}")
    return Work(directory / SPEC, json.loads((directory / SPEC).read_text())["facts"])


def main(argv: Sequence[str]) -> None:
    """The child of `write_work`."""
    from deploy.bench.learner import LearnerBench
    from deploy.bench.learner_flops import head_share

    directory = Path(argv[0])
    settings = LearnerBench.model_validate_json((directory / SETTINGS).read_text())
    model = _write_model(settings, directory / "model")
    tokens = _write_batch(settings, directory / "batch.npz")
    batch = our_batch(settings, settings.row_tokens, settings.micro_batch_tokens)
    count = settings.groups * settings.group_size
    # As many micro-batches as ours has; TRL's all hold the same number of trajectories, so it gets the nearest one.
    each = math.ceil(count / len(batch.micro_batches))
    wanted = count / len(batch.micro_batches)
    alike = min((n for n in range(1, count + 1) if count % n == 0), key=lambda n: abs(math.log(n / wanted)))
    shape = json.loads((model / "config.json").read_text())
    spec = {
        "model": str(model),
        "batch": str(directory / "batch.npz"),
        "each": each,
        "each_trl": alike,
        "settings": settings.model_dump(mode="json"),
        "facts": {
            "trajectories": count,
            "tokens_trained": batch.num_tokens,
            "tokens_read": tokens,
            "packing_efficiency": tokens / sum(m.ids.size for m in batch.micro_batches),
            "micro_batches": len(batch.micro_batches),
            "trajectories_each": each,
            "trajectories_each_trl": alike,
            "head_share": head_share(shape),
        },
    }
    (directory / SPEC).write_text(json.dumps(spec))


def our_batch(settings: LearnerBench, row_tokens: int, micro_batch_tokens: int) -> Batch:
    """The batch as our trainer takes it; needs the learner's packages."""
    from deploy.bench.learner_groups import skewed_groups
    from learner.batch import build_batch
    from learner.config_algorithm import GrpoSettings
    from learner.config_batch import BatchSettings
    from protocol.testing import V1

    return build_batch(
        skewed_groups(settings),
        GrpoSettings().build(),
        now_step=0,
        lineage=[V1],
        max_lag=0,
        settings=BatchSettings(micro_batch_tokens=micro_batch_tokens, row_tokens=row_tokens),
        temperature=1.0,
    )


def _write_model(settings: LearnerBench, directory: Path) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from learner.accelerator import without_gpu

    disable_progress_bar()
    config = Qwen2Config(
        vocab_size=settings.vocabulary,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **SHAPES[settings.shape],
    )
    torch.manual_seed(settings.seed)
    without_gpu()
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def _write_batch(settings: LearnerBench, path: Path) -> int:
    """Writes every trajectory in the order in which it came; returns how many tokens have to be read."""
    alone = sorted(our_batch(settings, 0, 1).micro_batches, key=lambda m: int(m.trajectory[0]))
    ids, mask, behaviour = [], [], []
    for m in alone:
        # the last trained token is not among the inputs, since nothing follows it
        whole = np.append(m.ids[0], m.targets[-1])
        trained = np.zeros(len(whole), bool)
        trained[m.index + 1] = True
        logprobs = np.zeros(len(whole), np.float32)
        logprobs[m.index + 1] = m.behaviour
        ids.append(whole)
        mask.append(trained)
        behaviour.append(logprobs)
    arrays: dict[str, Any] = {
        "ids": np.concatenate(ids),
        "mask": np.concatenate(mask),
        "behaviour": np.concatenate(behaviour),
        "lengths": np.array([len(i) for i in ids]),
        "prompts": np.full(len(ids), settings.prompt_tokens),
        "advantages": np.array([m.advantages[0] for m in alone], np.float32),
    }
    np.savez(path, **arrays)
    return int(arrays["lengths"].sum()) - len(ids)


if __name__ == "__main__":
    main(sys.argv[1:])
