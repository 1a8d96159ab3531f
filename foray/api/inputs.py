"""What a run needs, made from Python objects: files of questions and a model, a search engine, a reward."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foray.api.callables import CallableServer, RewardFunction
from foray.api.searcher import Searcher
from foray.data.files import record_of
from protocol.errors import UserError
from protocol.messages import Question
from protocol.runtime.config import override

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Example = Question | tuple[str, str | Sequence[str]] | Mapping[str, Any]
"""A question: (text, answer or answers), a mapping as a line of a file of questions (docs/data.md), or a `Question`."""


def write_dataset(dataset: str | Path | Iterable[Example], inputs: Path) -> tuple[Path, int]:
    """Return a file of questions and their number; examples are written below `inputs`. Raises UserError."""
    from foray.data.files import write_questions
    from learner.data.questions import load_questions

    if isinstance(dataset, str | Path):
        path = Path(dataset).absolute()
        return path, len(load_questions(path).questions)
    examples = [_line(number, example) for number, example in enumerate(dataset)]
    if not examples:
        raise UserError("the dataset is empty", todo="give a file of questions, or (question, answer) pairs")
    inputs.mkdir(parents=True, exist_ok=True)
    raw, path = inputs / "examples.jsonl", inputs / "questions.jsonl"
    raw.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in examples), encoding="utf-8")
    write_questions(path, load_questions(raw).questions)  # read as any file: the same checks and formats
    return path, len(examples)


def _line(number: int, example: Example) -> dict[str, Any]:
    match example:
        case Question():
            return record_of(example)
        case Mapping():
            return dict(example)
        case (str(text), str(answer)):
            return {"id": str(number), "question": text, "answers": [answer]}
        case (str(text), [*answers]):
            return {"id": str(number), "question": text, "answers": [str(answer) for answer in answers]}
        case _:
            raise UserError(
                f"example {number} of the dataset is no question",
                why=f"it is {example!r:.100}",
                todo='give pairs ("Who discovered penicillin?", "Alexander Fleming"), mappings, or foray.Question',
            )


def save_model(model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, inputs: Path) -> Path:
    """Return the model's folder; an object is saved below `inputs`, with its tokenizer. Raises UserError."""
    if isinstance(model, str | Path):
        return Path(model).absolute()
    if tokenizer is None:
        raise UserError("a model object needs its tokenizer", todo="give both, or the folder that has both")
    folder = inputs / "model"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UserError("the tokenizer has no tokenizer.json", todo="load it with AutoTokenizer(.., use_fast=True)")
    return folder


def server_of(search: object, reward: str | RewardFunction) -> CallableServer | None:
    """Serve what is an object or a function of this process; None if nothing is. Raises UserError."""
    served = search if not isinstance(search, str | Path | Searcher | None) else None
    if served is not None and not callable(getattr(served, "search", None)):
        raise UserError(f"a {type(served).__name__} has no method search(query)", todo="give it one")
    function = None if isinstance(reward, str) else reward
    return None if served is None and function is None else CallableServer(served, function)  # type: ignore[arg-type]


def search_overrides(search: object, server: CallableServer | None) -> list[str]:
    """Return the overrides that make a run use `search`."""
    if search is None:
        return ['rollout.search={"type": "none"}']
    typed = "rollout.search.type=http"  # a model's own settings name none
    if isinstance(search, Searcher | str | Path) and "://" not in str(search):
        found = search if isinstance(search, Searcher) else _searcher(Path(search))
        corpus = [] if found.corpus is None else [override("retriever.corpus", found.corpus)]
        return [typed, override("retriever.index_dir", found.index_dir), *corpus, f"rollout.search.topk={found.topk}"]
    url = search if isinstance(search, str) or server is None else server.search_url
    return [typed, f"rollout.search.urls={json.dumps([url])}"]


def _searcher(path: Path) -> Searcher:
    return Searcher(corpus=path) if path.is_file() else Searcher(path)


def reward_setting(reward: str | RewardFunction, server: CallableServer | None) -> dict[str, Any]:
    """Return the settings of a reward by its name, or by the server of its function."""
    if isinstance(reward, str):
        return {"type": reward}
    assert server is not None
    name = getattr(reward, "__name__", "")
    return {"type": "http", "url": server.reward_url, "name": name if name.isidentifier() else "reward"}
