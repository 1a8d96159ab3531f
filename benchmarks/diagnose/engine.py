"""The CPU engine with log-probs that are not the learner's, to which a run attaches (`engine.kind.type` attach).

python -m benchmarks.diagnose.engine 0.7 --model-path DIR ...    logits divided by 0.7, whatever a request asks for
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from rollout_server.cpu_engine.config import parse, read_keys
from rollout_server.cpu_engine.model import runner
from rollout_server.cpu_engine.model.sampler import SampleOutput, SamplingBatch, sample
from rollout_server.cpu_engine.server.app import serve

Sample = Callable[[torch.Tensor, SamplingBatch], SampleOutput]


def at_another_temperature(usual: Sample, temperature: float) -> Sample:
    """Return a sampler that divides the logits first."""
    return lambda logits, rules: usual(logits / temperature, rules)


def main() -> None:
    """Serve with the flags of `python -m rollout_server.cpu_engine` after the temperature."""
    settings = parse(sys.argv[2:])
    setattr(runner, "sample", at_another_temperature(sample, float(sys.argv[1])))  # noqa: B010
    serve(settings, *read_keys(settings))


if __name__ == "__main__":
    main()
