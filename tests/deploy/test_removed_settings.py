"""Settings that were removed: a file that has one is told what to do, a record of an earlier version is still read."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from deploy.config import RunConfig, from_tree, load_config
from deploy.run.run_dir import read_configuration
from protocol.errors import UserError
from protocol.runtime.settings_errors import _models, _tags, removed


def names(kind: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted name of every setting, with the types of unions as errors show them."""
    for name, field in kind.model_fields.items():
        members = _models(field.annotation)
        yield ".".join((*path, name))
        for member in members:
            for tag in _tags(member) or ("",):
                yield from names(member, (*path, name, *([tag] if tag else [])))


def test_no_row_hides_a_setting_that_is_there() -> None:
    present = list(names(RunConfig))
    assert len(present) > 500
    hidden = [(pattern, name) for pattern in removed() for name in present if fnmatchcase(name, pattern)]
    assert not hidden
    assert all(row.keys() <= {"was", "now"} and row for row in removed().values())


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("launch.shutdown_s=3", "unknown key 'launch.shutdown_s': it was removed; delete it: its value is always 20.0"),
        ("launch.learner_threads=2", "it was removed; set learner.engine.threads"),
        ("retriever.online={type: brave, country: de}", "it was removed; set params: {country: CODE}"),
        ("retriever.online={type: serper, country: de}", "it was removed; set params: {gl: CODE}"),
    ],
)
def test_an_old_name_is_answered_with_what_to_do(override: str, advice: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [override])
    assert advice in caught.value.render()


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """At the former default a removed setting changes nothing; another value is reported."""
    path = tmp_path / "resolved.yaml"

    def recorded(shutdown_s: float) -> RunConfig:
        learner = {"publish": {"type": "adapter", "alpha": 8.0}, "model": {"lora": {"rank": 4, "alpha": 8.0}}}
        learner |= {
            "replay": {"passes": 1, "rebatch": False, "export": False},
            "algorithm": {"type": "grpo", "std_ddof": 1},
        }
        launch = {"shutdown_s": shutdown_s, "engines": 2}
        path.write_text(yaml.safe_dump({"run": {"dir": str(tmp_path)}, "learner": learner, "launch": launch}))
        return from_tree(read_configuration(path, tmp_path))

    found = recorded(20.0)
    assert found.launch.engines == 2 and found.learner.model.lora.alpha == 8.0
    with pytest.raises(UserError, match=r"launch\.shutdown_s"):
        recorded(3.0)
