"""How one model turns texts into vectors, decided once: explicit setting, else the folder, else the table.

An explicit pooling, or `normalize: false`, that contradicts the folder is refused: it was trained otherwise. Prefixes
may be replaced (an instruction is the user's to word) and lengths may be cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from protocol.errors import UserError
from retriever.config_encoder import TransformerEncoderSettings
from retriever.encoder.folder import Folder, read_folder
from retriever.encoder.table import BY_NAME, FAMILIES, Family, Pooling, family_of

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """What decides a vector besides the weights. Lengths in tokens, prefix and special tokens included."""

    family: str
    query_prefix: str
    passage_prefix: str
    pooling: Pooling
    normalize: bool
    max_query: int
    max_passage: int


def resolve(settings: TransformerEncoderSettings) -> tuple[Recipe, Folder, Folder]:
    """The recipe, the passages' folder and the queries' folder (the same one, unless DPR). UserError where unclear."""
    passages = read_folder(settings.model)
    queries = read_folder(settings.query_model) if settings.query_model else passages
    family = _family(settings, passages)
    if family.name == "dpr" and settings.query_model is None:
        raise UserError(
            f"{settings.model} is one half of DPR",
            why="passages and questions have an encoder each",
            todo="give the context encoder as encoder.model and the question encoder as encoder.query_model",
        )
    _refuse_contradictions(settings, passages)
    if queries is not passages:
        _refuse_contradictions(settings, queries)
        if (passages.pooling, passages.normalize) != (queries.pooling, queries.normalize):
            raise UserError(f"{settings.model} and {settings.query_model} pool or normalise differently")
    recipe = Recipe(
        family=family.name,
        query_prefix=_first(settings.query_prefix, queries.query_prompt, family.query_prefix),
        passage_prefix=_first(settings.passage_prefix, passages.passage_prompt, family.passage_prefix),
        pooling=_first(settings.pooling, passages.pooling, family.pooling),
        normalize=_first(settings.normalize, passages.normalize, family.normalize),
        max_query=_length("max_query_tokens", settings.max_query_tokens, queries, family.max_query),
        max_passage=_length("max_passage_tokens", settings.max_passage_tokens, passages, family.max_passage),
    )
    return recipe, passages, queries


def _family(settings: TransformerEncoderSettings, folder: Folder) -> Family:
    if settings.family != "auto":
        return BY_NAME[settings.family]
    origin = str(folder.config.get("_name_or_path", ""))
    found = family_of(_name(settings.model)) or family_of(re.split(r"[/\\]", origin.rstrip("/\\"))[-1])
    if found is None and str(folder.config.get("model_type")) == "dpr":
        found = BY_NAME["dpr"]
    if found is None and (folder.has_modules or settings.pooling):
        found = BY_NAME["plain"]
    if found is None:
        raise UserError(
            f"cannot tell how {settings.model} makes vectors",
            why="its name is of no known family, and it has no modules.json that says how",
            todo=f"set encoder.family to one of {', '.join(family.name for family in FAMILIES)}",
        )
    return found


def _name(path: Path) -> str:
    """The model's name: that of the folder; in a hub's cache (models--ORG--NAME/snapshots/REVISION) the model's."""
    path = path.absolute()
    return path.parent.parent.name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name


def _refuse_contradictions(settings: TransformerEncoderSettings, folder: Folder) -> None:
    if settings.pooling and folder.pooling and settings.pooling != folder.pooling:
        raise UserError(
            f"encoder.pooling = {settings.pooling} contradicts the model in {folder.path}",
            why=f"its own 1_Pooling says {folder.pooling}, and it was trained with that",
            todo="remove encoder.pooling",
        )
    if settings.normalize is False and folder.normalize:
        raise UserError(
            f"encoder.normalize = false contradicts the model in {folder.path}",
            why="it says itself that its vectors are compared by cosine, so they have length 1",
            todo="remove encoder.normalize",
        )


def _length(name: str, asked: int | None, folder: Folder, usual: int) -> int:
    limit = folder.positions
    if asked is None:
        asked = folder.max_tokens or usual
        return min(asked, limit) if limit else asked
    if limit and asked > limit:
        raise UserError(
            f"encoder.{name} = {asked} is more than the model in {folder.path} has positions for",
            why=f"its config.json allows {limit} tokens",
            todo=f"set encoder.{name} to {limit} or less",
        )
    return asked


def _first(asked: T | None, said: T | None, usual: T) -> T:
    """The first that is not None."""
    return asked if asked is not None else said if said is not None else usual
