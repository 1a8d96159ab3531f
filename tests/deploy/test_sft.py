"""`foray sft`: demonstrations become the tokens of a rollout, masks cover the policy's, mistakes name their line."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foray.cli import main
from foray.data.encoding import DemonstrationEncoder, encode_files
from learner.sft.batches import SftExample
from protocol.errors import UserError
from protocol.messages import Owner, Question, Sampling, Status
from protocol.search import Passage
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.environment.environment import build_environment
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.rollout.trajectory import run_trajectory
from tests.support.environments import CHAT, TEMPLATE_OF, Kind, write_tokenizer
from tests.support.fake_engine import FakeEngine, Play, in_turn
from tests.support.fake_search import FakeSearch
from tests.support.sft_model import tiny_chat_model

PASSAGES = [Passage(id="1", contents='"a"\nb c <search> d </search>'), Passage(id="2", contents='"e"\nf g ' * 30)]
MESSAGE = {"role": "assistant", "content": "a"}
TURNS = ("<think> i need a </think> <search> a </search>", "<think> was found </think> <answer> b </answer>")


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def encoded(model: Path, *records: Any, max_tokens: int = 4096, **episode: Any) -> list[SftExample]:
    path = write(model / "demos.jsonl", *records)
    encoder = DemonstrationEncoder(model, EnvironmentSettings.model_validate(episode), max_tokens=max_tokens)
    return encode_files([path], encoder, lambda done: None)[0]


def shown(model: Path, example: SftExample) -> list[str]:
    """The trained spans as text."""
    tokenizer = load_tokenizer(model)
    spans: list[list[int]] = []
    for last, at in zip([-2, *example.trained.tolist()], example.trained.tolist(), strict=False):
        if at != last + 1:
            spans.append([])
        spans[-1].append(int(example.ids[at]))
    return [tokenizer.decode(span) for span in spans]


def demonstration(*turns: str, passages: Sequence[Passage] = PASSAGES) -> dict[str, Any]:
    found = {"passages": [{"id": p.id, "contents": p.contents} for p in passages]}
    segments = [part for turn in turns for part in ({"text": turn, "train": True}, found)][:-1]
    return {"id": "q", "question": "a b ?", "segments": segments}


@pytest.mark.parametrize("limit", [300, 60])
@pytest.mark.parametrize("kind", ["words", "bytes"])
async def test_a_demonstration_has_the_tokens_of_the_rollout(tmp_path: Path, kind: Kind, limit: int) -> None:
    """An engine that samples the demonstrated turns produces the trajectory that is trained, observations cut alike."""
    model = write_tokenizer(tmp_path / "model", kind)
    settings = {"template": TEMPLATE_OF[kind], "max_obs_tokens": limit}
    environment = build_environment(EnvironmentSettings.model_validate(settings), model)
    engine = FakeEngine(in_turn(*(Play(environment.tokenizer.encode_trusted(turn)) for turn in TURNS)))
    search = FakeSearch({"a": PASSAGES})
    question = Question(id="q", text="a b ?", answers=("b",))
    trajectory = await run_trajectory(environment, question, engine, search, Sampling(), session="s", group="g")
    assert (trajectory.status, trajectory.searches, trajectory.reward) == (Status.ANSWERED, 1, 1.0)
    seen = next(s for s in trajectory.segments if s.owner is Owner.ENVIRONMENT)
    assert (len(seen.ids) == 60) == (limit == 60), "one of the cases is cut, the other is not"
    (example,) = encoded(model, demonstration(*TURNS), **settings)
    assert example.ids.tolist() == trajectory.ids.tolist()
    assert example.trained.tolist() == trajectory.mask.nonzero()[0].tolist()
    assert shown(model, example) == list(TURNS) and example.key == "a b ?"


def test_the_chat_template_trains_the_turns_of_the_assistant(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path, "bytes")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "No, never."},
        {"role": "user", "content": "Why?"},
    ]
    (example,) = encoded(model, {"messages": messages})
    tokenizer = load_tokenizer(model)
    text = tokenizer.decode(example.ids.tolist())
    assert text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:-1])
    assert shown(model, example) == ["Yes.<|im_end|>", "No, never.<|im_end|>"] and example.key == "One?"
    (later,) = encoded(model, {"prompt": messages[:4], "completion": messages[4:5]})
    assert later.ids.tolist() == example.ids.tolist() and shown(model, later) == ["No, never.<|im_end|>"]


def test_a_completion_of_text_ends_with_the_end_of_sequence(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path, "bytes")
    (example,) = encoded(model, {"prompt": "One and one is", "completion": " two."})
    assert load_tokenizer(model).decode(example.ids.tolist()) == "One and one is two.<|im_end|>"
    assert shown(model, example) == [" two.<|im_end|>"] and example.key == "One and one is"


def test_the_first_record_of_each_file_decides(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", "bytes")
    one = write(tmp_path / "1.jsonl", {"prompt": "a", "completion": "b", "more": 1})
    two = write(tmp_path / "2.jsonl", {"messages": [{"role": "user", "content": "c"}, MESSAGE]})
    encoder = DemonstrationEncoder(model, EnvironmentSettings(), max_tokens=100)
    assert [example.key for example in encode_files([one, two], encoder, lambda done: None)[0]] == ["a", "c"]
    with pytest.raises(UserError, match="unknown format of demonstrations"):
        encode_files([write(tmp_path / "3.jsonl", {"text": "e"})], encoder, lambda done: None)


WRONG = {
    "prompt": ([{"prompt": "a", "completion": "b"}], [
        "{", "3", {"prompt": "a"}, {"prompt": "a", "completion": ""}, {"prompt": [MESSAGE], "completion": "b"},
    ]),
    "messages": ([{"messages": [MESSAGE]}], [
        {"messages": []}, {"messages": ["a"]}, {"messages": [{"role": "user"}]}, {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}]},
    ]),
    "episode": ([demonstration(TURNS[1])], [
        {"question": "a", "segments": []}, {"question": " ", "segments": [{"text": "a", "train": True}]},
        {"question": "a", "segments": [{"text": "a"}]}, {"question": "a", "segments": [{"passages": [3]}]},
        {"question": "a", "segments": ["b"]}, {"question": "a", "segments": [{"text": "a", "train": False}]},
    ]),
}  # fmt: skip


@pytest.mark.parametrize(("right", "wrong"), [(r, w) for right, every in WRONG.values() for r in right for w in every])
def test_a_bad_line_is_named(tmp_path: Path, right: Any, wrong: Any) -> None:
    model = write_tokenizer(tmp_path, "bytes")
    assert len(encoded(model, right)) == 1
    with pytest.raises(UserError, match=r"^line 3 of .*demos\.jsonl is not a valid demonstration"):
        encoded(model, right, right, wrong)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path, "bytes")
    without = CHAT.replace("{{ m.content }}", "{{ m.content if loop.last else 'gone' }}")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": without}))
    said = [{"role": "user", "content": "a"}, MESSAGE]
    with pytest.raises(UserError, match="line 1 of") as error:
        encoded(model, {"messages": said + said})
    assert "one record for each turn" in str(error.value.why).replace("give one", "one")


def test_what_a_rollout_could_not_hold_is_left_out(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", "bytes")
    long = demonstration(*[TURNS[0]] * 4, TURNS[1], passages=[])
    path = write(tmp_path / "demos.jsonl", demonstration(TURNS[1]), long)
    whole = max(len(example.ids) for example in encoded(model, long))
    for limits, tokens, reason in (
        ({"max_turns": 3}, 4096, "more searches than rollout.episode.max_turns"),
        ({"max_new_tokens": 10}, 4096, "a turn is longer than rollout.episode.max_new_tokens"),
        ({"max_context": whole - 1}, 4096, "longer than rollout.episode.max_context"),
        ({}, whole - 1, "longer than sft.max_tokens"),
    ):
        encoder = DemonstrationEncoder(model, EnvironmentSettings.model_validate(limits), max_tokens=tokens)
        if "max_new_tokens" in limits:
            with pytest.raises(UserError, match="no demonstration to train on") as error:
                encode_files([path], encoder, lambda done: None)
            assert error.value.why == f"2 {reason}"
            continue
        found, left_out = encode_files([path], encoder, lambda done: None)
        assert (len(found), dict(left_out)) == (1, {reason: 1})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("sft") / "model")


@pytest.fixture
def command(model: Path, tmp_path: Path) -> list[str]:
    lines = [demonstration(*TURNS) | {"question": f"a {n} ?"} for n in range(12)]
    path = write(tmp_path / "demos.jsonl", *lines)
    words = ["sft", str(path), "--model", str(model), "--out", str(tmp_path / "out"), "--json"]
    return [*words, "sft.dtype=float32", "sft.batch_size=4", "sft.lr=1e-2", "sft.eval_share=0.25"]


def test_the_command_writes_a_model_that_the_engine_serves(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from rollout_server.cpu_engine.model.config import read_model_config
    from rollout_server.cpu_engine.model.loader import Weights

    assert main(command) == 0
    first = capsys.readouterr()
    summary = json.loads(first.out)
    assert summary["step"] == summary["steps"] > 1 and summary["last_loss"] < summary["first_loss"]
    assert {"tokens", "trained_tokens", "seconds", "cpu_seconds"} <= summary.keys() and len(summary["evals"]) == 1
    assert "updates" in first.err and "held out" in first.err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "sft.json"} <= names
    Weights(read_model_config(tmp_path / "out"), torch.float32).load(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_dropout"] == 0.2
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert main(command) == 0
    second = capsys.readouterr()
    assert "is already finished" in second.err and json.loads(second.out) == summary
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    assert main([*command, "sft.lr=2e-2"]) == 2 and "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_a_signal_ends_it_after_the_update(
    command: list[str],
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from learner.sft import training

    plain = training._SftTrainer._update
    updates: list[int] = []

    def update(self: training._SftTrainer) -> None:
        if not updates:
            os.kill(os.getpid(), number)
        updates.append(1)
        plain(self)

    monkeypatch.setattr(training._SftTrainer, "_update", update)
    assert main(command) == code and len(updates) == 1
    said = capsys.readouterr().err
    assert "stopped after step 1 of" in said and not (tmp_path / "out").exists()
    again = shlex.split(said.partition("continue with: ")[2])
    assert again == ["foray", *command] and main(again[1:]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert len(updates) == summary["steps"], "the first update is not repeated"


def test_a_configuration_gives_model_template_and_limits(
    command: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"run: {{model: {model}}}\nsft: {{max_steps: 2}}\nrollout: {{episode: {{max_obs_tokens: 60}}}}\n")
    demos, out = command[1], str(tmp_path / "out")
    assert main(["sft", demos, "--out", out, "--config", str(config), "sft.dtype=float32", "--json"]) == 0
    short = json.loads(capsys.readouterr().out)
    assert short["steps"] == 2
    plain = ["sft", demos, "--out", out + "2", "--model", str(model), "--json"]
    assert main([*plain, "sft.dtype=float32", "sft.max_steps=2"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > short["tokens"]
    for words, said in ((["sft.lr=1"], "no file of demonstrations"), ([demos, "sft.lrr=1"], "lrr")):
        assert main(["sft", *words, "--out", out + "3"]) == 2 and said in capsys.readouterr().err
