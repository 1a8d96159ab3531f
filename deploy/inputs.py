"""The files that a run needs before anything is started, and what is wrong with them, in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.config import RunConfig
from protocol.errors import UserError


@dataclass(frozen=True)
class Missing:
    """A setting that names a file which is not there."""

    setting: str
    path: Path
    todo: str

    def error(self) -> UserError:
        """As an error."""
        return UserError(f"{self.setting} = {self.path}: there is no such file or directory", todo=self.todo)


def missing(config: RunConfig) -> list[Missing]:
    """What the processes that would be started here will not find."""
    found: list[Missing] = []
    model = config.run.model
    if not (model / "config.json").is_file():
        todo = "give a directory in Hugging Face layout (config.json, model.safetensors, tokenizer.json): run.model=..."
        found.append(Missing("run.model", model, todo))
    corpus = config.retriever.needed_corpus
    if config.num_retrievers and corpus is not None and not corpus.is_file():
        todo = 'give a file of {"id", "contents"} lines: retriever.corpus=...'
        found.append(Missing("retriever.corpus", corpus, todo))
    if config.launch.learner and not config.learner.questions.is_file():
        todo = 'give a file of {"question", "answers"} lines: learner.questions=...'
        found.append(Missing("learner.questions", config.learner.questions, todo))
    return found
