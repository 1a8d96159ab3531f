"""`foray.train_grpo` with real processes: own search engine and reward, the trained model, and a notebook that dies."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.run.run_dir import is_held
from foray.api.evaluate import evaluate
from foray.api.run import Run, RunFailed
from foray.api.train import train_grpo
from rollout_server.rewards.base import RewardInput

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BOOKS = {"Emma": "Jane Austen", "Dracula": "Bram Stoker", "Ulysses": "James Joyce", "Walden": "Henry Thoreau"}
SHORT = ("rollout.episode.max_new_tokens=24", "rollout.episode.max_turns=2", "run.group_size=2")


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, Any]:
    """An untrained model and its tokenizer, as `from_pretrained` gives them."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{title} is a book by {author}" for title, author in BOOKS.items()))
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(text)], vocab_size=400, special_tokens=["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(tmp_path / "tiny")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=512, bos_token_id=None, eos_token_id=0, num_key_value_heads=2, **shape)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "tiny"), AutoTokenizer.from_pretrained(tmp_path / "tiny")


class Library:
    def __init__(self) -> None:
        self.queries: list[str] = []

    def search(self, query: str) -> list[str]:
        self.queries.append(query)
        return [f"{title} is a book by {author}." for title, author in BOOKS.items()]


def test_a_notebook_trains_with_its_functions_and_gets_the_model_back(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    seen: list[RewardInput] = []

    def by_length(outcome: RewardInput) -> float:
        seen.append(outcome)
        return min(1.0, outcome.tokens / 48)

    pairs = [(f"Who wrote {title}?", author) for title, author in BOOKS.items()]
    given: dict[str, Any] = {"reward": by_length, "epochs": 2, "lr": 1e-4, "hardware": "cpu", "overrides": SHORT}
    run = train_grpo(*tiny, pairs, Library(), run_dir=tmp_path / "run", **given)
    assert run.state in ("starting", "running")
    trained = run.result()
    assert run.state == "done" and [step["step"] for step in run.steps()] == [1, 2]
    assert {outcome.question.text for outcome in seen} == {text for text, _ in pairs}
    rows = run.table().to_pylist()
    assert len(rows) == 2 * 4 * 2 and {row["reward"] for row in rows} <= {min(1.0, o.tokens / 48) for o in seen}
    assert all(len(row["ids"]) == len(row["mask"]) == len(row["logprobs"]) == len(row["versions"]) for row in rows)
    assert all((logprob < 0) <= own for row in rows for own, logprob in zip(row["mask"], row["logprobs"], strict=True))
    before, after = tiny[0].state_dict(), trained.state_dict()
    assert before.keys() == after.keys() and any(not before[name].equal(after[name]) for name in before)
    assert run.status()["state"].startswith("done") and "done" in repr(Run(run.directory))
    measured = evaluate(run.directory, pairs, search_engine=Library(), reward=by_length, out=tmp_path / "eval")
    assert len(measured.rows) == 4 and set(measured.metrics) >= {"em", "f1"}
    assert 0 < measured.rewards["by_length"] <= 1


SCRIPT = """
import sys, time, foray
def slow(outcome):
    time.sleep(0.05)
    return 1.0
run = foray.train_grpo(sys.argv[1], None, [("Who?", "me")] * 4, None, reward=slow, epochs=500, hardware="cpu",
                       run_dir=sys.argv[2], overrides={overrides!r}, detach={detach})
while len(run.steps()) < 1:
    if run.state == "failed":
        sys.exit(run.log())
    time.sleep(0.2)
print("trains", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("detach", [False, True])
def test_a_notebook_that_is_killed_ends_its_run_or_leaves_it(
    tiny: tuple[Any, Any], tmp_path: Path, detach: bool
) -> None:
    from foray.api.inputs import save_model

    model = save_model(*tiny, tmp_path)
    script = SCRIPT.format(overrides=list(SHORT), detach=detach)
    where = tmp_path / "run"
    notebook = subprocess.Popen(
        [sys.executable, "-c", script, str(model), str(where)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert notebook.stdout is not None
    with notebook.stdout as said:
        assert said.readline() == "trains\n"
        notebook.kill()
        notebook.wait()
    run = Run(where)
    if not detach:
        with pytest.raises(RunFailed, match="is stopped"):
            run.wait(progress=False, timeout_s=120)
        return
    done = len(run.steps())
    until = time.monotonic() + 120
    while not (causes := rejected(run)):
        assert time.monotonic() < until and is_held(where), run.log()
        time.sleep(0.5)
    assert set(causes) == {"reward"}, causes
    assert len(run.steps()) <= done + 3, "without its reward nothing is trained"
    run.stop()
    assert run.state == "stopped"


def rejected(run: Run) -> dict[str, int]:
    """Return cause -> number of failed trajectories, by the rollout server's metrics."""
    causes: dict[str, int] = {}
    for path in (run.directory / "logs").glob("rollout*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if "reward" in line and ("failed" in line or "rejected" in line):
                causes["reward"] = causes.get("reward", 0) + 1
    return causes
