"""A learner with the real trainer, killed again and again, ends with the parameters of one that never was.

The oracle is the journal of the lineage that survived, trained from the initial weights without an interruption.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml
from safetensors.torch import load_file

from learner.checkpoint.checkpoint import Checkpoint, Checkpoints
from learner.checkpoint.journal import read_journal
from protocol.codec import decode_as
from protocol.header import seal
from protocol.messages import Status, Task, Trajectory, TrajectoryGroup
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.messages import observation_segment, policy_segment, prompt_segment

VOCABULARY, STEPS = 40, 13
CHAIN = ("update:2", "save:3", "commit:6", "journal:8", "rename:8", "snapshot:11", "")
"""Where each process dies; a checkpoint is due every third batch, and the eighth one is skipped."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of two layers."""
    import torch

    directory = tmp_path_factory.mktemp("model")
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


POISON = 30


def differs(task: Task, header: bytes, body: bytes, poison: int = 0) -> tuple[bytes, bytes]:
    """The group of a seq: no two seqs have the same tokens, lengths or rewards. The loss of `poison` is infinite."""
    made = decode_as(TrajectoryGroup, body)
    version = made.first_version()
    assert version is not None
    draw = np.random.default_rng([task.seq, task.attempt])

    def turn() -> Any:
        ids = draw.integers(1, VOCABULARY, draw.integers(2, 9)).tolist()
        return policy_segment(ids, (-3.7 + 0.3 * draw.random(len(ids))).tolist(), version)

    def trajectory() -> Trajectory:
        segments = (prompt_segment([1, 2, 3, task.seq % VOCABULARY]), turn(), observation_segment([7, 8]), turn())
        reward = float(draw.integers(0, 2)) * (1e39 if task.seq == poison else 1.0)
        return Trajectory(status=Status.ANSWERED, segments=segments, reward=reward, rewards={"em": reward})

    return seal(made.model_copy(update={"trajectories": tuple(trajectory() for _ in range(task.group_size))}))


@pytest.fixture
def chain(run: RunSettings, questions: Path, model: Path, tmp_path: Path) -> Callable[..., list[int]]:
    """Runs learners one after the other; returns their exit statuses."""

    def call(learner: dict[str, Any], *lives: tuple[str, list[str]]) -> list[int]:
        tree = {
            "run": json.loads(run.model_copy(update={"model": model, "steps": STEPS}).model_dump_json()),
            "learner": {"questions": str(questions), "checkpoint_every": 3, "reconcile_s": 0.3} | learner,
        }
        tree["learner"].setdefault("engine", {}).update({"threads": 1, "deterministic": True})
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
        files = []
        for number, (fault, more) in enumerate(lives):
            files.append(tmp_path / f"life{number}.json")
            argv = ["--config", str(tmp_path / "c.yaml"), *more]
            files[-1].write_text(json.dumps({"argv": argv, "fault": fault}))
        program = [sys.executable, "-m", "tests.support.mortal", *map(str, files)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        statuses: list[int] = json.loads(done.stdout.splitlines()[-1])
        assert statuses == [-9 if fault else 0 for fault, _ in lives], done.stderr
        return statuses

    return call


def replayed(run: RunSettings, tmp_path: Path) -> tuple[str, list[str]]:
    """The life of a process that trains from the run's journal, with no Redis to go to."""
    nowhere = [f"run.dir={tmp_path / 'replay'}", "run.redis_url=redis://127.0.0.1:1/0"]
    return "", ["--replay", str(run.dir), "--export", *nowhere]


def assert_same_parameters(run: RunSettings, tmp_path: Path, model: Path) -> None:
    """The run and its replay ended with the same bytes, those of all moments too, and not with the initial weights."""
    (ours,) = run.weights_dir.glob(f"v*.{STEPS}")
    (oracle,) = (tmp_path / "replay" / "weights").glob(f"v*.{STEPS}")
    assert (ours / "model.safetensors").read_bytes() == (oracle / "model.safetensors").read_bytes()
    states = [final(directory).path / "state" for directory in (run.dir, tmp_path / "replay")]
    files = [{str(p.relative_to(state)): p for p in state.rglob("*") if p.is_file()} for state in states]
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name].read_bytes() != files[1][name].read_bytes()] == []
    before, after = load_file(model / "model.safetensors"), load_file(ours / "model.safetensors")
    assert all(not (before[name] == after[name]).all() for name in after)


def final(directory: Path) -> Checkpoint:
    found = Checkpoints(directory / "checkpoints", 2).load()
    assert found
    return found


@pytest.mark.slow
@pytest.mark.fault(7, 8, 9)
def test_killed_anywhere_it_ends_with_the_parameters_of_a_run_that_never_was(
    run: RunSettings, address: dict[str, Any], chain: Callable[..., list[int]], model: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    settings = {"optim": {"lr": 3e-3, "schedule": "linear"}, "algorithm": {"type": "grpo", "std": "none"}}
    other = ["--replay", str(run.dir), "--rebatch", f"run.dir={tmp_path / 'other'}"]
    other += ["learner.algorithm.type=gspo", "run.groups_per_step=6"]
    with tiny_learner.Player(address, run.id, spoil=partial(differs, poison=POISON)):
        chain(settings, *[(fault, []) for fault in CHAIN], replayed(run, tmp_path), ("", other))
    # Every seq at most once in the lineage that survived, and the lost branches were real.
    checkpoint = final(run.dir)
    assert checkpoint.lineage == ((3, 0), (6, 6), (7, 8)), "learner starts 1, 2, 4 and 5 left nothing behind"
    kept = list(read_journal(run.dir / "journal", lineage=checkpoint.lineage))
    seqs = [entry.group.seq for entry in kept]
    assert len(seqs) == len(set(seqs)) == STEPS * run.groups_per_step
    assert [entry.step for entry in kept] == [step for step in range(1, STEPS + 1) for _ in range(4)]
    assert len(list(read_journal(run.dir / "journal"))) > len(kept)
    assert checkpoint.facts["ledger"]["counts"]["trained"] == len(seqs)
    # The batch that was not finite is in the ledger, and left no trace in weights and moments.
    dead = [seq for seq, *why in checkpoint.facts["ledger"]["notes"] if why == ["dead", "nonfinite"]]
    assert POISON in dead and len(dead) == run.groups_per_step == len(checkpoint.facts["ledger"]["notes"])
    assert_same_parameters(run, tmp_path, model)
    # Another algorithm makes another policy of the same groups, in different batches.
    lines = tiny_learner.step_lines(tmp_path / "other")
    assert [seq for line in lines for seq in line["seqs"]] == seqs[: len(seqs) // 6 * 6]


@pytest.mark.slow
def test_every_part_with_state_is_resumed(
    run: RunSettings, address: dict[str, Any], chain: Callable[..., list[int]], model: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    # A critic with its optimiser, an adaptive divergence from a moving average, several updates a batch, old groups.
    settings = {
        "algorithm": {"type": "ppo", "gamma": 0.99, "lam": 0.95, "epochs": 2, "minibatches": 2}
        | {"kl": {"coefficient": 0.05, "target": 0.01, "horizon": 50}, "old_logprobs": "recompute"},
        "critic": {"optim": {"lr": 1e-3}},
        "optim": {"lr": 3e-3, "schedule": "cosine"},
        "reference": {"kind": "ema", "every": 3},
        "replay_mix": {"share": 0.5},
    }
    with tiny_learner.Player(address, run.id, spoil=differs):
        chain(settings, ("update:18", []), ("commit:9", []), ("", []), replayed(run, tmp_path))
    assert final(run.dir).lineage == ((1, 0), (2, 3), (3, 9))
    assert_same_parameters(run, tmp_path, model)
    lines = tiny_learner.step_lines(tmp_path / "replay")
    assert lines[-1]["value_loss"] and lines[-1]["kl_coefficient"] != 0.05
