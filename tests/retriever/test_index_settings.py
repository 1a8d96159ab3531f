"""Which settings need a new build, which only another search, and which neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from retriever.encoder.config import HashedEncoderSettings
from retriever.index import index_identity, search_time
from retriever.index.config import FaissFlatSettings, FaissGpuSettings, FaissHnswSettings, IndexBase, IndexSettings

SINGLE = [member for member in get_args(get_args(IndexSettings)[0]) if member.model_fields["type"].default != "hybrid"]
OTHER: dict[str, Any] = {
    "encoder": HashedEncoderSettings(dim=16),
    "dtype": "float16",
    "devices": (1,),
    "stopwords": "english",
    "tokens": "lucene",
    "stemming": "porter",
    "precision": "float32",
    "opq": True,
}
CASES = [(member, field) for member in SINGLE for field in member.model_fields if field not in ("type", "file")]


@pytest.mark.parametrize(("member", "field"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_is_of_one_sort(member: type[IndexBase], field: str) -> None:
    assert not member.SEARCH_TIME & member.PLACEMENT
    plain = member()
    value = OTHER[field] if field in OTHER else getattr(plain, field) + 1
    changed = plain.model_copy(update={field: value})
    assert (index_identity(changed) == index_identity(plain)) == (field in member.SEARCH_TIME | member.PLACEMENT)
    assert (search_time(changed) == search_time(plain)) == (field not in member.SEARCH_TIME)
    json.dumps([index_identity(changed), search_time(changed)])


@pytest.mark.parametrize("member", SINGLE)
def test_names_of_fields_that_are_no_fields_would_be_found(member: type[IndexBase]) -> None:
    assert set(member.model_fields) >= member.SEARCH_TIME | member.PLACEMENT


def test_the_type_is_part_of_the_identity() -> None:
    assert len({json.dumps(index_identity(member()), sort_keys=True) for member in SINGLE}) == len(SINGLE)


def test_with_a_file_the_settings_of_a_build_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.index"
    file.write_bytes(b"content")
    assert index_identity(FaissHnswSettings(file=file, m=8)) == index_identity(FaissHnswSettings(file=file))
    assert index_identity(FaissHnswSettings(file=file)) != index_identity(FaissFlatSettings(file=file))
    assert search_time(FaissGpuSettings(file=file)) == search_time(FaissGpuSettings())
