"""Check the input files of a run by reading them: model, corpus, the first questions."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.run.learning import MOST_DEAD
from learner.config.questions import QuestionSource, question_sources
from learner.data.questions import check_questions, read_questions
from protocol.errors import UserError
from protocol.runtime.records import RowCount
from protocol.runtime.torch_safety import refuse_pickled

LENGTHS_S = 5.0
LOOKUP_S = 1.0
LEAST_COVERED = 0.9
"""Share of questions whose supporting passages are in the corpus, below which a run is warned: no policy finds what is
not there."""
ROWS = 100
"""Number of questions and passages to read: a wrong format shows in the first ones."""
MODEL_FILES = "give a directory in Hugging Face layout (config.json, model.safetensors, tokenizer.json): run.model=..."


def files(config: RunConfig) -> Iterator[Finding]:
    """Yield one finding for each file or directory that the processes started here will read."""
    if config.engine_roles or config.launch.rollouts or config.launch.learner:
        yield model(config)
    if config.num_retrievers and config.retriever.online is None:
        yield _unless_prepared(config, config.retriever.needed_corpus, _corpus(config))
    if config.launch.learner:
        for source in question_sources(config.learner.questions):
            yield _unless_prepared(config, source.path, _questions(source, "learner.questions"))
        for suite in config.learner.eval.suites:
            found = _questions(QuestionSource(path=suite.path), "learner.eval.suites")
            yield _unless_prepared(config, suite.path, found)
        yield from passages(config)


def awaits_preparation(config: RunConfig) -> bool:
    """Return whether `launch.prepare` will create the model before any process starts."""
    return bool(config.launch.prepare) and not config.run.model.exists()


def model(config: RunConfig) -> Finding:
    """Check the directory of the initial policy."""
    directory = config.run.model
    if awaits_preparation(config):
        return Finding("run.model", "ok", f"launch.prepare will create {directory}")
    try:
        facts = json.loads((directory / "config.json").read_bytes())
        refuse_pickled(directory)
        shards = _shards(directory)
    except OSError as error:
        return Finding("run.model", "fail", f"no model in {directory}: {error.strerror}", MODEL_FILES)
    except (ValueError, RecursionError) as error:
        return Finding("run.model", "fail", f"a file of the model in {directory} is corrupt", MODEL_FILES, str(error))
    except UserError as error:
        return Finding.of("run.model", error)
    if not isinstance(facts, dict) or not shards:
        what = "config.json is not a JSON object" if shards else "it contains no weights (*.safetensors)"
        return Finding("run.model", "fail", f"no model in {directory}: {what}", MODEL_FILES)
    for shard in shards:
        if why := _damage(shard):
            return Finding("run.model", "fail", f"{shard} is not a complete safetensors file", "copy it again", why)
    return Finding(
        "run.model", "ok", f"{directory}: {facts.get('model_type', 'model')}, {len(shards)} file(s) of weights"
    )


def _shards(directory: Path) -> list[Path]:
    """Return the weight files: those in the safetensors index, else those in the directory."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index.name} has no weight_map") from error
    return sorted(directory / str(name) for name in names)


def _damage(shard: Path) -> str:
    """Return what is wrong with a weight file, "" if it is complete (or cannot be checked here)."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return "" if shard.is_file() else "No such file or directory"
    try:
        with safe_open(shard, framework="numpy"):
            return ""
    except SafetensorError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


def _corpus(config: RunConfig) -> Finding:
    """Check the first passages of the corpus, with the reader of the index builder."""
    from retriever.corpus.manifest import corpus_of
    from retriever.indexing.input import first_passages, refuse_large

    settings = config.retriever
    built = settings.index_path.exists() or settings.needed_corpus is None
    corpus = settings.corpus
    try:
        if built:
            corpus = corpus_of(settings.index_path, settings.given_corpus)
        count = first_passages(corpus, ROWS)
        if not built:
            refuse_large(settings)
    except ImportError as error:
        detail, fix = f"{corpus} cannot be read in this environment", "pip install 'foray[retriever]'"
        return Finding("retriever.corpus", "fail", detail, fix, str(error))
    except UserError as error:
        return Finding.of("retriever.index_dir" if settings.needed_corpus is None else "retriever.corpus", error)
    return Finding("retriever.corpus", "ok", f"{corpus}: the first {count} passages are readable")


def _questions(source: QuestionSource, check: str) -> Finding:
    counts = RowCount()
    try:
        count, form = check_questions(source, ROWS, counts)
    except UserError as error:
        return Finding.of(check, error)
    detail = f"{source.path}: the first {count} questions are readable (format {form})"
    if counts.broken:
        return Finding(check, "warn", detail, "foray data inspect shows them", counts.of_several_lines())
    return Finding(check, "ok", detail)


def lengths(config: RunConfig) -> Iterator[Finding]:
    """Encode the questions with the run's template, for at most LENGTHS_S seconds: too long ones would be lost."""
    if not config.launch.learner or awaits_preparation(config):
        return
    limits, count, too_long = config.rollout.episode, 0, 0
    room, until = limits.max_context - limits.reserve_tokens, time.monotonic() + LENGTHS_S
    try:
        from rollout_server.environment.environment import build_environment

        prompt = build_environment(limits, config.run.model, day=config.run.date).prompt
        for question in chain.from_iterable(map(read_questions, question_sources(config.learner.questions))):
            count, too_long = count + 1, too_long + (len(prompt(question.text)) > room)
            if time.monotonic() > until:
                break
        else:
            until = math.inf
    except (UserError, ImportError) as error:
        if count >= ROWS and isinstance(error, UserError):  # before, other checks report it
            yield Finding.of("question lengths", error)
        return
    which = f"the first {count}" if until < math.inf else f"{count}"
    detail = f"{too_long} of {which} questions have a prompt of more than {room} tokens"
    if too_long <= MOST_DEAD * count:
        yield Finding("question lengths", "ok", detail)
        return
    why = "they fail as prompt_too_long and are not trained (rollout.episode.max_context - reserve_tokens)"
    todo = "raise rollout.episode.max_context, or remove them: `foray data inspect --config` shows the lengths"
    yield Finding("question lengths", "warn" if too_long < count else "fail", detail, todo, why)


def passages(config: RunConfig) -> Iterator[Finding]:
    """Look up the supporting passages that the questions name, for LOOKUP_S seconds, where an index is here."""
    settings = config.retriever
    if not config.num_retrievers or settings.online is not None or not settings.index_path.exists():
        return
    count = complete = known = 0
    try:
        from retriever.corpus.corpus import Corpus
        from retriever.corpus.manifest import corpus_of

        corpus = Corpus(corpus_of(settings.index_path, settings.given_corpus), settings.index_path)
        until = time.monotonic() + LOOKUP_S
        for question in chain.from_iterable(map(read_questions, question_sources(config.learner.questions))):
            if names := question.supporting:
                here = sum(corpus.find(name) is not None for name in names)
                count, complete, known = count + 1, complete + (here == len(names)), known + here
            if time.monotonic() > until:
                break
    except (UserError, ImportError, OSError):  # other checks report it
        return
    if not count:
        return
    detail = f"the corpus has all supporting passages of {complete} of {count} questions that name some"
    todo = "`foray data coverage` lists the questions without them, and looks for titles and answers too"
    if not known:
        detail = f"no supporting passage of {count} questions is an id of the corpus: titles, or another corpus"
        yield Finding("supporting passages", "ok", detail, todo)
    elif complete < LEAST_COVERED * count:
        why = "a question whose passages are not in the corpus teaches to guess, or to search in vain"
        yield Finding("supporting passages", "warn", detail, todo, why)
    else:
        yield Finding("supporting passages", "ok", detail)


def _unless_prepared(config: RunConfig, path: Path | None, found: Finding) -> Finding:
    """Return `found`, as a warning if the file is missing and `launch.prepare` may create it."""
    if found.verdict == "fail" and path is not None and not path.exists() and awaits_preparation(config):
        return Finding(found.check, "warn", f"{path} does not exist yet", "nothing, if launch.prepare creates it")
    return found
