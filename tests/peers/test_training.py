"""Agents on six published clients, unmodified but for base URL and key, in training: five steps, each with groups of 4.

A service in the environment of the peers stays up and runs them all; `rollout.agent` is `http`. Every process of the
ring is real but the engine, which follows a script: a word-level vocabulary has no words for the agents' prompts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from protocol.messages import Owner, Status, Trajectory
from rollout_server.environment.tokenizer import TrajectoryTokenizer, load_tokenizer
from tests.peers.test_agents import ANSWER, CLIENTS, FINAL, SEARCH, node_client, peers_python
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, unsaid

STEPS, GROUP_SIZE = 5, 4
SEQUENCES = {
    "agent_openai chat stream": 1,
    "agent_node openai plain": 1,
    "agent_sdk responses plain": 1,
    "agent_sdk chat plain": 1,
    "agent_langgraph plain": 1,
    "agent_smolagents": 3,
}
"""A client with its arguments -> the sequences of a trajectory."""


def write_model(folder: Path) -> TrajectoryTokenizer:
    """A policy with the vocabulary of the script."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    write_tokenizer(folder, "words", more_words=["<final_answer>", "</final_answer>"])
    tokens = load_tokenizer(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=64, num_key_value_heads=1, max_position_embeddings=8192, tie_word_embeddings=True, **shape
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return tokens


def scripted(tokens: TrajectoryTokenizer) -> FakeServer:
    """An engine that searches twice and then answers, in a third of the trajectories wrongly."""
    ended = {tokens.encode_trusted(f"</{tag}>")[0] for tag in ("search", "answer")}
    answers = 0

    def say(body: dict[str, Any]) -> Sequence[int]:
        nonlocal answers
        ids = body["input_ids"]
        if sum(i in ended for i in ids) < 2:  # turns in the prompt, also rewritten ones
            return unsaid(tokens.encode_trusted(SEARCH), ids)
        answers += 1
        text = FINAL if "</final_answer>" in body["sampling_params"]["stop"] else ANSWER
        return unsaid(tokens.encode_trusted(text if answers % 3 else text.replace(" c ", " d ")), ids)

    return FakeServer(say, exact=True)


@contextmanager
def service(tmp_path: Path) -> Iterator[str]:
    """The agents' service."""
    argv = [peers_python(), str(CLIENTS / "agent_service.py"), *node_client(tmp_path, "agent_node")]
    argv += ["serve", "openai", "plain"]
    log = tmp_path / "service.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=output, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            assert port, log.read_text()
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


def write_run(folder: Path, engine: str, agents: str) -> Path:
    """The configuration of the run, and its questions: one for each client."""
    questions = folder / "questions.jsonl"
    rows = [{"id": f"{client} {n}", "question": "a b ?", "answers": ["c"]} for n, client in enumerate(SEQUENCES)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {"id": "agents", "dir": str(folder / "run"), "model": str(folder / "model"), "steps": STEPS, "max_lag": STEPS}
    tree = {
        "run": run | {"group_size": GROUP_SIZE, "groups_per_step": len(SEQUENCES)},
        "rollout": {
            "episode": {"template": "demo"},
            "search": {"type": "none"},
            "agent": {"type": "http", "target": agents},
        },
        "learner": {"questions": str(questions), "batch": {"micro_batch_tokens": 8192}},
        "engine": {"kind": {"type": "attach", "url": engine}, "poll_s": 0.05},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


def prompts(trajectory: Trajectory) -> int:
    """Number of sequences."""
    return sum(segment.owner is Owner.PROMPT for segment in trajectory.segments)


@pytest.mark.timeout(1200)
async def test_five_steps_of_training_with_groups_of_each_client(
    tmp_path: Path, did: Callable[[str, str], None]
) -> None:
    tokens = write_model(tmp_path / "model")
    async with scripted(tokens) as engine:
        with service(tmp_path) as agents:
            up = ("-m", "foray", "up", str(write_run(tmp_path, engine.url, agents)))
            with (tmp_path / "up.log").open("wb") as log:
                ring = await asyncio.create_subprocess_exec(sys.executable, *up, cwd=tmp_path, stdout=log, stderr=log)
            try:
                code = await ring.wait()
            finally:
                if ring.returncode is None:
                    ring.terminate()
                    await ring.wait()
    assert code == 0, "".join((tmp_path / name).read_text()[-5000:] for name in ("up.log", "service.log"))

    run = tmp_path / "run"
    checkpoint = Checkpoints(run / "checkpoints", 2).load()
    assert checkpoint is not None and checkpoint.facts["step"] == STEPS
    counts = checkpoint.facts["ledger"]["counts"]
    assert counts["trained"] == STEPS * len(SEQUENCES) and sum(counts.values()) == counts["trained"], counts
    groups = [entry.group for entry in read_journal(run / "journal", lineage=checkpoint.lineage)]
    by_client: dict[str, list[Trajectory]] = {client: [] for client in SEQUENCES}
    for group in groups:
        by_client[group.question.id.rpartition(" ")[0]] += group.trajectories
    for client, trajectories in by_client.items():
        assert len(trajectories) == STEPS * GROUP_SIZE, client
        assert {prompts(t) for t in trajectories} == {SEQUENCES[client]}, client
        assert {(t.status, t.turns) for t in trajectories} == {(Status.ANSWERED, 3)}, client
    assert {t.reward for t in by_client["agent_openai chat stream"]} == {0.0, 1.0}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    every = [t for trajectories in by_client.values() for t in trajectories]
    assert sum(step["tokens_trained"] for step in steps) == sum(t.num_sampled for t in every)
    rewards = {client: sum(t.reward for t in trajectories) for client, trajectories in by_client.items()}
    each = "; ".join(f"{client}: {n} a trajectory, reward {rewards[client]:g}" for client, n in SEQUENCES.items())
    did(f"{STEPS} steps of training", f"{STEPS * GROUP_SIZE} trajectories of each client, sequences: {each}")
