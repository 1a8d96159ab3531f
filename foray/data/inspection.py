"""What is in a file of questions or of passages: schema, examples, duplicates, lengths, answers that cannot match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from deploy.terminal import escape_untrusted
from foray.data.dedupe import words_of
from foray.data.files import record_of
from learner.config.questions import QuestionSource
from learner.data.formats import detect as detect_questions
from learner.data.questions import QUESTIONS, empty, format_of, read_questions
from protocol.errors import UserError
from protocol.messages import Question
from protocol.runtime.records import RecordReader, RowCount, record_files
from rollout_server.environment.config import EnvironmentSettings

SCHEMA_ROWS = 1000
SHARES = (0.5, 0.9, 0.99, 1.0)
BARS, BAR_WIDTH = 8, 30
NAMED = 5
"""Examples named of each finding."""


def is_corpus(path: Path) -> bool:
    """Return whether the first record of a file is a passage and no question."""
    from retriever.corpus.formats import FORMATS

    with closing(_raw(path)) as records:
        first = next(records, None)
    return first is not None and not detect_questions(first[1]) and any(f.fits(first[1]) for f in FORMATS.values())


def inspect_questions(path: Path, form: str, examples: int, config: Path | None, counts: RowCount) -> dict[str, Any]:
    """Return the report on a file of questions.

    config  of a run: prompts are measured in tokens, with its template, model and limits
    """
    source = QuestionSource(path=path, format=form)
    questions = list(read_questions(source, rows=counts))
    if not questions:
        raise empty(path, counts)
    ids, texts = Counter(q.id for q in questions), Counter(words_of(q.text) for q in questions)
    report: dict[str, Any] = {
        "file": str(path),
        "holds": "questions",
        "format": format_of(source),
        "rows": len(questions),
        "dropped": dict(counts.dropped),
        "of_several_lines": counts.of_several_lines(),
        "system_messages": sum(_has_system(record) for _, record in _raw(path)),
        "sources": dict(Counter(q.source for q in questions)),
        "schema": _schema(record for _, record in _raw(path)),
        "answers_per_question": _summary([len(q.answers) for q in questions]),
        "with_supporting_passages": sum(bool(q.supporting) for q in questions),
        "repeated_ids": sum(count - 1 for count in ids.values()),
        "repeated_questions": sum(count - 1 for count in texts.values()),
        "question_words": _lengths([len(q.text.split()) for q in questions]),
        "answer_words": _lengths([len(answer.split()) for q in questions for answer in q.answers]),
        **_golds(questions),
        "examples": [record_of(q) for q in questions[:examples]],
    }
    return report | _prompts(questions, config)


def _has_system(record: Mapping[str, Any]) -> bool:
    messages = record.get("prompt")
    return isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") == "system" for m in messages)


def inspect_corpus(path: Path, examples: int, counts: RowCount) -> dict[str, Any]:
    """Return the report on a file of passages."""
    from retriever.indexing.input import documents, read_input

    given = read_input(path)
    lengths, ids, texts = list[int](), Counter[str](), Counter[int]()
    titled, shown = 0, list[dict[str, Any]]()
    with closing(documents(given, lambda share, passages: None, counts)) as passages:
        for document in passages:
            if len(shown) < examples:
                shown.append(_passage(document))
            lengths.append(len(document.contents.split()))
            ids[document.id] += 1
            texts[hash((document.title, document.text))] += 1
            titled += bool(document.title)
    if not lengths:
        raise UserError(f"{path} has no passages", todo="give another file")
    return {
        "file": str(path),
        "holds": "passages",
        "format": given.format,
        "rows": len(lengths),
        "dropped": dict(counts.dropped),
        "schema": _schema(record for _, record in _raw(path)),
        "of_several_lines": counts.of_several_lines(),
        "with_a_title": titled,
        "repeated_ids": sum(count - 1 for count in ids.values()),
        "repeated_passages": sum(count - 1 for count in texts.values()),
        "empty": sum(length == 0 for length in lengths),
        "passage_words": _lengths(lengths),
        "examples": shown,
    }


def render(report: Mapping[str, Any]) -> str:
    """Return the report for a terminal."""
    lines = [f"{report['file']}: {report['rows']:,} {report['holds']}, format {report['format']}"]
    if "sources" in report:
        lines.append("sources: " + ", ".join(f"{name} {count:,}" for name, count in report["sources"].items()))
    lines += [f"dropped: {count:,} rows, {why}" for why, count in report["dropped"].items()]
    lines.append("fields: " + ", ".join(f"{name} {kind}" for name, kind in report["schema"].items()))
    for name, title in (
        ("repeated_ids", "repeated ids"),
        ("repeated_questions", "repeated questions (same words)"),
        ("repeated_passages", "repeated passages"),
        ("empty", "empty passages"),
        ("with_a_title", "passages with a title"),
        ("with_supporting_passages", "questions with supporting passages"),
        ("yes_or_no", "questions answered by yes or no"),
    ):
        if name in report:
            lines.append(f"{title}: {report[name]:,}")
    if (empty := report.get("empty_golds")) is not None:
        lines.append(f"answers that normalise to nothing: {empty['answers']} in {empty['questions']} questions")
        lines += [f"  {example}" for example in empty["examples"]]
    for name in ("question_words", "answer_words", "passage_words"):
        if name in report:
            lines += _histogram(name.replace("_", " "), report[name])
    if (prompts := report.get("prompts")) is not None:
        lines += _histogram(f"prompt tokens (template {prompts['template']})", prompts["tokens"])
        lines.append(
            f"prompts that leave fewer than {prompts['reserve_tokens']} of {prompts['max_context']} tokens: "
            f"{prompts['too_long']}"
        )
    if "prompt" in report:
        lines += ["the first prompt:", *(f"  {escape_untrusted(line, 300)}" for line in report["prompt"].splitlines())]
    if report["of_several_lines"]:
        lines.append(f"note: {report['of_several_lines']}")
    if report.get("system_messages"):
        lines.append(
            f"note: {report['system_messages']:,} rows have a `system` message, which is not used: "
            "rollout.episode.template states the task (docs/extending.md adds a template)"
        )
    lines.append("examples:")
    lines += [f"  {escape_untrusted(str(example), 300)}" for example in report["examples"]]
    return "\n".join(lines)


def _raw(path: Path) -> Generator[tuple[int, Mapping[str, Any]], None, None]:
    for file in record_files(path, QUESTIONS):
        yield from RecordReader(file, QUESTIONS, rows=RowCount(skip_invalid=True))


def _schema(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return field -> types in the first records; a field that some of them lack has a `?`."""
    kinds: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    total = 0
    for record in islice(records, SCHEMA_ROWS):
        total += 1
        for name, value in record.items():
            kinds.setdefault(str(name), set()).add(_kind(value))
            counts[str(name)] += 1
    return {name: " or ".join(sorted(found)) + ("?" if counts[name] < total else "") for name, found in kinds.items()}


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "text"
        case int() | float():
            return "number"
        case list():
            inner = sorted({"lists" if isinstance(item, list) else _kind(item) for item in value[:10]})
            return f"list of {' or '.join(inner)}" if inner else "list"
        case _:
            return "object"


def _golds(questions: Sequence[Question]) -> dict[str, Any]:
    """Return the answers that exact match reduces to nothing ("A", "The The", "?"), and those that are yes or no."""
    from rollout_server.rewards.text_match import normalise

    empty = [(q, answer) for q in questions for answer in q.answers if not normalise(answer)]
    hopeless = {q.id for q, _ in empty}
    named = [f"{q.id}: {escape_untrusted(answer, 60)!r} of {escape_untrusted(q.text, 80)!r}" for q, answer in empty]
    yes_or_no = sum({normalise(answer) for answer in q.answers} <= {"yes", "no"} for q in questions)
    return {
        "empty_golds": {"answers": len(empty), "questions": len(hopeless), "examples": named[:NAMED]},
        "yes_or_no": yes_or_no,
    }


def _prompts(questions: Sequence[Question], path: Path | None) -> dict[str, Any]:
    """Return the first prompt, of the default template without a configuration, and the lengths of all in tokens."""
    from deploy.config import load_config
    from rollout_server.environment.environment import build_environment
    from rollout_server.environment.prompts import TEMPLATES

    if path is None:
        template = TEMPLATES[EnvironmentSettings().template]
        return {"prompt": template.format_question(questions[0].text).join(template.prompt_frame)}
    config = load_config(path)
    settings = config.rollout.episode
    environment = build_environment(settings, config.run.model, day=config.run.date)
    lengths = [len(environment.prompt(question.text)) for question in questions]
    room = settings.max_context - settings.reserve_tokens
    prompts = {
        "template": settings.template,
        "max_context": settings.max_context,
        "reserve_tokens": settings.reserve_tokens,
        "tokens": _lengths(lengths),
        "too_long": sum(length > room for length in lengths),
    }
    first = environment.prompt_tokenizer.decode(environment.prompt(questions[0].text))
    return {"prompt": first, "prompts": prompts}


def _passage(document: Any) -> dict[str, Any]:
    return {"id": document.id, "title": document.title, "text": document.text[:200]}


def _summary(values: Sequence[int]) -> dict[str, float]:
    return {"mean": round(sum(values) / len(values), 2), "max": max(values)}


def _lengths(values: Sequence[int]) -> dict[str, Any]:
    """Return mean, quantiles and a histogram {upper bound: count} of lengths."""
    ordered = sorted(values)
    quantiles = {f"p{share * 100:g}": ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in SHARES}
    low, high = ordered[0], ordered[-1]
    width = max(1, -(-(high - low + 1) // BARS))
    counts = Counter((value - low) // width for value in ordered)
    bars = {low + (n + 1) * width - 1: counts[n] for n in range((high - low) // width + 1)}
    return {"mean": round(sum(ordered) / len(ordered), 1), "min": low, **quantiles, "histogram": bars}


def _histogram(title: str, lengths: Mapping[str, Any]) -> Iterator[str]:
    quantiles = ", ".join(f"{name} {lengths[name]}" for name in ("p50", "p90", "p99"))
    yield f"{title}: mean {lengths['mean']}, min {lengths['min']}, {quantiles}, max {lengths['p100']}"
    most = max(lengths["histogram"].values())
    for bound, count in lengths["histogram"].items():
        bar = "#" * round(count / most * BAR_WIDTH)
        yield f"  to {bound:>6}  {count:>8,}  {bar}".rstrip()
