"""`foray bench engine`: tokens a second of the embedded engine, against `generate` of transformers.

The same model, prompts, lengths and threads, round by round in turn. Ours goes over HTTP and returns log-probs, as
rollouts need them; the baseline is one static batch in a process of its own without either, and since all lengths are
equal it pads nothing: its best case. Value and ratio are of streaming requests, which is how rollouts generate.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from deploy.bench.base import BenchSettings, Measured, Say, Target


class EngineBench(BenchSettings):
    """The load."""

    help: ClassVar[str] = "tokens a second of the embedded engine against transformers' generate"
    quick: ClassVar[dict[str, Any]] = {"concurrency": 4, "prompt_tokens": 16, "new_tokens": 16, "rounds": 1}
    targets: ClassVar[tuple[Target, ...]] = (
        Target("ratio", 3.0, "tokens a second, streaming, over transformers' generate"),
    )
    modules: ClassVar[tuple[str, ...]] = (
        "protocol",
        "rollout_server/cpu_engine",
        "deploy/demo/tiny_model.py",
        "deploy/bench/engine*.py",
        "deploy/bench/hf_generate.py",
    )

    model: Path | None = None
    """Directory of a model in Hugging Face layout; none: the demo's, as it is before any training."""
    concurrency: int = Field(default=64, ge=1)
    """Requests at once, rows of the baseline's batch."""
    prompt_tokens: int = Field(default=64, ge=1)
    """Tokens of each prompt; no two prompts are alike."""
    new_tokens: int = Field(default=128, ge=1)
    """Tokens generated for each."""
    stream_interval: int = Field(default=8, ge=1)
    """Tokens between two chunks of a streaming request."""
    rounds: int = Field(default=5, ge=1)
    """Repetitions, of which the median counts; one more goes before to warm up."""
    threads: int = Field(default=1, ge=1)
    """Threads of torch, in the engine and in the baseline."""
    seed: int = 0
    """Of the prompts."""
    url: str = ""
    """Another engine that speaks SGLang's API and holds the same model, to be measured beside."""

    def measure(self, say: Say) -> Measured:
        """Starts the engine and the baseline, gives each its rounds in turn, and stops them."""
        from deploy.bench.engine_load import Baseline, embedded_engine, rounds_of

        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            directory = Path(name)
            model = self.model or _demo_model(directory / "model")
            with (
                embedded_engine(directory, model, self.threads, say) as engine,
                Baseline(directory, model, self.threads) as baseline,
            ):
                rows = asyncio.run(rounds_of(self, engine, baseline, say))
        figures = {kind: _figures([row[kind] for row in rows]) for kind in rows[0]}
        baseline_figures = figures.pop("transformers")
        ours = figures["streaming"]
        return Measured(
            value=ours["tokens_per_s"],
            unit="tokens/s",
            baseline={"name": "transformers generate, one batch", **baseline_figures},
            ratio=ours["tokens_per_s"] / baseline_figures["tokens_per_s"],
            details={
                **figures,
                "ratio_whole": figures["whole"]["tokens_per_s"] / baseline_figures["tokens_per_s"],
                "cpu_ratio": baseline_figures["cpu_ms_per_token"] / ours["cpu_ms_per_token"],
            },
        )


def _figures(rows: list[dict[str, float]]) -> dict[str, float]:
    """The medians of one engine's rounds. Processor time is known for processes of ours only."""
    return {name: median(row[name] for row in rows) for name in rows[0]}


def _demo_model(directory: Path) -> Path:
    from deploy.demo.tiny_model import new_model, save_model

    save_model(new_model(0), directory)
    return directory


def python(module: str, *argv: str) -> tuple[str, ...]:
    """Command line of a module of ours."""
    return (sys.executable, "-m", module, *argv)
