"""Two gloo ranks do what one does: losses, norms, metrics and weights, whatever the algorithm and the ZeRO stage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from protocol.codec import encode
from protocol.messages import Status, Trajectory, TrajectoryGroup
from tests.support import rank_pair
from tests.support.forks import Zygote
from tests.support.messages import make_question, observation_segment, policy_segment, prompt_segment

pytestmark = pytest.mark.slow
VOCABULARY = 40
BY_RANK = re.compile("padding_share|micro_batches|rank_balance|logprob_change.*|fell_.*")
"""Metrics of the layout, and of a sample of each rank's first minibatch."""


@pytest.fixture(scope="module")
def model(tiny_qwen: Path) -> Path:
    return tiny_qwen


def groups(model: Path) -> list[TrajectoryGroup]:
    """Ten groups of three, of very unequal lengths, with log-probs that an engine of this model would report."""
    rng = np.random.default_rng(0)
    causal = transformers.Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)

    def trajectory(reward: float) -> Trajectory:
        ids = [1, 2, 3, *rng.integers(4, VOCABULARY, rng.integers(4, 24)).tolist()]
        cut = int(rng.integers(4, len(ids) - 1))
        with torch.no_grad():
            table = torch.log_softmax(causal(torch.tensor([ids]), use_cache=False).logits[0], -1)
        logprobs = [float(table[at - 1, ids[at]]) + float(rng.normal(0, 0.1)) for at in range(1, len(ids))]
        one = policy_segment(ids[3:cut], [min(0.0, x) for x in logprobs[2 : cut - 1]])
        two = policy_segment(ids[cut + 1 :], [min(0.0, x) for x in logprobs[cut:]])
        segments = (prompt_segment(ids[:3]), one, observation_segment([ids[cut]]), two)
        status, parts = Status.ANSWERED if reward else Status.TRUNCATED, {"one": reward, "two": len(ids) / 10}
        return Trajectory(status=status, segments=segments, reward=reward, rewards=parts)

    return [
        TrajectoryGroup(
            run="t", seq=s, question=make_question(s), trajectories=tuple(trajectory(r) for r in (1.0, 0.0, 0.3 * s))
        )
        for s in range(1, 11)
    ]


@pytest.fixture(scope="module")
def by_two(model: Path, tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> tuple[Path, list[dict[str, Any]]]:
    """The file of the groups, and what each of two ranks found."""
    out = tmp_path_factory.mktemp("ranks")
    path = out / "groups.txt"
    path.write_text("\n".join(encode(g).hex() for g in groups(model)))
    zygote.run_ranks(rank_pair.__file__, [str(model), str(path), str(out)], out, 2)
    return path, [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


CASES = (
    *(f"grpo, stage {stage}" for stage in range(4)),
    *("ppo, stage 2", "reinforce_pp, stage 1", "gspo, stage 2", "ema_pg, stage 3"),
    *("reinforce, normalized weights", "dppo, what spans the batch", "lora, stage 2"),
)


def test_every_case_is_checked() -> None:
    assert tuple(rank_pair.CASES) == CASES


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(case: str, model: Path, by_two: tuple[Path, list[dict[str, Any]]]) -> None:
    path, found = by_two
    expected = rank_pair.measure(model, rank_pair.read_groups(path), case)
    if "spans" in case:
        assert all(0 < metrics["rejected"] < 1 for metrics in expected["metrics"])
    for rank in found:
        of = rank[case]
        # the last digits of the weights differ, by 1e-7, and sequence weights are exponentials of sums
        assert of["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=2e-6)
        assert of["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-3)
        for one, two in zip(expected["metrics"], of["metrics"], strict=True):
            mine, theirs = ({k: v for k, v in m.items() if not BY_RANK.fullmatch(k)} for m in (one, two))
            assert theirs.keys() == mine.keys() and "logprob_change" in two
            assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
        assert of["weights"].keys() == expected["weights"].keys()
        for name, values in expected["weights"].items():
            np.testing.assert_allclose(of["weights"][name], values, rtol=2e-3, atol=2e-4, err_msg=name)
    assert found[0][case] == found[1][case], "the ranks agree to the last digit"
