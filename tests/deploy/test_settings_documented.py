"""Every field of every settings class, including members of unions, has a description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from deploy.config import RunConfig
from protocol.runtime.config import descriptions
from protocol.settings import Settings

KIND = "type"
"""The field that names a member of a union; the member's own docstring says what it is."""


def classes(kind: Any, seen: set[type]) -> Iterator[type[Settings]]:
    """Every settings class that can occur below `kind`."""
    if isinstance(kind, type) and issubclass(kind, Settings) and kind not in seen:
        seen.add(kind)
        yield kind
        for field in kind.model_fields.values():
            yield from classes(field.annotation, seen)
    for part in get_args(kind):
        yield from classes(part, seen)


ALL = list(classes(RunConfig, set()))


def test_members_of_unions_are_among_them() -> None:
    assert {"PpoSettings", "WandbSettings", "DistributedPublishSettings"} <= {c.__name__ for c in ALL}
    assert len(ALL) > 40


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_field_says_what_it_does(kind: type[Settings]) -> None:
    missing = [name for name in kind.model_fields if not descriptions(kind).get(name) and name != KIND]
    assert not missing
    assert kind.__doc__
