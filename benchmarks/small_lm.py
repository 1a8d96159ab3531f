"""`foray bench small_lm`: learner and engine at the size of SmolLM2-135M, with each speed-up switched off in turn.

One child process has every variant and runs them in alternating rounds, on random weights. The learner makes a GRPO
step of `groups` x 8 trajectories; the engine reads prompts, then writes a token for each row and step. CPU seconds are
compared, because machines are shared; the value is the tokens of all trajectories per second of wall time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pydantic import Field

from benchmarks.base import BenchResult, BenchSettings, Say, Target
from protocol.errors import ForayError

if TYPE_CHECKING:
    import torch

    from benchmarks.learner.settings import LearnerBench
    from learner.data.batch import Batch
    from learner.trainer.trainer import Trainer
    from rollout_server.cpu_engine.model.runner import ModelRunner

Switch = Callable[[], AbstractContextManager[Any]]
Figures = dict[str, float]


class SmallLmBench(BenchSettings):
    """Settings of `foray bench small_lm`."""

    help: ClassVar[str] = "learner and engine with a model of 135M parameters, each speed-up switched off in turn"
    quick: ClassVar[dict[str, Any]] = {"groups": 1, "prompts": 2, "steps": 2, "rounds": 1, "shape": "tiny"}
    targets: ClassVar[tuple[Target, ...]] = (
        Target("value", 240.0, "tokens a second in the learner: 16 trajectories of 450 tokens in 30 s"),
    )
    modules: ClassVar[tuple[str, ...]] = (
        "learner",
        "rollout_server/cpu_engine",
        "benchmarks/small_lm.py",
        "benchmarks/learner/*.py",
    )

    shape: str = "135m"
    """Size of the model, as in `foray bench learner`."""
    vocabulary: int = Field(default=49152, ge=64)
    """Size of the vocabulary."""
    groups: int = Field(default=2, ge=1)
    """Groups of 8 trajectories in the learner's step."""
    prompts: int = Field(default=16, ge=1)
    """Prompts of 256 tokens that the engine reads together; then its rows."""
    steps: int = Field(default=30, ge=1)
    """Tokens that the engine writes for each row."""
    rounds: int = Field(default=2, ge=1)
    """Number of rounds, of which the median counts, after one warm-up round."""
    threads: int = Field(default=1, ge=1)
    """torch threads."""

    def measure(self, say: Say) -> BenchResult:
        """Run the child process and report its medians."""
        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            argv = (sys.executable, "-m", "benchmarks.small_lm", self.model_dump_json(), name)
            with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
                assert child.stdout is not None
                rows = []
                for line in child.stdout:
                    rows.append(json.loads(line))
                    say(", ".join(f"{name} {row['cpu_s']:.2f} CPU s" for name, row in rows[-1].items()))
        if child.returncode or len(rows) != 2 * (self.rounds + 1):
            raise ForayError(f"the child process failed with exit code {child.returncode}")
        found: dict[str, Figures] = {}
        for part in (rows[1 : self.rounds + 1], rows[self.rounds + 2 :]):
            for name in part[0]:
                found[name] = {key: median(row[name][key] for row in part) for key in part[0][name]}
        ours, plain = found["learner"], found["learner: none of these"]
        gains = {
            name: figures["cpu_s"] / found[name.partition(":")[0]]["cpu_s"]
            for name, figures in found.items()
            if ":" in name
        }
        return BenchResult(
            value=ours["tokens_per_s"],
            unit="tokens of trajectories a second in the learner",
            baseline={"name": "the learner with all of them off", **plain},
            ratio=plain["cpu_s"] / ours["cpu_s"],
            details={"cpu_gain_of": gains, **found},
        )


def learner_settings(bench: SmallLmBench, dtype: str) -> LearnerBench:
    """Return the settings of the learner's step."""
    from benchmarks.learner.settings import LearnerBench

    lengths = {"turns": 3, "prompt_tokens": 190, "turn_tokens": 35, "observation_tokens": 130, "sigma": 0.15}
    return LearnerBench.model_validate(
        lengths
        | {"groups": bench.groups, "group_size": 8, "longest": 600, "vocabulary": bench.vocabulary, "dtype": dtype}
        | {"row_tokens": 0, "micro_batch_tokens": 2048, "threads": bench.threads, "shape": bench.shape}
    )


def without_exact_products(module: Any) -> AbstractContextManager[Any]:
    """Compute the output layer's float32 products in float32."""
    return mock.patch.object(module, "exact_bfloat16_products", lambda _: nullcontext())


@contextmanager
def without_fused_adamw(trainer: Trainer) -> Iterator[None]:
    """Update the weights with torch's default kernels for a CPU."""
    groups = trainer.engine._optimizer.param_groups
    for group in groups:
        group["fused"] = None
    yield
    for group in groups:
        group["fused"] = True


def unfused_attention(
    model: Any, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attend as the engine does in float32."""
    import torch

    scores = torch.matmul(q * model.scale, keys.transpose(-1, -2)) + mask
    return torch.matmul(torch.softmax(scores, -1).to(q.dtype), values)


def learner_rounds(bench: SmallLmBench, model: Path) -> Iterator[dict[str, Figures]]:
    """Yield name -> figures of each round of the learner."""
    from benchmarks.learner.ours import trainer_settings
    from benchmarks.learner.workload import our_batch
    from learner.model import logprobs
    from learner.trainer.trainer import Trainer
    from protocol.settings import RunSettings

    alone, shared = (our_batch(learner_settings(bench, "float32"), 0, 2048, share=share) for share in (False, True))
    read = alone.stats["tokens_read"]
    trainers = {
        dtype: Trainer(
            RunSettings(model=model, steps=100), trainer_settings(learner_settings(bench, dtype), logit_chunk_mib=256)
        )
        for dtype in ("bfloat16", "float32")
    }
    ours = trainers["bfloat16"]
    variants: dict[str, tuple[Trainer, Batch, Switch]] = {
        "learner": (ours, shared, nullcontext),
        "learner: prompts not shared": (ours, alone, nullcontext),
        "learner: output layer in float32": (ours, shared, lambda: without_exact_products(logprobs)),
        "learner: AdamW not fused": (ours, shared, lambda: without_fused_adamw(ours)),
        "learner: float32": (trainers["float32"], shared, nullcontext),
        "learner: none of these": (trainers["float32"], alone, lambda: without_fused_adamw(trainers["float32"])),
    }
    for _ in range(bench.rounds + 1):
        row = {}
        for name, (trainer, batch, switch) in variants.items():
            with switch():
                figures = timed(partial(trainer.train, batch))
            row[name] = figures | {"tokens_per_s": read / figures["seconds"]}
        yield row
    for trainer in trainers.values():
        trainer.close()


def engine_rounds(bench: SmallLmBench, model: Path) -> Iterator[dict[str, Figures]]:
    """Yield name -> figures of each round of the engine."""
    import torch

    from rollout_server.cpu_engine.model import llama

    torch.set_num_threads(bench.threads)
    ours, float32 = (runner_of(model, dtype, bench) for dtype in (torch.bfloat16, torch.float32))
    variants: dict[str, tuple[Callable[[], None], Switch]] = {
        "prefill": (lambda: read_prompts(ours, bench, bench.prompts), nullcontext),
        "prefill: one prompt at a time": (lambda: read_prompts(ours, bench, 1), nullcontext),
        "prefill: float32": (lambda: read_prompts(float32, bench, bench.prompts), nullcontext),
        "decode": (lambda: write_tokens(ours, bench), nullcontext),
        "decode: output layer in float32": (lambda: write_tokens(ours, bench), lambda: without_exact_products(llama)),
        "decode: attention not fused": (
            lambda: write_tokens(ours, bench),
            lambda: mock.patch.object(llama.CausalLM, "_attend_decode", unfused_attention),
        ),
        "decode: float32": (lambda: write_tokens(float32, bench), nullcontext),
    }
    with torch.inference_mode():
        for _ in range(bench.rounds + 1):
            row = {}
            for name, (work, switch) in variants.items():
                with switch():
                    row[name] = timed(work)
                tokens = bench.prompts * (PROMPT if name.startswith("prefill") else bench.steps)
                row[name]["tokens_per_s"] = tokens / row[name]["seconds"]
            yield row


PROMPT = 256


def runner_of(model: Path, dtype: torch.dtype, bench: SmallLmBench) -> ModelRunner:
    """Return the engine's model in `dtype`, with room for all rows."""
    from rollout_server.cpu_engine.model.config import read_model_config
    from rollout_server.cpu_engine.model.llama import CausalLM
    from rollout_server.cpu_engine.model.loader import Weights
    from rollout_server.cpu_engine.model.runner import ModelRunner
    from rollout_server.cpu_engine.scheduler.kv_cache import KVCache

    config = read_model_config(model)
    weights = Weights(config, dtype)
    weights.load(model)
    width = PROMPT + bench.steps + 1
    cache = KVCache(config.layers, config.kv_heads, config.head_dim, dtype, bench.prompts * (width + 512))
    cache.reserve(bench.prompts, width)
    return ModelRunner(CausalLM(config, weights), cache, bench.prompts)


def read_prompts(runner: ModelRunner, bench: SmallLmBench, each: int) -> None:
    """Compute `bench.prompts` prompts, `each` in one forward pass."""
    from rollout_server.cpu_engine.model.runner import Prompt
    from rollout_server.cpu_engine.scheduler.request import SamplingParams

    ids = [(7 * at) % bench.vocabulary for at in range(PROMPT)]
    for start in range(0, bench.prompts, each):
        runner.step(0, [Prompt(ids, 0, PROMPT, SamplingParams(), start + n) for n in range(each)], [], {})


def write_tokens(runner: ModelRunner, bench: SmallLmBench) -> None:
    """Write `bench.steps` tokens for each row, after its prompt."""
    runner.length[:] = PROMPT
    for _ in range(bench.steps):
        runner.step(bench.prompts, [], [], {})


def timed(work: Callable[[], Any]) -> Figures:
    """Return wall and CPU seconds of `work`."""
    begun, cpu = time.monotonic(), time.process_time()
    work()
    return {"seconds": time.monotonic() - begun, "cpu_s": time.process_time() - cpu}


def main() -> None:
    """Run the child process: one line of JSON per round, the learner's first."""
    from benchmarks.learner.ours import own_stdout
    from benchmarks.learner.workload import write_model

    pipe = own_stdout()
    bench = SmallLmBench.model_validate_json(sys.argv[1])
    model = write_model(learner_settings(bench, "float32"), Path(sys.argv[2]) / "model")
    for rounds in (learner_rounds, engine_rounds):
        for row in rounds(bench, model):
            print(json.dumps(row), file=pipe, flush=True)


if __name__ == "__main__":
    main()
