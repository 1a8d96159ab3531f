"""What a model's folder says about itself, read from its JSON files: no torch, no transformers.

The layout is that of sentence-transformers: `modules.json` lists the steps (Transformer, Pooling, Dense, Normalize),
each with a folder of its own; `config_sentence_transformers.json` holds prompts and the similarity. A plain AutoModel
folder has `config.json` only and says nothing. What a folder does not say is None here, and empty prompts say nothing:
newer versions of sentence-transformers write them whether or not anybody meant them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from retriever.encoder.table import Pooling

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NEW_MODES: dict[str, Pooling] = {"cls": "cls", "max": "max", "mean": "mean", "lasttoken": "last"}
_QUERY = ("query", "search_query", "retrieval.query")
_PASSAGE = ("passage", "document", "corpus", "search_document", "retrieval.passage")
_BEHIND_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text")
"""Models whose count of positions starts behind the padding id, 1."""
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True)
class Folder:
    """The statements of one folder; None where it is silent."""

    path: Path
    """Where config.json, tokenizer and weights are (a subfolder in old sentence-transformers layouts)."""
    config: dict[str, Any]
    """Content of config.json."""
    pooling: Pooling | None = None
    normalize: bool | None = None
    dense: tuple[Path, ...] = ()
    """Folders of the Dense steps, in order, between pooling and normalisation."""
    query_prompt: str | None = None
    passage_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    """Texts are lower-cased before the tokenizer."""
    has_modules: bool = False
    """It is in sentence-transformers' layout."""

    @property
    def positions(self) -> int | None:
        """Longest input in tokens that the model has positions for, None where it does not matter."""
        found = self.config.get("max_position_embeddings")
        if not isinstance(found, int) or found <= 0:
            return None
        return found - 2 if str(self.config.get("model_type", "")).replace("_", "-") in _BEHIND_PADDING else found


def read_folder(root: Path) -> Folder:
    """What `root` says. UserError where it is no model's folder, or asks for a step that we do not have."""
    if not root.is_dir():
        raise UserError(
            f"there is no model in {root}",
            why="it is not a folder; nothing is downloaded from a hub",
            todo="put the model's files there (config.json, tokenizer, safetensors) and give the folder's path",
        )
    modules = _json(root / "modules.json", list) if (root / "modules.json").exists() else []
    steps = [(str(step.get("type", "")).rpartition(".")[2], root / str(step.get("path", ""))) for step in modules]
    _check_order(root, [name for name, _ in steps])
    path = next((place for name, place in steps if name == "Transformer"), root)
    said = _optional(root / "config_sentence_transformers.json")
    bert = _optional(path / "sentence_bert_config.json")
    return Folder(
        path=path,
        config=_json(path / "config.json", dict),
        pooling=next((_pooling(place / "config.json") for name, place in steps if name == "Pooling"), None),
        normalize=_normalize(bool(steps), [name for name, _ in steps], said),
        dense=tuple(place for name, place in steps if name == "Dense"),
        query_prompt=_prompt(said, _QUERY),
        passage_prompt=_prompt(said, _PASSAGE),
        max_tokens=bert.get("max_seq_length"),
        lower_case=bool(bert.get("do_lower_case")),
        has_modules=bool(steps),
    )


def _check_order(root: Path, names: list[str]) -> None:
    unknown = [name for name in names if name not in _KNOWN]
    if unknown:
        raise UserError(
            f"the model in {root} has a step {unknown[0]!r}, which this encoder does not know",
            why=f"its modules.json asks for {' -> '.join(names)}; known are {', '.join(_KNOWN)}",
            todo="serve the model behind an OpenAI-compatible /v1/embeddings and take the encoder `openai`",
        )
    middle = names[2:-1] if names[-1:] == ["Normalize"] else names[2:]
    if names and (names[:2] != ["Transformer", "Pooling"] or any(name != "Dense" for name in middle)):
        raise UserError(
            f"the steps of the model in {root} come in an order that this encoder does not know",
            why=f"modules.json asks for {' -> '.join(names)}, known is Transformer, Pooling, any Dense, Normalize",
            todo="serve the model behind an OpenAI-compatible /v1/embeddings and take the encoder `openai`",
        )


def _pooling(path: Path) -> Pooling:
    said = _json(path, dict)
    mode = said.get("pooling_mode")
    chosen = [mode] if isinstance(mode, str) else list(mode or [])
    modes = [_NEW_MODES.get(str(name)) for name in chosen] or [
        _MODES.get(key) for key, on in said.items() if key.startswith("pooling_mode_") and on is True
    ]
    if len(modes) != 1 or modes[0] is None or said.get("include_prompt") is False:
        raise UserError(
            f"{path} asks for a pooling that this encoder does not have",
            why="known are the mean, the maximum, the first and the last token, one of them, prompt included",
            todo="serve the model behind an OpenAI-compatible /v1/embeddings and take the encoder `openai`",
        )
    return modes[0]


def _normalize(has_modules: bool, names: list[str], said: dict[str, Any]) -> bool | None:
    if "Normalize" in names:
        return True
    similarity = said.get("similarity_fn_name")
    if similarity in ("cosine", "dot"):
        return bool(similarity == "cosine")
    # a missing Normalize is no statement: models that are compared by cosine often leave it out
    return None


def _prompt(said: dict[str, Any], names: tuple[str, ...]) -> str | None:
    prompts = said.get("prompts") or {}
    default = said.get("default_prompt_name")
    return next((prompts[name] for name in (*names, default) if prompts.get(name)), None)


def _optional(path: Path) -> dict[str, Any]:
    return _json(path, dict) if path.exists() else {}


def _json(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {path}",
            why=error.strerror or str(error),
            todo="give a model's folder: config.json, tokenizer, weights",
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON", why=str(error)) from None
    if not isinstance(value, kind):
        raise UserError(f"{path} holds a {type(value).__name__}, not a {kind.__name__}")
    return value
