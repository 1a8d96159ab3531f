"""`foray bench engine`: tokens/s of the CPU engine, against `generate` of transformers.

The same model, prompts, lengths and threads, in alternating rounds. Foray uses HTTP and returns log-probs, as rollouts
need them. The baseline is one static batch in a separate process without either; all lengths are equal, so it pads
nothing: its best case. Value and ratio are of streaming requests, as in rollouts.

loop       consumes              produces             waits for               unblocked by
rounds_of  prompts from a seed   seconds a round      every answer            the engines
Baseline   a round's prompts     seconds              the child's line        the child, or its death
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from benchmarks.base import BenchResult, BenchSettings, Say, Target, cpu_seconds
from protocol.errors import ForayError
from protocol.runtime.log import LOG_LEVEL_VARIABLE
from protocol.runtime.net import free_port

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S = 600.0
FIRST_ID = 16
"""Smaller ids are often control tokens."""
VOCABULARY = 49152
"""Of a model with a shape: that of SmolLM2."""


@dataclass(frozen=True)
class BenchedEngine:
    """An engine at `url`; `pid` 0: not started by the benchmark."""

    url: str
    pid: int = 0


@contextmanager
def cpu_engine(directory: Path, model: Path, threads: int, dtype: str, say: Say) -> Iterator[BenchedEngine]:
    """Run the engine as a process while the block runs. Raises ProcessFailed if it does not start."""
    from deploy.launch.plan import ProcessSpec, Ready
    from deploy.launch.supervisor import Readiness, Supervisor

    url = f"http://127.0.0.1:{free_port()}"
    argv = python("rollout_server.cpu_engine", "--model-path", str(model), "--port", url.rpartition(":")[2])
    argv += ("--threads", str(threads), "--dtype", dtype)
    env = {"OMP_NUM_THREADS": str(threads), LOG_LEVEL_VARIABLE: "WARNING"}
    supervisor = Supervisor(is_ready=Readiness("", "bench"), ready_s=120.0, shutdown_s=10.0, say=say)
    try:
        child = supervisor.spawn(ProcessSpec("engine", "engine", argv, directory / "engine.log", Ready.ALIVE, url, env))
        supervisor.await_ready(["engine"])
        yield BenchedEngine(url, child.pid)
    finally:
        supervisor.stop()


class Baseline:
    """`benchmarks.hf_generate` as a child process: a line with prompts in, a line with seconds out."""

    def __init__(self, directory: Path, model: Path, threads: int, dtype: str) -> None:
        self._log = directory / "transformers.log"
        self._argv = python("benchmarks.hf_generate", str(model), str(threads), dtype)

    def __enter__(self) -> Baseline:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # it exits at the end of its input; do not wait for one that computes
        for pipe in self._pipes():
            with suppress(BrokenPipeError):  # of a line that a dead child did not read
                pipe.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()

    def round(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, float]:
        """Run one batch and return its figures. Raises ForayError if the child exited."""
        stdin, stdout = self._pipes()
        try:
            stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ForayError(f"transformers failed: {self._log.read_text()[-2000:].strip()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout


async def rounds_of(
    settings: EngineBench, engine: BenchedEngine, baseline: Baseline, say: Say
) -> list[dict[str, dict[str, float]]]:
    """Return name -> figures for each round, without the warm-up."""
    import aiohttp

    draw = random.Random(settings.seed)
    rows = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        vocab = (await _json(session, f"{engine.url}/model_info"))["vocab_size"]
        for number in range(settings.rounds + 1):
            row: dict[str, dict[str, float]] = {}
            prompts = [
                [draw.randrange(FIRST_ID, vocab) for _ in range(settings.prompt_tokens)] for _ in _each(settings)
            ]
            row["transformers"] = await asyncio.to_thread(baseline.round, prompts, settings.new_tokens)
            for kind, target, stream in _kinds(settings, engine):
                # new prompts each time: a cached prefix would save work
                prompts = [[draw.randrange(FIRST_ID, vocab) for _ in prompt] for prompt in prompts]
                row[kind] = await _round(session, settings, target, prompts, stream=stream)
            shown = ", ".join(f"{kind} {figures['tokens_per_s']:.0f}" for kind, figures in row.items())
            say(f"{f'round {number}' if number else 'warm-up'}, tokens/s: {shown}")
            if number:
                rows.append(row)
    return rows


def _each(settings: EngineBench) -> range:
    return range(settings.concurrency)


def _kinds(settings: EngineBench, engine: BenchedEngine) -> list[tuple[str, BenchedEngine, bool]]:
    kinds = [("streaming", engine, True), ("whole", engine, False)]
    if settings.url:
        other = BenchedEngine(settings.url.rstrip("/"))
        kinds += [("other_streaming", other, True), ("other_whole", other, False)]
    return kinds


async def _round(
    session: aiohttp.ClientSession,
    settings: EngineBench,
    target: BenchedEngine,
    prompts: Sequence[Sequence[int]],
    *,
    stream: bool,
) -> dict[str, float]:
    """Send all prompts to one engine at the same time. Raises ForayError if an answer is incomplete."""
    cpu = cpu_seconds(target.pid) if target.pid else 0.0
    begun = time.monotonic()
    counts = await asyncio.gather(*(_ask(session, settings, target.url, prompt, stream=stream) for prompt in prompts))
    seconds = time.monotonic() - begun
    if set(counts) != {settings.new_tokens}:
        raise ForayError(
            f"{target.url} generated {min(counts)} to {max(counts)} tokens instead of {settings.new_tokens}"
        )
    figures = {"tokens_per_s": sum(counts) / seconds}
    if target.pid:
        figures["cpu_ms_per_token"] = 1000 * (cpu_seconds(target.pid) - cpu) / sum(counts)
    return figures


async def _ask(
    session: aiohttp.ClientSession, settings: EngineBench, url: str, prompt: Sequence[int], *, stream: bool
) -> int:
    """Return the number of tokens received. Only the last chunk is decoded, so that the client costs little."""
    import aiohttp

    sampling: dict[str, Any] = {"max_new_tokens": settings.new_tokens, "temperature": 1.0, "ignore_eos": True}
    if stream:
        sampling["stream_interval"] = settings.stream_interval
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": stream}
    deadline = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with session.post(f"{url}/generate", json=body, timeout=deadline) as response:
        if response.status != 200:
            raise ForayError(f"{url} answered {response.status}: {(await response.text())[:500]}")
        if not stream:
            return int((await response.json())["meta_info"]["completion_tokens"])
        last = b""
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = line
        return int(json.loads(last[6:])["meta_info"]["completion_tokens"])


async def _json(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url) as response:
        answer: dict[str, Any] = await response.json()
        return answer


class EngineBench(BenchSettings):
    """Settings of `foray bench engine`."""

    help: ClassVar[str] = "tokens/s of the CPU engine against transformers' generate"
    quick: ClassVar[dict[str, Any]] = {"concurrency": 4, "prompt_tokens": 16, "new_tokens": 16, "rounds": 1}
    targets: ClassVar[tuple[Target, ...]] = (
        Target("ratio", 3.0, "tokens a second, streaming, over transformers' generate"),
    )
    modules: ClassVar[tuple[str, ...]] = (
        "protocol",
        "rollout_server/cpu_engine",
        "foray/demo/warmstart.py",
        "benchmarks/engine.py",
        "benchmarks/hf_generate.py",
        "benchmarks/learner/workload.py",
    )

    model: Path | None = None
    """Directory of a model in Hugging Face layout. None: the demo's model, untrained."""
    shape: Literal["", "small", "135m", "0.5b"] = ""
    """Size of a model with random weights, as in `foray bench learner`, in place of `model`."""
    concurrency: int = Field(default=64, ge=1)
    """Concurrent requests, and rows in the baseline's batch."""
    prompt_tokens: int = Field(default=64, ge=1)
    """Tokens per prompt; all prompts differ."""
    new_tokens: int = Field(default=128, ge=1)
    """Tokens generated per prompt."""
    stream_interval: int = Field(default=8, ge=1)
    """Tokens between two chunks of a streaming request."""
    rounds: int = Field(default=5, ge=1)
    """Number of rounds, of which the median counts, after one warm-up round."""
    threads: int = Field(default=1, ge=1)
    """torch threads, in the engine and in the baseline."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """dtype of the weights, in the engine and in the baseline; auto: what this machine is faster in."""
    seed: int = 0
    """Random seed of the prompts."""
    url: str = ""
    """URL of another engine with SGLang's API and the same model, to measure as well."""

    def measure(self, say: Say) -> BenchResult:
        """Start the engine and the baseline, run their rounds in turn, and stop them."""
        from deploy.hardware.speed import cpu_speed

        speed = cpu_speed() if self.dtype == "auto" else None
        dtype = speed.best if speed else self.dtype
        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            directory = Path(name)
            model = self.model or random_model(directory / "model", self.shape)
            with (
                cpu_engine(directory, model, self.threads, dtype, say) as engine,
                Baseline(directory, model, self.threads, dtype) as baseline,
            ):
                rows = asyncio.run(rounds_of(self, engine, baseline, say))
        figures = {kind: _figures([row[kind] for row in rows]) for kind in rows[0]}
        baseline_figures = figures.pop("transformers")
        ours = figures["streaming"]
        return BenchResult(
            value=ours["tokens_per_s"],
            unit="tokens/s",
            baseline={"name": "transformers generate, one batch", **baseline_figures},
            ratio=ours["tokens_per_s"] / baseline_figures["tokens_per_s"],
            details={
                **figures,
                "dtype": dtype,
                "ratio_whole": figures["whole"]["tokens_per_s"] / baseline_figures["tokens_per_s"],
                "cpu_ratio": baseline_figures["cpu_ms_per_token"] / ours["cpu_ms_per_token"],
            },
        )


def _figures(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the rounds of one engine. CPU time is known only for processes started here."""
    return {name: median(row[name] for row in rows) for name in rows[0]}


def random_model(directory: Path, shape: str) -> Path:
    """Write a model of `shape`, "": the demo's."""
    if shape:
        from benchmarks.learner.settings import LearnerBench
        from benchmarks.learner.workload import write_model
        from tests.support.environments import write_tokenizer

        write_model(LearnerBench.model_validate({"shape": shape, "vocabulary": VOCABULARY}), directory)
        write_tokenizer(directory, "words")
        return directory
    from foray.demo.warmstart import new_model, save_model

    save_model(new_model(0), directory)
    return directory


def python(module: str, *argv: str) -> tuple[str, ...]:
    """Return the command line of a Python module."""
    return (sys.executable, "-m", module, *argv)
