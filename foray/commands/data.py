"""List, download, convert, inspect, mix and compare questions, corpora, indexes and models.

    foray data list                                    what `get` knows, and what of it is here
    foray data get nq wiki-18 [--to data]              download, verify, unpack; the same command continues after a stop
    foray data formats                                 formats of questions and of passages
    foray data inspect FILE [--config run.yaml]        schema, examples, duplicates, lengths, answers that cannot match
    foray data convert FILE OUT.jsonl                  any format to Foray's; --corpus for passages
    foray data merge A B --out F [--weights 2,1]       one file of several, in random order
    foray data split FILE --out DIR train=0.95 dev=rest
    foray data sample FILE --rows 500 --out F
    foray data dedupe TRAIN --against TEST --out F     remove repeats, and what the test set has too
    foray data demonstrate FILE --corpus C --out F     demonstrations of searching, for `foray sft` (docs/sft.md)
    foray data coverage FILE --config run.yaml         is what the questions ask for in the corpus, and is it found?

A run needs no conversion: `learner.questions` reads every format, and several files with weights (docs/data.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.terminal import aligned, at_least
from protocol.errors import UserError
from protocol.runtime.config import override
from protocol.runtime.progress import Progress
from protocol.runtime.records import RowCount

if TYPE_CHECKING:
    from deploy.config import RunConfig
    from protocol.messages import Question

_FILE = "a file of questions, or a folder that `datasets` saved"


def subcommands() -> dict[str, str]:
    """Return name -> help."""
    return {
        "list": "List known data sets, corpora, indexes and models, and which are on this disk.",
        "get": "Download by name or address: resumable, verified, unpacked.",
        "formats": "List the formats of questions and passages.",
        "inspect": "Show schema, examples, duplicates, lengths, and answers that cannot match.",
        "convert": "Write questions as Foray's JSON lines, or passages as corpus lines.",
        "merge": "Write the questions of several files as one file, in random order.",
        "split": "Divide questions into files; equal questions stay together.",
        "sample": "Write a random sample of the questions.",
        "dedupe": "Remove repeated questions, and those that a test set has too.",
        "demonstrate": "Write demonstrations of searching, from questions with supporting passages.",
        "coverage": "Say how many questions have their passages or an answer in the corpus, and are found there.",
    }


def configure(parser: argparse.ArgumentParser, action: str) -> None:
    """Add the arguments of `foray data ACTION`."""
    if action in ("list", "get"):
        parser.add_argument("names", nargs="*" if action == "list" else "+", metavar="NAME",
                            help="name in the catalogue" + (", or an address" if action == "get" else ""))  # fmt: skip
        parser.add_argument("--to", type=Path, default=Path("data"), help="data directory (default: data)")
    if action == "get":
        parser.add_argument("--sha256", default="", help="expected checksum of one address")
    if action in ("list", "formats", "inspect", "dedupe", "demonstrate", "coverage"):
        parser.add_argument("--json", action="store_true", help="print JSON")
    if action == "inspect":
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=f"{_FILE}, or of passages")
        parser.add_argument("--config", type=Path, help="measure prompts with the template, model and limits of a run")
        parser.add_argument("--corpus", action="store_true", help="read the passages of the file, not its questions")
        parser.add_argument("--examples", type=at_least(0), default=3, help="records to show (default: 3)")
    if action == "convert":
        parser.add_argument("file", type=Path, metavar="FILE", help=_FILE)
        parser.add_argument("out", type=Path, metavar="OUT", help="JSON lines to write")
        parser.add_argument("--corpus", action="store_true", help="convert the passages of the file")
        parser.add_argument("--question", default="", help="column of the question, for a format of your own")
        parser.add_argument("--answers", default="", help="column of the answers, with --question")
        parser.add_argument("--id", default="", help="column of the id, with --question")
    if action in ("merge", "dedupe"):
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=_FILE)
    if action in ("split", "sample", "demonstrate", "coverage"):
        parser.add_argument("file", type=Path, metavar="FILE", help=_FILE)
    if action == "split":
        parser.add_argument("parts", nargs="+", metavar="NAME=SHARE", help="share, number of questions, or `rest`")
    if action in ("merge", "sample"):
        parser.add_argument("--rows", type=at_least(1), help="number of questions to write")
    if action == "merge":
        parser.add_argument("--weights", default="", help="shares of the files, e.g. 2,1 (default: by size)")
    if action in ("merge", "split", "sample"):
        parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    if action in ("merge", "split", "sample", "dedupe", "demonstrate"):
        parser.add_argument("--out", type=Path, required=True, help="directory" if action == "split" else "file")
    if action == "dedupe":
        parser.add_argument("--against", type=Path, nargs="+", default=[], metavar="FILE", help="test sets")
        parser.add_argument("--near", type=float, default=0.8,
                            help="share of common words (Jaccard) from which questions with a common answer are near "
                            "duplicates; 0: only exact ones (default: 0.8)")  # fmt: skip
    if action in ("demonstrate", "coverage"):
        parser.add_argument("--corpus", type=Path, help="corpus of the passages (default: that of --config)")
        parser.add_argument("--config", type=Path, help="a run: its template, corpus and index")
        parser.add_argument("--limit", type=at_least(1), help="read only the first LIMIT questions")
    if action == "coverage":
        parser.add_argument("--index", type=Path, help="directory of the index (default: that of --config)")
        parser.add_argument("--out", type=Path, help="file for the questions that the corpus has nothing for")
    if action == "demonstrate":
        parser.add_argument("--topk", type=at_least(1), help="passages per search (default: that of --config, or 2)")
        parser.add_argument("--searches", type=at_least(1), default=3, help="maximum searches (default: 3)")
    if action in ("inspect", "convert", "merge", "split", "sample", "dedupe", "demonstrate", "coverage"):
        parser.add_argument("--skip-invalid", action="store_true",
                            help="drop invalid rows and count them, instead of stopping at the first one")  # fmt: skip
    if action in ("convert", "sample", "split", "inspect", "demonstrate", "coverage"):
        parser.add_argument("--format", default="", help="format of the file (default: that of the first record)")
    if action == "convert":
        parser.add_argument("--source", default="", help="name of the data set, instead of that in the file")


def run(args: argparse.Namespace) -> int:
    """Return 0 on success. Raises UserError for what the user must correct."""
    return _ACTIONS[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from foray.data.catalogue import catalogue, entry, recorded

    chosen = [entry(name) for name in args.names] or list(catalogue().values())
    if args.json or args.names:
        record = recorded(args.to)
        rows = [
            {
                **{"name": e.name, "kind": e.kind, "about": e.about, "source": e.address, "found in": e.seen},
                **e.facts,
                "present": e.present(args.to),
                "files": [str(args.to / path) for path in e.results()] or [str(args.to / e.folder)],
                "sha256": {path: row["sha256"] for path, row in record.items() if row["url"].startswith(e.address)},
            }
            for e in chosen
        ]
        print(json.dumps(rows if args.json else rows if len(rows) > 1 else rows[0], indent=1, ensure_ascii=False))
        return 0
    listed = ((e.name, e.kind, "present" if e.present(args.to) else "-", e.about) for e in chosen)
    print("\n".join(aligned(("name", "kind", "here", "about"), listed)))
    print(f"\nin {args.to.absolute()}; `foray data list NAME` shows its source, `foray data get NAME` downloads it")
    return 0


def _get(args: argparse.Namespace) -> int:
    from foray.data.catalogue import entry, get, get_url
    from foray.data.download import Interrupted

    urls = [name for name in args.names if "://" in name]
    if args.sha256 and (len(urls) != 1 or len(args.names) != 1):
        raise UserError("--sha256 is the checksum of one address", todo="give one address with it")
    wanted = [(name, None if "://" in name else entry(name)) for name in args.names]
    progress = Progress.on(sys.stderr)
    try:
        for name, known in wanted:
            paths = [get_url(name, args.to, progress, args.sha256)] if known is None else get(known, args.to, progress)
            for path in paths:
                print(path)
    except Interrupted as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _formats(args: argparse.Namespace) -> int:
    from foray.data.files import format_table

    table = format_table()
    if args.json:
        print(json.dumps([row._asdict() for row in table], indent=1))
        return 0
    width = max(len(row.name) for row in table)
    for of in ("questions", "corpus"):
        print(f"{of}:")
        for row in table:
            if row.of == of:
                print(f"  {row.name:<{width}}  {row.fields}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from foray.data.inspection import inspect_corpus, inspect_questions, is_corpus, render

    reports = []
    for path in args.files:
        rows = RowCount(args.skip_invalid)
        if args.corpus or (not args.format and is_corpus(path)):
            reports.append(inspect_corpus(path, args.examples, rows))
        else:
            reports.append(inspect_questions(path, args.format, args.examples, args.config, rows))
    print(json.dumps(reports, indent=1, ensure_ascii=False) if args.json else "\n\n".join(map(render, reports)))
    return 0


def _convert(args: argparse.Namespace) -> int:
    from foray.data.files import convert_corpus, convert_questions

    if bool(args.question) != bool(args.answers):
        raise UserError("--question and --answers belong together", todo="give both columns")
    rows = RowCount(args.skip_invalid)
    if args.corpus:
        convert_corpus(args.file, args.out, rows, args.format)
    else:
        columns = (args.question, args.answers, args.id)
        convert_questions(args.file, args.out, rows, form=args.format, source=args.source, columns=columns)
    print(f"wrote {rows.valid} {'passages' if args.corpus else 'questions'} to {args.out}")
    print(rows.account(rows.valid, ""))
    return 0


def _merge(args: argparse.Namespace) -> int:
    from foray.data.files import merge
    from learner.config.questions import QuestionSource

    weights = _weights(args.weights, len(args.files))
    sources = [QuestionSource(path=path, weight=w) for path, w in zip(args.files, weights, strict=True)]
    rows = RowCount(args.skip_invalid)
    return _write({args.out: merge(sources, args.rows, args.seed, rows)}, rows, "not drawn")


def _split(args: argparse.Namespace) -> int:
    from foray.data.files import split

    found, rows = _questions(args)
    parts = split(found, args.parts, args.seed)
    return _write({args.out / f"{name}.jsonl": part for name, part in parts.items()}, rows, "in no part")


def _sample(args: argparse.Namespace) -> int:
    from foray.data.files import sample

    if args.rows is None:
        raise UserError("`foray data sample` needs --rows", todo="give the number of questions, e.g. --rows 500")
    found, rows = _questions(args)
    return _write({args.out: sample(found, args.rows, args.seed)}, rows, "not drawn")


def _dedupe(args: argparse.Namespace) -> int:
    from foray.data.dedupe import dedupe
    from foray.data.files import write_questions
    from learner.data.questions import load_questions

    if not 0 <= args.near <= 1:
        raise UserError(f"--near is {args.near:g}", todo="give a share between 0 and 1, e.g. 0.8")
    rows, of_tests = RowCount(args.skip_invalid), RowCount(args.skip_invalid)
    train = load_questions(args.files if len(args.files) > 1 else args.files[0], rows).questions
    tests = [question for path in args.against for question in load_questions(path, of_tests).questions]
    result = dedupe(train, tests, args.near)
    if args.json:
        write_questions(args.out, result.kept)
        report = result.report() | {"read": rows.read, "dropped": dict(rows.dropped)}
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return 0
    for line in result.lines():
        print(line)
    if of_tests.dropped:
        print(f"test sets: {of_tests.account(of_tests.valid, '')}")
    return _write({args.out: result.kept}, rows, "removed")


def _demonstrate(args: argparse.Namespace) -> int:
    from foray.data.demonstrate import demonstrate, opened_searcher, search_with, write_demonstrations
    from rollout_server.environment.prompts import TEMPLATES

    config = _retriever_of(args)
    topk = args.topk or (getattr(config.rollout.search, "topk", 2) if args.config else 2)
    template = TEMPLATES[config.rollout.episode.template]
    found, rows = _questions(args)
    questions = found[: args.limit]
    with (
        opened_searcher(config.retriever) as searcher,
        Progress.on(sys.stderr).task("demonstrate", len(questions), "questions") as task,
    ):
        search = search_with(searcher, topk)
        report = write_demonstrations(
            args.out,
            questions,
            lambda question: demonstrate(question, search, searcher.find, template, args.searches),
            task,
        )
    report = {"questions": len(questions), "topk": topk, "dropped": dict(rows.dropped), **report}
    if args.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return 0
    by_count = ", ".join(
        f"{count} with {searches} search{'' if searches == '1' else 'es'}"
        for searches, count in report["searches"].items()
    )
    print(f"wrote {report['demonstrations']} demonstrations to {args.out}: {by_count or 'none'}")
    for reason, count in report["left_out"].items():
        print(f"  left out: {count} questions, {reason}")
    print(rows.account(report["demonstrations"], "left out"))
    return 0


def _coverage(args: argparse.Namespace) -> int:
    from foray.data.coverage import coverage, render, report, searched
    from foray.data.demonstrate import opened_searcher
    from foray.data.files import write_questions

    config = _retriever_of(args)
    found, rows = _questions(args)
    with opened_searcher(config.retriever) as searcher:
        total = searcher.num_passages + len(found[: args.limit])
        with Progress.on(sys.stderr).task("coverage", total, "passages and questions") as task:
            covered = coverage(found[: args.limit], searcher, task)
        facts = report(covered, searcher.num_passages)
        topk = getattr(config.rollout.search, "topk", 2) if args.config else 2
        facts["searches"] = searched(found[: args.limit], searcher, topk)
    if args.out is not None:
        write_questions(args.out, [one.question for one in covered if one.lacking])
    if args.json:
        print(json.dumps(facts | {"dropped": dict(rows.dropped)}, indent=1, ensure_ascii=False))
        return 0
    print("\n".join(render(facts)))
    for why, count in rows.dropped.items():
        print(f"{count} rows dropped: {why} (first: {rows.first[why]})")
    return 0


def _retriever_of(args: argparse.Namespace) -> RunConfig:
    """Return the run of --config with the corpus and the index that are given."""
    from deploy.config import load_config

    given = {"retriever.corpus": args.corpus, "retriever.index_dir": getattr(args, "index", None)}
    overrides = [override(name, path) for name, path in given.items() if path is not None]
    if not overrides and args.config is None:
        raise UserError("no corpus is given", todo="give --corpus FILE, or --config of a run")
    return load_config(args.config, overrides)


def _questions(args: argparse.Namespace) -> tuple[Sequence[Question], RowCount]:
    from learner.config.questions import QuestionSource
    from learner.data.questions import load_questions

    rows = RowCount(args.skip_invalid)
    return load_questions([QuestionSource(path=args.file, format=args.format)], rows).questions, rows


def _write(parts: Mapping[Path, Sequence[Question]], rows: RowCount, rest: str) -> int:
    """Write the files, and say where all rows went; `rest` says why some valid ones were not written."""
    from foray.data.files import write_questions

    for path, questions in parts.items():
        write_questions(path, questions)
        sources = Counter(question.source for question in questions)
        by_source = ", ".join(f"{name} {count}" for name, count in sorted(sources.items()))
        print(f"wrote {len(questions)} questions to {path} ({by_source})")
    print(rows.account(sum(map(len, parts.values())), rest))
    return 0


def _weights(text: str, count: int) -> list[float | None]:
    if not text:
        return [None] * count
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != count or not all(weight > 0 for weight in weights):
        raise UserError(f"--weights {text} is not one number above 0 for each file", todo=f"give {count} numbers: 2,1")
    return list(weights)


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "get": _get,
    "formats": _formats,
    "inspect": _inspect,
    "convert": _convert,
    "merge": _merge,
    "split": _split,
    "sample": _sample,
    "dedupe": _dedupe,
    "demonstrate": _demonstrate,
    "coverage": _coverage,
}
