"""Every command of `foray data` says where each row went: rows read = rows written + rows named, for any file."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foray.cli import main
from learner.data.questions import load_questions
from protocol.runtime.records import RowCount
from tests.support.format_samples import SEARCH_R1

FEW, MANY = 25, int(os.environ.get("FORAY_EXAMPLES", "500"))
WORD = st.sampled_from(["ada", "emma", "7 + 3", "7 - 3", "C#", "c++", '"Heroes', 'of "x"'])
VALID = st.fixed_dictionaries(
    {"question": st.lists(WORD, min_size=1, max_size=3).map(" ".join), "answers": st.lists(WORD, min_size=1)},
    optional={"id": st.sampled_from(["1", "2"]), "supporting_ids": st.sampled_from([["p1"], ["p1", "Emma"], ["?"]])},
)
INVALID = st.sampled_from(["{", "[1]", '{"question": "who ?"}', '{"question": "who ?", "answers": [" "]}', "3", '"x"'])
LINES = st.lists(st.one_of(VALID.map(json.dumps), INVALID), max_size=12).map(
    lambda lines: ['{"question": "first", "answers": ["x"]}', *lines]
)
"""Lines of a file. The first line decides whether it is one array, and its format."""


def is_valid(line: str) -> bool:
    record = json.loads(line) if line.startswith('{"') else {}
    return any(answer.strip() for answer in record.get("answers", ()))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(*argv: object) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["data", *map(str, argv)])
    return code, out.getvalue()


def account(said: str) -> tuple[int, Counter[str]]:
    """Return the rows read, and where they went."""
    line = next(line for line in said.splitlines() if re.match(r"\d+ rows read: ", line))
    parts = re.findall(r"(?:: |, )(\d+) (written|not drawn|in no part|removed|left out|dropped)", line)
    where: Counter[str] = Counter()
    for count, name in parts:
        where[name] += int(count)
    return int(line.partition(" ")[0]), where


def check_rows(lines: list[str], other: list[str], share: float, seed: int) -> None:
    """Check the arithmetic of all commands on two files of these lines."""
    valid, both = sum(map(is_valid, lines)), sum(map(is_valid, lines + other))
    with TemporaryDirectory() as name:
        root = Path(name)
        a, b, out = root / "a.jsonl", root / "b.jsonl", root / "out.jsonl"
        a.write_text("\n".join(lines), encoding="utf-8")
        b.write_text("\n".join(other), encoding="utf-8")
        rows = max(1, int(share * valid))
        for argv, read, count in (
            (("convert", a, out), len(lines), valid),
            (("sample", a, "--rows", rows, "--out", out), len(lines), rows),
            (("merge", a, b, "--out", out), len(lines + other), both),
            (("merge", a, b, "--weights", f"1,{1 + share}", "--out", out), len(lines + other), None),
            (("dedupe", a, "--against", b, "--out", out), len(lines), None),
        ):
            seeded = ("--seed", seed) if argv[0] in ("sample", "merge") else ()
            code, said = run(*argv, *seeded, "--skip-invalid")
            assert code == 0, said
            found = written(out)
            total, where = account(said)
            assert total == read == where.total(), said
            assert where["written"] == len(found) and (count is None or len(found) == count)
            assert where["dropped"] == read - (both if argv[0] == "merge" else valid)
            made_up = [row["id"] for row in found if "line-" in row["id"]]
            assert len(set(made_up)) == len(made_up)
        _check_split(a, root, len(lines), valid, share)


def _check_split(path: Path, root: Path, read: int, valid: int, share: float) -> None:
    code, said = run("split", path, f"x={share}", f"y={1 - share!r}", "--out", root, "--skip-invalid")
    if code == 2:
        assert "do not fit" in said, "a part would be empty"
        return
    total, where = account(said)
    parts = written(root / "x.jsonl") + written(root / "y.jsonl")
    assert (total, where["written"], where["dropped"]) == (read, valid, read - valid) and len(parts) == valid


SHARES = st.sampled_from([0.5, 0.9, 0.1, 0.25, 0.3])


@settings(max_examples=FEW)
@given(LINES, LINES, SHARES, st.integers(0, 9))
def test_rows_are_conserved(lines: list[str], other: list[str], share: float, seed: int) -> None:
    check_rows(lines, other, share, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=MANY, suppress_health_check=list(HealthCheck))
@given(LINES, LINES, SHARES, st.integers(0, 9))
def test_rows_are_conserved_in_many_files(lines: list[str], other: list[str], share: float, seed: int) -> None:
    check_rows(lines, other, share, seed)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose index is built."""
    folder = tmp_path_factory.mktemp("indexed")
    corpus, index = folder / "corpus.jsonl", folder / "index"
    passages = {"p1": '"Ada"\nada wrote emma', "p2": '"Emma"\nC# and c++ of x'}
    corpus.write_text("".join(f'{{"id": "{n}", "contents": {json.dumps(text)}}}\n' for n, text in passages.items()))
    assert main(["index", "build", "--corpus", str(corpus), "--out", str(index), "--index", "bm25"]) == 0
    (folder / "run.yaml").write_text(json.dumps({"retriever": {"corpus": str(corpus), "index_dir": str(index)}}))
    return folder / "run.yaml"


def check_demonstrations(config: Path, lines: list[str], limit: int) -> None:
    """Check that each valid row becomes a demonstration or is counted with the reason."""
    with TemporaryDirectory() as name:
        path, out = Path(name, "q.jsonl"), Path(name, "out.jsonl")
        path.write_text("\n".join(lines), encoding="utf-8")
        argv = ("demonstrate", path, "--config", config, "--limit", limit, "--out", out, "--skip-invalid")
        code, said = run(*argv)
        assert code == 0, said
        (total, where), valid = account(said), sum(map(is_valid, lines))
        assert total == len(lines) == where.total(), said
        assert where["written"] == len(written(out)) and where["dropped"] == len(lines) - valid
        named = sum(int(count) for count in re.findall(r"left out: (\d+) questions, \w", said))
        assert where["written"] + named == min(limit, valid), said
        assert where["left out"] == named + max(0, valid - limit)


@settings(max_examples=FEW)
@given(lines=LINES, limit=st.integers(1, 9))
def test_questions_are_demonstrated_or_named(indexed: Path, lines: list[str], limit: int) -> None:
    check_demonstrations(indexed, lines, limit)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=MANY, suppress_health_check=list(HealthCheck))
@given(lines=LINES, limit=st.integers(1, 9))
def test_questions_are_demonstrated_or_named_in_many_files(indexed: Path, lines: list[str], limit: int) -> None:
    check_demonstrations(indexed, lines, limit)


PASSAGE = st.fixed_dictionaries({"text": st.sampled_from(["", "a", "b"])}, optional={"id": st.sampled_from(["", "1"])})
BROKEN = st.sampled_from(["{", '{"title": "no text"}', '{"text": 3}'])


def check_passages(lines: list[str]) -> None:
    with TemporaryDirectory() as name:
        source, out = Path(name, "c.jsonl"), Path(name, "out.jsonl")
        source.write_text("\n".join(['{"id": "first", "text": "x"}', *lines]))
        code, said = run("convert", source, out, "--corpus", "--skip-invalid")
        total, where = account(said)
        assert code == 0 and total == len(lines) + 1 == where.total() and where["written"] == len(written(out))
        _, said = run("inspect", source, "--json", "--skip-invalid")
        (report,) = json.loads(said)
        assert report["rows"] + sum(report["dropped"].values()) == total


@settings(max_examples=FEW)
@given(st.lists(st.one_of(PASSAGE.map(json.dumps), BROKEN)))
def test_passages_are_conserved(lines: list[str]) -> None:
    check_passages(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=MANY, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(PASSAGE.map(json.dumps), BROKEN)))
def test_passages_are_conserved_in_many_files(lines: list[str]) -> None:
    check_passages(lines)


CELL = st.text('ab ",\n', min_size=1, max_size=6).filter(str.strip)


@settings(max_examples=100)
@given(st.lists(st.tuples(CELL, CELL), min_size=1), st.booleans(), st.booleans())
def test_a_table_of_the_csv_module_and_a_plain_one_read_back(
    rows: list[tuple[str, str]], tabs: bool, plain: bool
) -> None:
    if tabs:
        rows = [(a.replace("\n", " "), b.replace("\n", " ")) for a, b in rows]
    if plain and tabs:  # quotes around a whole field are those of the file format
        rows = [(f"{a}.", f"{b}.") for a, b in rows]
    table = io.StringIO(newline="")
    if plain and tabs:
        table.write("question\tanswers\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
    else:
        csv.writer(table, "excel-tab" if tabs else "excel").writerows([("question", "answers"), *rows])
    with TemporaryDirectory() as name:
        path = Path(name, "q.tsv" if tabs else "q.csv")
        path.write_text(table.getvalue(), encoding="utf-8", newline="")
        found = load_questions(path).questions
    assert [(question.text, question.answers) for question in found] == [(a, (b,)) for a, b in rows]


# Rows below are invented, with the fields of the published files: PopQA (TSV, a JSON list in a cell), FlashRAG (an
# empty list), TriviaQA (`Data`), SimpleQA (CSV), FRAMES (TSV), KILT (a list of paragraphs), a TSV of abstracts.
POPQA = 'id\tsubj\tprop\tquestion\tpossible_answers\n7\tAda\tjob\tWhat is it?\t"[""poet, lady"", ""wr\\u00e9ter""]"\n'
SIMPLEQA = "metadata,problem,answer\n\"{'topic': 'Art', 'urls': ['a']}\",Who did it?,\"Ada, B.\"\n"
FRAMES = "\tPrompt\tAnswer\treasoning_types\twiki_links\n0\tWho did it?\tAda\tTabular\t['https://example.org/wiki/A']\n"
TRIVIAQA = json.dumps(
    {"Data": [{"Answer": {"Aliases": ["Ada", "A."], "Value": "Ada"}, "Question": "Who?", "QuestionId": "tc_1"}]},
    indent=4,
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("popQA.tsv", POPQA, ("7", "What is it?", ["poet, lady", "wréter"], "popqa")),
        ("simple_qa_test_set.csv", SIMPLEQA, ("simple_qa_test_set-line-2", "Who did it?", ["Ada, B."], "simpleqa")),
        ("test.tsv", FRAMES, ("test-line-2", "Who did it?", ["Ada"], "frames")),
        ("web-dev.json", TRIVIAQA, ("tc_1", "Who?", ["Ada", "A."], "triviaqa")),
        ("own.csv", "question,answers\nWho?,\"['it''s', 'b']\"\n", ("own-line-2", "Who?", ["its", "b"], "own")),
    ],
)
def test_the_files_of_others_convert(tmp_path: Path, name: str, text: str, expected: tuple[Any, ...]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    if name == "own.csv":  # numpy's notation, which Python would read as one string
        code, said = run("convert", tmp_path / name, tmp_path / "out.jsonl")
        assert code == 2 and "no commas" in said
        return
    assert run("convert", tmp_path / name, tmp_path / "out.jsonl")[0] == 0
    (row,) = written(tmp_path / "out.jsonl")
    assert (row["id"], row["question"], row["answers"], row["source"]) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kilt.json", json.dumps({"_id": "1", "wikipedia_title": "Ada", "text": ["Ada\n", "She wrote.\n"]})),
        ("papers.tsv", "id\ttitle\tabstract\n1\tAda\tShe wrote.\n"),
    ],
)
def test_the_corpora_of_others_convert(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert run("convert", tmp_path / name, tmp_path / "out.jsonl", "--corpus")[0] == 0
    assert written(tmp_path / "out.jsonl")[0]["contents"] == '"Ada"\nShe wrote.'


def test_a_row_without_an_answer_is_refused_or_dropped_and_named(tmp_path: Path) -> None:
    path, out = tmp_path / "skr_training.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": str(n), "question": f"q {n} ?", "golden_answers": ["Ada"][: n % 3]} for n in range(1, 4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert run("inspect", path)[0] == run("sample", path, "--rows", 1, "--out", out)[0] == 2
    code, said = run("convert", path, out)
    assert code == 2 and "line 3 of " in said and "`golden_answers` is empty" in said and "--skip-invalid" in said
    assert not out.exists()
    code, said = run("convert", path, out, "--skip-invalid")
    assert code == 0 and "3 rows read: 2 written, 1 dropped: `golden_answers` is empty (first: line 3 of" in said
    path.write_text(json.dumps(rows[2]))
    code, said = run("convert", path, out, "--skip-invalid")
    assert code == 2 and "has no valid question" in said and "1 dropped" in said


def test_ids_of_rows_without_one_are_unique_over_shards_files_and_sources(tmp_path: Path) -> None:
    for folder, names in (("nq", ("train", "dev")), ("hub", ("train-00000-of-00002", "train-00001-of-00002"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.jsonl").write_text('{"question": "q ?", "answers": ["a"]}\n' * 2)
    record = {name: value for name, value in SEARCH_R1.items() if name != "extra_info"}
    pq.write_table(pa.Table.from_pylist([record] * 2), tmp_path / "train.parquet")
    files = [tmp_path / "nq" / "train.jsonl", tmp_path / "nq" / "dev.jsonl", tmp_path / "train.parquet"]
    found = [question.id for question in load_questions([*files, tmp_path / "hub" / "train"]).questions]
    assert len(set(found)) == len(found) == 10
    assert found[:3] == ["nq/train-line-1", "nq/train-line-2", "nq/dev-line-1"] and found[4] == "nq/train.2-row-1"
    long = [{"id": "i" * 255 + end, "question": "q ?", "answers": ["a"]} for end in "ab"]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, long)))
    ids = [question.id for question in load_questions([tmp_path / "long.jsonl", files[0]]).questions]
    assert len(set(ids)) == 4 and max(map(len, ids)) == 256
    rows = RowCount()
    load_questions(tmp_path / "nq" / "train.jsonl", rows)
    assert (rows.read, rows.valid) == (2, 2)


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [
        (15, ("train=0.9", "dev=0.1"), (13, 2)),
        (25, ("train=0.9", "dev=0.1"), (22, 3)),
        (5, ("a=0.5", "b=0.5"), (2, 3)),
        (10, ("a=0.7", "b=0.2", "c=0.1"), (7, 2, 1)),
        (7, ("a=0.3", "b=2", "c=rest"), (2, 2, 3)),
    ],
)
def test_shares_that_add_up_to_one_take_every_row(
    tmp_path: Path, count: int, parts: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"question": "q {n} ?", "answers": ["a"]}}\n' for n in range(count)))
    code, said = run("split", path, *parts, "--out", tmp_path / "parts")
    found = [len(written(tmp_path / "parts" / f"{part.partition('=')[0]}.jsonl")) for part in parts]
    assert code == 0 and tuple(found) == sizes, said


@pytest.mark.parametrize(
    "argv",
    [
        ("split", "{q}", "../x=0.5", "--out", "{out}"),
        ("split", "{q}", "x=inf", "--out", "{out}"),
        ("sample", "{q}", "--rows", "-1", "--out", "{out}"),
        ("merge", "{q}", "{q}", "--rows", "-3", "--out", "{out}"),
        ("inspect", "{q}", "--examples", "-1"),
        ("demonstrate", "{q}", "--corpus", "c", "--limit", "0", "--out", "{out}"),
    ],
)
def test_numbers_and_names_that_mean_nothing_are_refused(tmp_path: Path, argv: tuple[str, ...]) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "q ?", "answers": ["a"]}\n' * 4)
    code, said = run(*(part.format(q=path, out=tmp_path / "out") for part in argv))
    assert code == 2 and said.startswith("error: ") and list(tmp_path.iterdir()) == [path]


def test_an_evaluation_of_no_question_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/a", "--suite", "q=q.jsonl", "--limit", "-1"]) == 2
    assert "'-1' is not an integer of at least 1" in capsys.readouterr().err


def test_inspect_shows_a_prompt_and_names_system_messages(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Think."}, {"role": "user", "content": "Add 2 and 3. End with #### N."}]
    row = SEARCH_R1 | {"data_source": "gsm8k", "prompt": prompt}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    code, said = run("inspect", tmp_path / "train.parquet")
    assert (
        code == 0 and "the first prompt:" in said and "End with #### N." in said and "Answer the given question" in said
    )
    assert "note: 1 rows have a `system` message, which is not used" in said
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "q ?", "answers": ["a"]}')
    assert "system" not in run("inspect", path)[1]
