"""Stored episodes, their summary, and the report in its three forms."""

from __future__ import annotations

import html.parser
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from foray.evaluation.recipe import differences
from foray.evaluation.report import EvalResult, document_of, to_json
from foray.evaluation.statistics import interval, paired_test
from foray.evaluation.store import EPISODES, RECIPE, ResultStore, key_of, open_store, read_recipe, read_rows
from foray.evaluation.summary import compare, summarise
from foray.watch.page import Report, ReportTable, Section, to_html, to_markdown, to_text
from protocol.errors import UserError
from tests.support.eval_rows import make_recipe, make_row

# Store


def test_a_file_that_is_cut_anywhere_keeps_every_whole_line(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, make_recipe())
    rows = [make_row(n, right=bool(n % 2), text="ü\u2028?") for n in range(4)]
    for row in rows:
        store.add(row)
    store.close()
    whole = (tmp_path / EPISODES).read_bytes()
    ends = [place for place, byte in enumerate(whole, 1) if byte == 10]
    for size in [0, 1, *ends, *(end - 1 for end in ends), *(end + 9 for end in ends[:-1]), len(whole) // 2]:
        (tmp_path / EPISODES).write_bytes(whole[:size])
        # a line that lacks its line break alone is complete
        complete = sum(end - 1 <= size for end in ends)
        assert read_rows(tmp_path) == rows[:complete], size


def test_an_episode_that_is_stored_twice_counts_once_and_the_later_one_counts(tmp_path: Path) -> None:
    with_first = open_store(tmp_path, make_recipe(), resume=False)
    with_first.add(make_row(1, right=False))
    with_first.add(make_row(1, right=False, index=1))
    with_first.add(make_row(1, right=True))
    with_first.close()
    assert [(r["index"], r["metrics"]["em"]) for r in read_rows(tmp_path)] == [(0, 1.0), (1, 0.0)]
    again = open_store(tmp_path, make_recipe(), resume=True)
    assert len(again.rows) == 2 == len((tmp_path / EPISODES).read_text().splitlines()), "it is compacted"
    again.close()


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, make_recipe(), [make_row(1, right=True), make_row(2, right=True)])
    store.close()
    text = (tmp_path / EPISODES).read_text()
    (tmp_path / EPISODES).write_text("{]\n" + text)
    with pytest.raises(UserError, match="line 1 of"):
        read_rows(tmp_path)


def test_threads_add_whole_lines_and_a_closed_store_adds_nothing(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, make_recipe())
    threads = [
        threading.Thread(target=lambda part=part: [store.add(make_row(n, right=True)) for n in range(part, 200, 4)])
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    store.add(make_row(999, right=True))
    assert {key_of(r)[2] for r in read_rows(tmp_path)} == {f"q{n}" for n in range(200)} and len(store.rows) == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampler": {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}}, r"sampler.temperature: 0.0 and 1.0"),
        ({"data": {"nq": {"questions": 5, "fingerprint": "e"}}}, "data.nq.questions: 4 and 5"),
        ({"data": {}}, "data: nq and "),
        (
            {"methods": {"policy": {"template": {"name": "search_r1", "sha256": "t"}}}},
            "methods: policy, rag and policy",
        ),
        ({"subject": {"kind": "model", "where": "m", "model": "other"}}, "model: abc and other"),
        ({"retriever": None}, "retriever.fingerprint: f and unknown"),
    ],
)
def test_results_of_other_conditions_are_not_continued(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    ResultStore(tmp_path, make_recipe(), [make_row(1, right=True)]).close()
    before = (tmp_path / RECIPE).read_bytes()
    with pytest.raises(UserError) as refused:
        open_store(tmp_path, make_recipe(**change), resume=True)
    assert said in refused.value.why and (tmp_path / RECIPE).read_bytes() == before


def test_results_are_not_overwritten_and_those_of_another_policy_not_mixed_in(tmp_path: Path) -> None:
    store = open_store(tmp_path, make_recipe(), resume=False)
    store.add(make_row(1, right=True, run="r", model="m"))
    with pytest.raises(UserError, match="another policy: model was m, now n"):
        store.add(make_row(2, right=True, run="r", model="n"))
    store.add(make_row(2, right=True, method="rag"))  # a method names no run
    store.close()
    with pytest.raises(UserError, match="already holds results"):
        open_store(tmp_path, make_recipe(), resume=False)
    reopened = open_store(tmp_path, make_recipe(), resume=True)
    with pytest.raises(UserError, match="another policy"):
        reopened.add(make_row(3, right=True, run="other", model="m"))
    reopened.close()
    assert len(read_rows(tmp_path)) == 2


def test_a_directory_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no results"):
        read_recipe(tmp_path)
    (tmp_path / RECIPE).write_text('{"format": 99}')
    with pytest.raises(UserError, match="format 99"):
        read_recipe(tmp_path)


# Summary


def test_means_are_over_questions_and_leave_out_what_says_nothing_of_the_policy() -> None:
    rows = [
        make_row(1, right=True),
        make_row(1, right=False, index=1),
        make_row(2, right=True),
        make_row(3, right=False, status="failed", cause="no_engine"),
        make_row(4, right=False, status="failed", cause="prompt_too_long"),
    ]
    summary = summarise(rows)
    (cell,) = summary.cells
    assert cell.metrics["em"] == interval({"nq": [0.5, 1.0]}), "two episodes of one question are one value"
    assert (cell.episodes, cell.failed, cell.too_long, summary.failed) == (5, 1, 1, 1)
    assert cell.failures == {"no_evidence": 1} and cell.costs["tokens_read"] == 100
    assert summary.versions == {"1.0": 3} and not summary.mixed and not summary.averages


def test_the_mean_over_data_sets_weighs_each_the_same() -> None:
    rows = [make_row(n, right=True, data_set="a") for n in range(9)] + [make_row(1, right=False, data_set="b")]
    assert summarise(rows).averages["policy"]["em"].mean == 0.5


@pytest.mark.parametrize(("failed", "label"), [((), "2 data sets"), (("hotpotqa",), "1 data set")])
def test_a_mean_counts_the_data_sets_that_have_a_value(failed: tuple[str, ...], label: str) -> None:
    rows = [
        make_row(1, right=True, data_set=name, **({"status": "failed"} if name in failed else {}))
        for name in ("nq", "hotpotqa")
    ]
    report = document_of(EvalResult("r", make_recipe(), rows), summarise(rows))
    assert f"policy, mean of {label} " in to_text(report)


def test_several_versions_are_called_a_mixture() -> None:
    assert summarise([make_row(1, right=True), make_row(2, right=True, version="1.1")]).mixed
    assert summarise([make_row(1, right=True, version="1.0+1.1")]).mixed


def test_methods_are_compared_with_the_policy_on_the_questions_of_both() -> None:
    right = [True, True, True, False, True]
    rows = [make_row(n, right=r) for n, r in enumerate(right)]
    rows += [make_row(n, right=n == 3, method="rag") for n in range(4)]
    rows.append(make_row(4, right=False, method="rag", status="failed", cause="x"))
    (found,) = summarise(rows).comparisons
    expected = paired_test({"nq": [0.0, 0.0, 0.0, 1.0]}, {"nq": [1.0, 1.0, 1.0, 0.0]})
    assert (found.first, found.second, found.metric, found.data_set) == ("rag", "policy", "em", "nq")
    assert found.test == expected and found.test.n == 4


def test_questions_whose_text_changed_are_not_paired_and_yes_or_no_is_the_metric_where_it_is() -> None:
    first = [make_row(1, right=True, golds=("yes",)), make_row(2, right=True, golds=("no",), text="old?")]
    second = [make_row(1, right=False, golds=("yes",), answer="Yes, it is"), make_row(2, right=True, golds=("no",))]
    (found,) = compare(first, second, "policy", "policy")
    assert found.metric == "yes_no" and found.test.n == 1 and found.test.difference == 0.0
    assert compare(first, [make_row(1, right=True, data_set="other")], "policy", "policy") == []


def test_several_data_sets_are_compared_each_and_together() -> None:
    rows = [make_row(n, right=True, data_set=name) for name in "ab" for n in range(3)]
    worse = [make_row(n, right=name == "a", data_set=name) for name in "ab" for n in range(3)]
    found = compare(rows, worse, "policy", "policy")
    assert [(c.data_set, c.test.difference) for c in found] == [("a", 0.0), ("b", -1.0), ("", -0.5)]


# Protocol


def test_differences_name_each_value_and_compare_only_what_both_have() -> None:
    other = make_recipe(
        methods={"policy": {"template": {"name": "search_r1", "sha256": "u"}}, "cot": {}},
        data={"nq": {"questions": 4, "fingerprint": "d"}, "popqa": {"questions": 1, "fingerprint": "x"}},
        subject={"kind": "endpoint"},
        limits=None,
    )
    assert differences(make_recipe(), make_recipe(subject={})) == []
    assert differences(make_recipe(), other) == [
        "limits.max_turns: 4 and unknown",
        "methods.policy.template.sha256: t and u",
    ]


# Report

HOSTILE = '<script>alert(1)</script>| `x` \x1b[2J "&\u202e'


def hostile_document() -> Report:
    rows = [
        make_row(n, right=n > 1, text=HOSTILE, golds=(HOSTILE,), segments=[{"owner": '"><b>', "text": HOSTILE}])
        for n in range(4)
    ]
    rows += [make_row(n, right=False, method="rag", text=HOSTILE, golds=(HOSTILE,)) for n in range(4)]
    recipe = make_recipe(subject={"where": HOSTILE})
    other = EvalResult(HOSTILE, make_recipe(search=False), rows)
    return document_of(EvalResult(HOSTILE, recipe, rows), summarise(rows), [other])


class Balance(html.parser.HTMLParser):
    """Collects tags and references, and checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_no_script_loads_nothing_and_escapes_every_text() -> None:
    text = to_html(hostile_document())
    page = Balance()
    page.feed(text)
    page.close()
    assert not page.open and not page.references and "script" not in page.seen and "b" in page.seen
    assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text and "\u202e" not in text
    assert not re.search(r"https?://|url\(|@import", text)
    assert {"table", "details", "h2"} <= page.seen


def test_markdown_and_terminal_escape_what_they_would_interpret() -> None:
    document = hostile_document()
    markdown, terminal = to_markdown(document), to_text(document)
    assert "<script" not in markdown and "\x1b" not in markdown + terminal and "\u202e" not in markdown + terminal
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in tables[:3]}
    assert len(widths) == 1, "a pipe in a text is no column"


def test_the_report_shows_scores_tests_failures_published_rows_and_warnings() -> None:
    rows = [make_row(n, right=n > 1) for n in range(4)] + [make_row(n, right=False, method="rag") for n in range(4)]
    rows.append(make_row(9, right=False, status="failed", cause="no_engine"))
    other = EvalResult("before", make_recipe(search=False), [make_row(n, right=False) for n in range(4)])
    text = to_text(document_of(EvalResult("after", make_recipe(), rows), summarise(rows), [other]))
    for part in (
        "1 episodes failed and are left out",
        "rag -> policy",
        "Compared with before",
        "different conditions: search: False and True",
        "before: policy -> after: policy",
        "no evidence",
        "Search-R1 Qwen2.5-7B base, PPO",
        "this result: policy",
        "arXiv:2503.09516",
    ):
        assert part in text, part
    assert re.search(r"policy, nq +4 +0\.500 \[0\.000, 1\.000\]", text)


def test_examples_are_of_every_method_and_not_of_failed_episodes() -> None:
    methods = ("policy", "direct", "cot", "rag", "iter_retgen", "ircot", "flare")
    rows = [make_row(n, right=False, method=method, text=f"{method} {n}?") for method in methods for n in range(6)]
    rows.insert(0, make_row(9, right=False, text="broken?", status="failed", cause="stalled"))
    page = to_html(document_of(EvalResult("r", make_recipe(), rows), summarise(rows)))
    shown = re.findall(r"<summary>(.*?)</summary>", page)
    assert shown == [f"{method}: {method} 0?" for method in methods]
    few = [row for row in rows if row["method"] in ("rag", "flare")]
    shown = re.findall(
        r"<summary>(.*?)</summary>", to_html(document_of(EvalResult("r", make_recipe(), few), summarise(few)))
    )
    assert shown == ["rag: rag 0?", "flare: flare 0?", "rag: rag 1?", "flare: flare 1?", "rag: rag 2?"]


def test_a_search_of_a_method_is_shown_once_and_a_score_of_some_questions_says_of_how_many() -> None:
    segments = [
        {"owner": "environment", "text": "A\nlong text", "query": "who?", "passage_ids": ["1"], "titles": ["A", "B"]},
        {"owner": "prompt", "text": "Doc 1(Title: A) long text"},
    ]
    rows = [make_row(1, right=False, golds=("yes",), segments=segments), make_row(2, right=False)]
    document = document_of(EvalResult("r", make_recipe(), rows), summarise(rows))
    assert re.search(r"policy, nq +2 .* 0\.000 \[0\.000, 0\.793\] of 1$", to_text(document), re.MULTILINE)
    page = to_html(document)
    assert "search: who?\nfound: A; B<" in page and page.count("long text") == 1


def test_the_numbers_are_json_without_nan() -> None:
    rows = [make_row(1, right=True, status="failed", cause="x"), make_row(2, right=True, method="rag")]
    numbers = to_json(EvalResult("n", make_recipe(), rows), summarise(rows))
    text = json.dumps(numbers, allow_nan=False)
    assert json.loads(text)["scores"][0]["failed"] == 1


def test_a_document_without_tables_is_rendered() -> None:
    document = Report("t", (Section("s", ("p",)), Section("e", table=ReportTable(("a",), ()))))
    assert (
        "<h1>t</h1>" in to_html(document) and to_markdown(document).startswith("# t\n") and "  p" in to_text(document)
    )
