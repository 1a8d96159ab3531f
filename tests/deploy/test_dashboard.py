"""The dashboard's data: the index follows the journal, filters select what they say, pages show what was trained."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foray.dashboard import index as index_module
from foray.dashboard.conversation import GroupView
from foray.dashboard.files import MOST_POINTS, StepFile, read_evaluations
from foray.dashboard.filters import ORDERS, page_sql, parse_filter, read_ages, read_facets, read_page
from foray.dashboard.index import TrajectoryIndex
from foray.dashboard.source import RunData
from learner.checkpoint.journal import data_files, index_of, locations
from learner.data.token_values import FOLDER, TokenValues, TrajectorySource
from protocol.errors import UserError
from protocol.run_meta import LINEAGE_FILE
from protocol.versions import PolicyVersion
from tests.support.dashboard_run import (
    EVIL,
    WORDS,
    group,
    located,
    read_all,
    write_journal,
    write_large_run,
    write_run,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def data(run_dir: Path) -> RunData:
    return read_all(RunData(located(run_dir)))


def seqs(data: RunData, **query: str) -> list[int]:
    return [row["seq"] for row in data.page(query)["rows"]]


def test_the_index_follows_the_journal(run_dir: Path, data: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data.index.progress == {"groups": 12, "trajectories": 24, "journal": 12}
    read: list[int] = []
    decode = index_module._decoded
    monkeypatch.setattr(index_module, "_decoded", lambda new: read.extend(p.seq for p in new) or decode(new))
    assert not data.index.update() and not read, "nothing is read again"
    write_journal(run_dir, [(5, group(13, 5))])
    read_all(data)
    assert read == [13] and seqs(data)[:3] == [13, 13, 12]
    again = RunData(located(run_dir))
    assert not again.index.update() and again.index.progress["groups"] == 13, "the file is kept"


def test_the_page_has_the_error_that_the_launcher_printed(run_dir: Path) -> None:
    record = json.loads((run_dir / "run.json").read_text())
    failure = "error: learner exited with code 2\n  | error: no model\n  log: learner.log"
    (run_dir / "run.json").write_text(json.dumps(record | {"state": "failed", "failure": failure}))
    page = RunData(located(run_dir)).overview()
    assert page["failure"] == failure and page["state"] == "failed" and page["is_over"]


def test_a_chunk_ends_in_the_middle_of_a_file(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CHUNK", 5)
    index = TrajectoryIndex(run_dir)
    assert [index.update() for _ in range(4)] == [True, True, True, False]
    assert index.progress == {"groups": 12, "trajectories": 24, "journal": 12}


def test_files_that_the_journal_drops_leave_the_index(run_dir: Path, data: RunData) -> None:
    write_journal(run_dir, [(5, group(13, 5))])
    read_all(data)
    oldest = data_files(run_dir / "journal")[0]
    index_of(oldest).unlink()
    oldest.unlink()
    read_all(data)
    assert seqs(data) == [13, 13] and data.page({"text": "emma"})["total"] == 2
    with pytest.raises(UserError, match="no trained group of seq 3"):
        data.group(3)


def test_another_journal_in_its_place_is_read_from_its_start(run_dir: Path, data: RunData) -> None:
    for path in (run_dir / "journal").iterdir():
        path.unlink()
    write_journal(run_dir, [(1, group(seq, 1)) for seq in range(21, 24)])
    read_all(data)
    assert set(seqs(data)) == {21, 22, 23}
    assert sum(row[1] for row in data.ages()["groups"]) == 3


def test_a_damaged_group_is_left_out(run_dir: Path) -> None:
    path = data_files(run_dir / "journal")[0]
    raw, frame = bytearray(path.read_bytes()), locations(path)[5]
    raw[(frame.offset + frame.end) // 2] ^= 255
    path.write_bytes(raw)
    data = read_all(RunData(located(run_dir)))
    assert data.index.progress["trajectories"] == 22 and data.index.progress["groups"] == 12


@pytest.mark.parametrize("content", [b"no database at all" * 100, b""])
def test_a_damaged_index_is_made_again(run_dir: Path, data: RunData, content: bytes) -> None:
    data.index.path.write_bytes(content)
    assert read_all(RunData(located(run_dir))).index.progress["trajectories"] == 24


def test_an_index_of_another_version_is_made_again(run_dir: Path, data: RunData) -> None:
    with sqlite3.connect(data.index.path) as db:
        db.execute("PRAGMA user_version = 99")
        db.execute("DELETE FROM trajectories")
    db.close()
    assert read_all(RunData(located(run_dir))).index.progress["trajectories"] == 24


def test_a_run_directory_that_is_read_only_is_indexed_elsewhere(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(index_module.os, "access", lambda path, mode: mode != os.W_OK)
    index = TrajectoryIndex(run_dir)
    assert not index.path.is_relative_to(run_dir) and index.path.parent.stat().st_mode & 0o777 == 0o700
    while index.update():
        pass
    assert index.progress["trajectories"] == 24 and not (run_dir / index_module.FILE).exists()


FILTERS: list[tuple[dict[str, str], Any]] = [
    ({}, lambda g, t: True),
    ({"status": "answered"}, lambda g, t: True),
    ({"status": "failed"}, lambda g, t: False),
    ({"source": "hotpot"}, lambda g, t: g.question.source == "hotpot"),
    ({"reward_min": "0.5"}, lambda g, t: t.reward >= 0.5),
    ({"reward_max": "0.5", "source": "nq"}, lambda g, t: t.reward <= 0.5 and g.question.source == "nq"),
    ({"step_min": "2", "step_max": "3"}, lambda g, t: 4 <= g.seq <= 9),
    ({"version": "1.2"}, lambda g, t: t.first_version() <= PolicyVersion(1, 2) <= t.last_version()),
    ({"signal": "none"}, lambda g, t: len({x.reward for x in g.trajectories}) == 1),
    ({"signal": "some"}, lambda g, t: len({x.reward for x in g.trajectories}) > 1),
    ({"seq": "5"}, lambda g, t: g.seq == 5),
    ({"text": "EMMA wro"}, lambda g, t: True),
    ({"text": "tolstoy"}, lambda g, t: False),
    ({"text": '"; DROP TABLE words; -- NEAR( OR *'}, lambda g, t: False),
    ({"text": "---"}, lambda g, t: False),
]


@pytest.mark.parametrize(("query", "chosen"), FILTERS, ids=[str(query) for query, _ in FILTERS])
def test_a_filter_selects_what_it_says(data: RunData, query: dict[str, str], chosen: Any) -> None:
    groups = [data.group(seq).group for seq in range(1, 13)]
    wanted = sorted((g.seq, i) for g in groups for i, t in enumerate(g.trajectories) if chosen(g, t))
    page = data.page({**query, "limit": "100"})
    assert sorted((row["seq"], row["place"]) for row in page["rows"]) == wanted and page["total"] == len(wanted)


def test_words_of_answer_and_queries_are_found_without_accents(run_dir: Path) -> None:
    write_journal(run_dir, [(5, group(13, 5, answer="brontë", text="of whom?"))])
    data = read_all(RunData(located(run_dir)))
    assert set(seqs(data, text="bronte")) == {13} and 13 in seqs(data, text="emma"), "the query is emma"


@pytest.mark.parametrize(
    "query",
    [
        {"status": "nonsense"}, {"reward_min": "much"}, {"reward_min": "nan"}, {"version": "twelve"},
        {"order": "id; DROP TABLE words"}, {"limit": "x"}, {"colour": "red"}, {"signal": "x"}, {"step_max": "1e300"},
    ],
)  # fmt: skip
def test_an_invalid_filter_is_refused_with_words(query: dict[str, str]) -> None:
    with pytest.raises(UserError):
        parse_filter(query)


def test_pages_join_without_a_gap(data: RunData) -> None:
    for order in ORDERS:
        whole = [(r["seq"], r["place"]) for r in data.page({"order": order})["rows"]]
        parts = [data.page({"order": order, "limit": "7", "offset": str(n)})["rows"] for n in range(0, 24, 7)]
        assert [(r["seq"], r["place"]) for r in itertools.chain(*parts)] == whole and len(set(whole)) == 24


@pytest.mark.parametrize("order", ORDERS)
def test_a_page_is_read_along_an_index(data: RunData, order: str) -> None:
    """The work of a page does not grow with the number of trajectories: nothing but the page itself is sorted."""
    with data.index.reading() as db:
        sql, values = page_sql(parse_filter({"order": order}))
        plan = [row["detail"] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        inner = plan[: next(i for i, line in enumerate(plan) if line.startswith("SCAN page"))]
    assert any("trajectories" in line for line in inner)
    assert not any("TEMP B-TREE" in line for line in inner), plan


def test_steps_that_a_crash_rolled_back_are_marked(run_dir: Path) -> None:
    manifest = run_dir / "checkpoints" / "step_2" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    (run_dir / "checkpoints" / "CURRENT").write_text("step_2")
    ledger = {"watermark": 0, "above": [], "counts": {}}
    from protocol.ledger import Ledger

    ledger = Ledger().to_state()
    manifest.write_text(json.dumps({"step": 2, "epoch": 2, "ledger": ledger, "lineage": [[1, 0], [2, 2]]}))
    write_journal(run_dir, [(3, group(7, 3, epoch=2))], epoch=2)
    data = read_all(RunData(located(run_dir)))
    marked = {(row["seq"], row["epoch"]): row["rolled_back"] for row in data.page({"limit": "100"})["rows"]}
    assert not marked[6, 1] and marked[7, 1] and not marked[7, 2]
    assert data.group(7).epoch == 2 and data.group(7, 1).epoch == 1, "the last time that it was trained, or as asked"


def test_a_group_shows_who_wrote_what(data: RunData) -> None:
    shown = data.group_page(7, None)
    first = shown["trajectories"][0]
    owners = [(s["owner"], [p["kind"] for p in s["parts"]]) for s in first["segments"]]
    assert owners == [
        ("prompt", ["prompt"]),
        ("policy", ["think", "search"]),
        ("environment", ["information"]),
        ("policy", ["answer"]),
    ]
    passages = first["segments"][2]["parts"][0]["passages"]
    assert [(p["id"], p["title"]) for p in passages] == [("p1", "Jane"), ("p<2>", "Emily")]
    assert EVIL in passages[0]["text"], "texts are passed on as they are"
    assert first["reward_minus_mean"] == 0.5 and first["segments"][3]["parts"][0]["text"].strip() == "austen"
    # step 3 trains version 2; max_lag is 0, so the tokens of version 1 are masked
    assert first["segments"][1]["not_trained"] == {"older than max_lag": 3} and not first["segments"][3]["not_trained"]
    assert [item["what"] for item in shown["life"]] == [
        "issued",
        "leased",
        "generated",
        "searched",
        "rewarded",
        "trained",
    ]
    assert "engine-1" in shown["life"][2]["text"] and "versions 1.1, 1.2" in shown["life"][2]["text"]
    assert [one["seq"] for one in shown["asked"]] == [1, 4, 7, 10], "the question's other times"
    assert (shown["previous"], shown["next"]) == (6, 8)


def test_tokens_have_ids_texts_log_probs_and_versions(data: RunData) -> None:
    segments = data.group(7).tokens(0)
    turn = segments[1]
    assert turn["texts"] == ["<think>", "maybe", "</think>", "<search>", "emma", "</search>"]
    assert turn["ids"][0] == WORDS.index("<think>") and turn["logprobs"] == [-0.25] * 6
    assert [(s["start"], s["end"], s["version"], s["lag"], s["not_trained"]) for s in turn["spans"]] == [
        (0, 3, "1.1", 1, "older than max_lag"),
        (3, 6, "1.2", 0, ""),
    ]
    assert segments[0]["logprobs"] == [] and segments[2]["spans"] == []


def test_tokens_have_what_the_learner_computed_if_it_was_kept(run_dir: Path, data: RunData) -> None:
    view = data.group(7)
    assert [segment["learner"] for segment in data.tokens(view, 0)["segments"]] == [{}] * 4, "it was not kept"
    values, first = TokenValues(), len(view.group.trajectories[0].segments[0].ids)
    columns = {"logprob": [-0.5, -0.125], "advantage": [1.5, 1.5]}
    arrays = {name: np.array(column, np.float32) for name, column in columns.items()}
    values.add(trajectory=np.array([0, 0]), position=np.array([first + 4, first + 3]), **arrays)
    values.write(run_dir / FOLDER, TrajectorySource(view.step, np.array([7]), np.array([0])), rank=0, keep=1)
    found = data.tokens(data.group(7), 0)["segments"]
    assert found[1]["learner"] == {
        "logprob": [None, None, None, -0.125, -0.5, None],
        "advantage": [None, None, None, 1.5, 1.5, None],
    }
    assert found[0]["learner"] == {} == found[2]["learner"], "the policy did not write them"
    assert set(found[3]["learner"]["logprob"]) == {None}
    assert data.tokens(data.group(7), 1)["segments"][1]["learner"]["logprob"][0] is None, "another trajectory"


def test_a_run_without_its_tokenizer_shows_ids(run_dir: Path) -> None:
    (run_dir / "model" / "tokenizer.json").unlink()
    data = read_all(RunData(located(run_dir)))
    first = data.group_page(7, None)["trajectories"][0]
    assert (
        not first["decoded"] and first["segments"][0]["text"] == "1 2 3 4" and data.group(7).tokens(0)[0]["texts"] == []
    )


def test_what_the_policy_writes_is_never_shown_as_the_environments(data: RunData) -> None:
    """A policy may write the environment's tags; its text stays text of the policy."""
    from tests.support.dashboard_run import policy, trajectory

    given = trajectory(0.0, (1, 0))
    forged = given.model_copy(update={"segments": (policy("<information> austen </information> maybe", (1, 0)),)})
    one = group(1, 1).model_copy(update={"trajectories": (forged,)})
    parts = GroupView(one, 1, 1, data.tokenizer).trajectory(0)["segments"][0]["parts"]
    assert [part["kind"] for part in parts] == ["text", "text"]


def test_lag_is_counted_by_token_and_group(data: RunData) -> None:
    with data.index.reading() as db:
        ages, facets = read_ages(db), read_facets(db)
    groups = [data.group(seq).group for seq in range(1, 13)]
    assert sum(row[1] for row in ages["tokens"]) == sum(t.num_sampled for g in groups for t in g.trajectories)
    # in step 1 there is no earlier version
    assert dict(map(tuple, ages["groups"])) == {0: 3, 1: 9}
    assert sum(row[2] for row in ages["steps"]) == sum(row[1] for row in ages["tokens"])
    assert facets == {
        "status": {"answered": 24},
        "source": {"nq": 18, "hotpot": 6},
        "step": [1, 4],
        "reward": [0.0, 1.0],
    }


def test_steps_are_read_as_they_come_and_replaced_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = StepFile(path)
    steps.update()
    assert steps.last == {} and steps.curves(["loss"])["step"] == []

    def add(*records: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        steps.update()

    add({"step": 1, "epoch": 1, "loss": 1.0, "seconds": {"wait": 2.0}}, {"step": 2, "epoch": 1, "loss": float("nan")})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    steps.update()
    assert steps.last["step"] == 2 and steps.curves(["loss", "seconds/wait"])["columns"] == {
        "loss": [1.0, None], "seconds/wait": [2.0, None],
    }  # fmt: skip
    with path.open("a") as file:
        file.write("\n")
    add({"step": 3, "epoch": 1, "loss": 3.0}, {"step": 2, "epoch": 2, "loss": 5.0})
    assert steps.curves(["loss"])["step"] == [1, 2] and steps.curves(["loss"])["columns"]["loss"] == [1.0, 5.0]
    add(*({"step": n, "loss": float(n)} for n in range(3, 2 * MOST_POINTS + 100)))
    curves = steps.curves(["loss"])
    assert len(curves["step"]) <= MOST_POINTS and curves["width"] == 3 and curves["step"][-1] == 2 * MOST_POINTS + 99
    path.write_text('{"step": 1, "loss": 9.0}\n')
    steps.update()
    assert steps.curves(["loss"]) == {"step": [1], "columns": {"loss": [9.0]}, "width": 1}, "another run's file"


def test_evaluations_of_this_run_are_found(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = "a" * 32, "b" * 32
    (run_dir / LINEAGE_FILE).write_text(mine)
    where = {"mine": run_dir.name, "elsewhere": "moved/away", "copy": run_dir.name, "longer": run_dir.name + "b/model"}
    lineages = {"elsewhere": mine, "copy": theirs}
    for name, place in (where | {"other": "step_5", "url": "http://127.0.0.1:1"}).items():
        folder = run_dir.parent / "evaluations" / name
        folder.mkdir(parents=True)
        (folder / "protocol.json").write_text(
            json.dumps({"subject": {"kind": "run", "where": place, "lineage_id": lineages.get(name, "")}})
        )
        (folder / "result.json").write_text(json.dumps({"scores": []}))
    monkeypatch.chdir(run_dir)
    assert sorted(one["name"] for one in read_evaluations(run_dir)) == ["elsewhere", "mine"]


@pytest.mark.slow
def test_with_100_000_trajectories_a_page_and_each_filter_take_less_than_a_second(tmp_path: Path) -> None:
    data = read_all(RunData(located(write_large_run(tmp_path / "run"))))
    assert data.index.progress["trajectories"] >= 100_000
    queries = [{}, *(query for query, _ in FILTERS), *({"order": order} for order in ORDERS), {"offset": "99000"}]
    for query in [*queries, {"text": "who wrote", "order": "best"}, {"text": "12345", "status": "answered"}]:
        began = time.monotonic()
        with data.index.reading() as db:
            page = read_page(db, parse_filter(query), ())
        assert time.monotonic() - began < 1.0, query
        assert page["total"] >= len(page["rows"])
    began = time.monotonic()
    assert data.facets()["status"]["answered"] >= 100_000 and data.ages()["tokens"]
    assert time.monotonic() - began < 1.0
    assert seqs(data, text="12345") == [12345] * 8
