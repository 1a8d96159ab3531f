"""The work of the learner benchmark: a model with random weights and one batch, on disk for every contender.

`batch.npz` holds the input of a GRPO step, trajectory by trajectory, so that a contender without Foray can read it: ids
and lengths, which tokens are trained, their behaviour log-probs, advantages.

`python -m benchmarks.learner.workload DIR` writes it from the settings in DIR, in a separate process because libraries
print to stdout.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from learner.algorithms import build_algorithm
from protocol.errors import ForayError
from protocol.messages import Segment, Status, Trajectory, TrajectoryGroup
from tests.support.messages import make_question, observation_segment, policy_segment, prompt_segment

if TYPE_CHECKING:
    from benchmarks.learner.settings import LearnerBench, SkewedBatch
    from learner.data.batch import Batch


CEILING_S = 0.5
"""Duration of the measurement of matrix products, in seconds."""


def utilisation(settings: LearnerBench, model: Path, batch: Batch) -> Callable[[float], dict[str, float]]:
    """Return a function from seconds per step to `tflops` and `mfu`, relative to the machine's matrix product rate.

    Model FLOPs utilisation counts the required operations: padding, recomputation and logits of untrained tokens do not
    count.

    It counts 6 operations per input token and parameter of the layers (2 forward, 4 backward), 6 per trained token and
    parameter of the output layer, and 6 * width * s of attention per layer for the s-th token of a trajectory, which
    attends to s tokens (PaLM, arXiv 2204.02311, appendix B, halved because attention is causal). `mfu_all_logits`
    counts the output layer for every input token, as is usual (6 * parameters * tokens).
    """
    shape = json.loads((model / "config.json").read_text())
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    layer = layer_parameters(shape)
    read = sum(int((m.document_ids >= 0).sum()) for m in batch.micro_batches)
    seen = sum(float(np.where(m.document_ids >= 0, m.positions + 1, 0).sum()) for m in batch.micro_batches)
    body = 6.0 * layers * layer * read + 12.0 * layers * hidden * seen
    output = 6.0 * settings.vocabulary * hidden
    ceiling = matmul_flops(settings.dtype, settings.threads)

    def figures(seconds: float) -> dict[str, float]:
        needed = (body + output * batch.num_tokens) / seconds
        return {
            "tokens_read_per_s": read / seconds,
            "tflops": needed / 1e12,
            "mfu": needed / ceiling,
            "mfu_all_logits": (body + output * read) / seconds / ceiling,
            "ceiling_tflops": ceiling / 1e12,
        }

    return figures


def layer_parameters(shape: dict[str, int]) -> int:
    """Return the number of parameters in matrix products of one layer of a Qwen2 with this config.json."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    shared = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    return 2 * hidden * hidden + 2 * hidden * shared + 3 * hidden * inner


def head_share(shape: dict[str, int]) -> float:
    """Return the output layer's share of the parameters in matrix products: 0.15 in Qwen2.5-1.5B."""
    head = shape["hidden_size"] * shape["vocab_size"]
    return head / (head + shape["num_hidden_layers"] * layer_parameters(shape))


def matmul_flops(dtype: str, threads: int) -> float:
    """Return the highest measured rate of a square matrix product in `dtype`, in operations/s."""
    import torch

    cuda = torch.cuda.is_available()
    torch.set_num_threads(threads)
    size = 8192 if cuda else 1024
    a = torch.randn(size, size, dtype=getattr(torch, dtype), device="cuda" if cuda else "cpu")
    best, end = float("inf"), time.monotonic() + CEILING_S
    while time.monotonic() < end or best == float("inf"):
        begun = time.monotonic()
        a @ a
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - begun)
    return 2.0 * size**3 / best


FIRST_ID = 16
"""Smaller ids are often control tokens."""


def skewed_groups(settings: SkewedBatch, number: int = 0) -> list[TrajectoryGroup]:
    """Return the groups of batch `number`: rewards 0 and 1, behaviour log-probs like those of an untrained policy.

    Deterministic. Lengths are lognormal, like those of a real policy and of passages: a few trajectories are several
    times longer than most, and most tokens of a trajectory are observations.
    """
    return [
        TrajectoryGroup(
            run="bench",
            seq=seq,
            question=make_question(seq),
            trajectories=tuple(_trajectory(settings, number, seq, i) for i in range(settings.group_size)),
            producer="bench",
            template="search_r1",
        )
        for seq in range(1, settings.groups + 1)
    ]


def _trajectory(settings: SkewedBatch, number: int, seq: int, index: int) -> Trajectory:
    rng = np.random.default_rng([settings.seed, number, seq, index])
    segments = tuple(_segments(settings, rng, seq))
    return Trajectory(status=Status.ANSWERED, segments=segments, reward=float(rng.random() < 0.4), turns=1, searches=0)


def _segments(settings: SkewedBatch, rng: np.random.Generator, seq: int) -> Iterator[Segment]:
    room = settings.longest - settings.prompt_tokens

    def draw(median: int) -> int:
        return max(1, round(median * math.exp(settings.sigma * rng.standard_normal())))

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.integers(FIRST_ID, settings.vocabulary, count)]

    # trajectories of a group share their prompt
    prompt = np.random.default_rng([settings.seed, seq]).integers(FIRST_ID, settings.vocabulary, settings.prompt_tokens)
    yield prompt_segment(prompt.tolist())
    turns = int(rng.integers(1, settings.turns + 1))
    for turn in range(turns):
        written = min(draw(settings.turn_tokens), max(room, 1))
        # near those of an untrained policy, with the differences that a few updates would cause
        logprobs = -math.log(settings.vocabulary) + 0.1 * rng.standard_normal(written)
        yield policy_segment(ids(written), np.minimum(logprobs, 0.0).tolist())
        room -= written
        if turn == turns - 1 or room <= 1:
            return
        found = min(draw(settings.observation_tokens), room - 1) if settings.observation_tokens else 0
        if found:
            yield observation_segment(ids(found))
        room -= found


SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 160},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768},
    "135m": {
        **{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "intermediate_size": 1536},
        "num_key_value_heads": 3,
    },
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
}
"""Qwen2 sizes without the embeddings; two key and two value heads, as in Qwen2.5 0.5B and 1.5B, if not given."""


SETTINGS, SPEC = "settings.json", "spec.json"


@dataclass(frozen=True)
class LearnerWorkload:
    """Input of the contenders. `spec`: file with all settings; `facts`: figures for the report."""

    spec: Path
    facts: dict[str, float]


def write_work(settings: LearnerBench, directory: Path) -> LearnerWorkload:
    """Write model, batch and specification to `directory`. Raises ForayError on failure."""
    (directory / SETTINGS).write_text(settings.model_dump_json())
    argv = (sys.executable, "-m", "benchmarks.learner.workload", str(directory))
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ForayError(f"cannot create model and batch: {done.stdout[-2000:].strip()}")
    return LearnerWorkload(directory / SPEC, json.loads((directory / SPEC).read_text())["facts"])


def main(argv: Sequence[str]) -> None:
    """Run the child process of `write_work`."""
    from benchmarks.learner.settings import LearnerBench

    directory = Path(argv[0])
    settings = LearnerBench.model_validate_json((directory / SETTINGS).read_text())
    model = write_model(settings, directory / "model")
    tokens = _write_batch(settings, directory / "batch.npz")
    batch = our_batch(settings, settings.row_tokens, settings.micro_batch_tokens)
    count = settings.groups * settings.group_size
    # As many micro-batches as Foray has. TRL's all have the same number of trajectories, so use the nearest number.
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


def our_batch(settings: LearnerBench, row_tokens: int, micro_batch_tokens: int, *, share: bool = False) -> Batch:
    """Return the batch for Foray's trainer. Needs the learner's packages."""
    from learner.config.algorithm import GrpoSettings
    from learner.config.learner import BatchSettings
    from learner.data.batch import build_batch
    from tests.support.messages import V1

    return build_batch(
        skewed_groups(settings),
        build_algorithm(GrpoSettings()),
        now_step=0,
        lineage=[V1],
        max_lag=0,
        settings=BatchSettings(micro_batch_tokens=micro_batch_tokens, row_tokens=row_tokens, share_prompts=share),
        temperature=1.0,
    )


def write_model(settings: LearnerBench, directory: Path) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from learner.engine.accelerator import without_gpu

    disable_progress_bar()
    config = Qwen2Config(
        vocab_size=settings.vocabulary,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **{"num_key_value_heads": 2, **SHAPES[settings.shape]},
    )
    torch.manual_seed(settings.seed)
    without_gpu()
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def _write_batch(settings: LearnerBench, path: Path) -> int:
    """Write the trajectories in order of arrival. Return the number of input tokens."""
    alone = sorted(our_batch(settings, 0, 1).micro_batches, key=lambda m: int(m.trajectory[0]))
    ids, mask, behaviour = [], [], []
    for m in alone:
        # the last trained token is not an input, because nothing follows it
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
