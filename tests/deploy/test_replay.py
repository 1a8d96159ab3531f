"""Reading a journal: what was trained, what was not, and texts with terminal control codes."""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foray.commands.watch import replay as command
from foray.watch import transcript
from foray.watch.transcript import Shown, choose, render, to_json, visible
from learner.checkpoint import journal
from learner.checkpoint.journal import GroupJournal, JournalEntry, read_journal
from protocol.errors import UserError
from protocol.header import seal
from protocol.messages import Owner, Segment, Status, Trajectory, TrajectoryGroup, VersionSpan
from rollout_server.environment.tokenizer import TrajectoryTokenizer, load_tokenizer
from tests.support.messages import make_group, make_question

WORDS = ["<eos>", "<unk>", "who", "wrote", "it", "?", "<search>", "</search>", "emma", "austen", "\x1b[2J", "answer"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with nothing but a word-level tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def ids(text: str) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray([WORDS.index(word) for word in text.split(" ")], np.int32)


def policy(text: str, *spans: tuple[int, int, int]) -> Segment:
    given = ids(text)
    return Segment(
        owner=Owner.POLICY,
        ids=given,
        logprobs=np.full(len(given), -0.5, np.float32),
        spans=tuple(VersionSpan(epoch=1, step=step, start=start, end=end) for step, start, end in spans),
    )


def group(seq: int = 1) -> TrajectoryGroup:
    good = Trajectory(
        status=Status.ANSWERED,
        segments=(
            Segment(owner=Owner.PROMPT, ids=ids("who wrote it ?")),
            policy("<search> emma </search>", (3, 0, 1), (5, 1, 3)),
            Segment(owner=Owner.ENVIRONMENT, ids=ids("austen \x1b[2J wrote emma"), query="emma", passage_ids=("p7",)),
            policy("answer austen", (6, 0, 2)),
        ),
        reward=1.0,
        rewards={"em": 1.0},
        answer="austen",
        turns=2,
        searches=1,
    )
    bad = Trajectory(status=Status.OUT_OF_TURNS, segments=good.segments[:2], reward=0.0, turns=1)
    return TrajectoryGroup(run="test", seq=seq, question=make_question(seq), trajectories=(bad, good))


@pytest.fixture
def run_dir(tmp_path: Path, model: Path) -> Path:
    directory = tmp_path / "run"
    journal = GroupJournal(directory / "journal")
    for seq in range(1, 5):
        journal.append(7, 1, [seal(group(seq))])
    journal.close()
    (directory / "resolved.yaml").write_text(f"run: {{model: {model}, max_lag: 2}}\n")
    return directory


@pytest.fixture
def tokens(model: Path) -> TrajectoryTokenizer:
    return load_tokenizer(model)


def test_the_best_trajectory_of_each_of_the_last_groups_is_chosen(run_dir: Path) -> None:
    shown = choose(read_journal(run_dir / "journal", last=2))
    assert [(s.group.seq, s.index) for s in shown] == [(3, 1), (4, 1)]
    assert len(list(choose(read_journal(run_dir / "journal", last=2), every=True))) == 4
    assert [s.group.seq for s in choose(read_journal(run_dir / "journal", seq=2), best=3)] == [2, 2]


def test_masks_versions_and_lags_are_visible_without_colour(run_dir: Path, tokens: TrajectoryTokenizer) -> None:
    text = render(next(choose(read_journal(run_dir / "journal", last=1), max_lag=2)), tokens, colour=False)
    lines = text.splitlines()
    assert "│prompt│ who wrote it ?" in lines
    assert "answer austen" in lines, "what the policy wrote stands bare"
    assert [line for line in lines if line.startswith("│env│")] == [
        "│env│ austen \N{REPLACEMENT CHARACTER}[2J wrote emma"
    ]
    assert "version 1.3 (lag 3), 1.5 (lag 1) · 1 tokens not trained on: older than max_lag" in text
    assert "version 1.6 (lag 0)" in text, "step 7 trains version 6"
    assert "searched for 'emma'" in text and "passages p7" in text
    assert "reward    1 (em 1); rewards of the group: 0 1" in text and "\x1b" not in text


def test_what_a_tool_was_called_with_is_shown_by_its_name(tokens: TrajectoryTokenizer) -> None:
    called = group()
    seen = called.trajectories[1].segments[2]
    program = seen.model_copy(update={"tool": "python", "query": "1\x1b[2J / 0", "passage_ids": (), "error": "tool_x"})
    fetched = seen.model_copy(update={"tool": "fetch", "query": "p7"})
    segments = (*called.trajectories[1].segments[:2], program, fetched)
    trajectory = called.trajectories[1].model_copy(update={"segments": segments})
    shown = Shown(called.model_copy(update={"trajectories": (trajectory,)}), 0, 7, 1)
    text = render(shown, tokens, colour=False)
    assert "called python with '1\N{REPLACEMENT CHARACTER}[2J / 0' · 0 ms · error tool_x" in text
    assert "called fetch with 'p7' · passages p7 · 0 ms" in text and "searched for" not in text
    assert [s["tool"] for s in to_json(shown, tokens)["segments"]] == ["", "", "python", "fetch"]


def test_with_colours_only_the_policys_words_are_bold(run_dir: Path, tokens: TrajectoryTokenizer) -> None:
    lines = render(next(choose(read_journal(run_dir / "journal", last=1))), tokens, colour=True).splitlines()
    assert "\x1b[1manswer austen\x1b[0m" in lines
    assert sum(line.startswith("\x1b[2m│env│") for line in lines) == 1


def test_the_json_holds_texts_masks_and_lags(run_dir: Path, tokens: TrajectoryTokenizer) -> None:
    report = json.loads(json.dumps(to_json(next(choose(read_journal(run_dir / "journal", last=1))), tokens)))
    assert [s["trained"] for s in report["segments"]] == [False, True, False, True]
    assert report["segments"][1]["lags"] == [3, 1] and report["segments"][2]["query"] == "emma"


def test_control_and_format_characters_cannot_reach_the_terminal() -> None:
    assert visible("a\x1b[31m\u202eb\x07\nc") == "a\ufffd[31m\ufffdb\ufffd c"
    assert visible("a\nb\tc", newline=True) == "a\nb\tc"


def test_the_command_prints_trajectories(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(run_dir=run_dir, show=3, seq=None, all=False, model=None, json=False)
    assert command.run(args) == 0
    assert capsys.readouterr().out.count("━━ seq") == 3
    args.json = True
    assert command.run(args) == 0
    assert [item["seq"] for item in json.loads(capsys.readouterr().out)] == [2, 3, 4]
    args.all = True
    assert command.run(args) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(item["seq"], item["index"]) for item in lines] == [(s, i) for s in (2, 3, 4) for i in (0, 1)]


def test_all_trajectories_of_a_run_are_not_in_memory_together(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[TrajectoryGroup]] = []

    def counted(folder: Path, **given: object) -> Iterator[JournalEntry]:
        for entry in read_journal(folder, **given):  # type: ignore[arg-type]
            seen.append(weakref.ref(entry.group))
            assert sum(group() is not None for group in seen) <= 3, "of four"
            yield entry

    monkeypatch.setattr(journal, "read_journal", counted)
    args = argparse.Namespace(run_dir=run_dir, show=99, seq=None, all=True, model=None, json=True)
    assert command.run(args) == 0 and len(capsys.readouterr().out.splitlines()) == 8


def test_a_script_reads_steps_and_trajectories(run_dir: Path) -> None:
    import foray

    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "los')
    assert foray.read_steps(run_dir / "metrics.jsonl") == {1: {"step": 1, "loss": 0.5}}
    (entry,) = foray.read_journal(run_dir / "journal", last=1)
    tokens = foray.load_tokenizer(run_dir.parent / "model")
    assert (entry.step, tokens.decode(entry.group.trajectories[1].segments[3].ids.tolist())) == (7, "answer austen")


def test_nothing_to_show_is_said_with_what_to_do(run_dir: Path) -> None:
    args = argparse.Namespace(run_dir=run_dir, show=3, seq=99, all=False, model=None, json=False)
    with pytest.raises(UserError, match="no group of seq 99"):
        command.run(args)


def test_steps_that_a_crash_rolled_back_are_left_out(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run_dir / "checkpoints" / "step_5.e2"
    checkpoint.mkdir(parents=True)
    ledger = {"watermark": 0, "above": [], "counts": {}, "notes": []}
    manifest = {"step": 5, "epoch": 2, "ledger": ledger, "lineage": [[1, 0], [2, 5]]}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (run_dir / "checkpoints" / "CURRENT").write_text("step_5.e2")
    journal = GroupJournal(run_dir / "journal")
    journal.append(6, 2, [seal(make_group(9))])
    journal.close()
    args = argparse.Namespace(run_dir=run_dir, show=9, seq=None, all=False, model=None, json=True)
    assert command.run(args) == 0
    assert [item["seq"] for item in json.loads(capsys.readouterr().out)] == [9]


@pytest.mark.parametrize("rest", ["", "\nDoc 2(", "\nDoc 2(Title:", '\nDoc 2(Title: "Emily'])
def test_passages_that_are_cut_keep_the_titles_before_the_cut(rest: str) -> None:
    found = transcript._passages('Doc 1(Title: "Jane") Jane wrote it.' + rest, ("p1", "p2"))
    assert found["passages"] == [{"id": "p1", "title": "Jane", "text": "Jane wrote it."}]
    assert not transcript._passages("Doc 1(Title: a) b\nDoc 2(Title: c) d", ("p1",))["passages"], "more than it found"
