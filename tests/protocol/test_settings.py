"""Settings: overrides, suggestions, and actionable errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from protocol.errors import UserError
from protocol.keys import Keys
from protocol.runtime.config import override, parse_yaml, read_tree, section
from protocol.runtime.settings_errors import suggest
from protocol.settings import RunSettings, Settings


class Left(Settings):
    type: Literal["left"] = "left"
    speed: float = Field(default=1.0, gt=0)


class Right(Settings):
    type: Literal["right"] = "right"
    height: int = 3


class Nested(Settings):
    side: Annotated[Left | Right, Field(discriminator="type")] = Left()
    lr: float = 0.1


def test_overrides_reach_into_the_tree(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run:\n  id: mine\nlearner:\n  side: {type: left}\n")
    tree = read_tree(path, ["run.max_lag=4", "learner.side.speed=2.5", "learner.lr=1e-4"])
    assert section(tree, "run", RunSettings).max_lag == 4
    nested = section(tree, "learner", Nested)
    assert isinstance(nested.side, Left) and nested.side.speed == 2.5 and nested.lr == 1e-4


def test_a_path_is_taken_as_it_is_spelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("a #b", "[x].jsonl", "yes", 'q"\\', "1e3", "x: y", "# é"):
        assert section(read_tree(None, [override("run.dir", Path(name))]), "run", RunSettings).dir == Path(name)
    for given, expected in (("~/x", "/home/ada/x"), ("a #b", "a #b"), ("'a #b'", "a #b"), ("~x", "~x")):
        assert section(read_tree(None, [f"run.dir={given}"]), "run", RunSettings).dir == Path(expected)
    assert section(read_tree(None, ["run.steps=3 # three"]), "run", RunSettings).steps == 3


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"run": {"max_lagg": 1}}, "did you mean 'max_lag'?"),
        ({"run": {"id": "../x"}}, "run.id"),
        ({"run": {"group_size": 0}}, "greater than or equal to 1"),
    ],
)
def test_wrong_values_are_named_with_a_suggestion(tree: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        section(tree, "run", RunSettings)
    assert expected in caught.value.render()


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ({"type": "left", "sped": 2}, "did you mean 'speed'?"),
        ({"type": "up"}, "unknown type 'up': valid names: left, right"),
        ({"type": "right", "heigth": 2}, "did you mean 'height'?"),
        ({"height": 2}, "set learner.side.type to one of left, right"),
    ],
)
def test_keys_inside_a_union_are_suggested_too(side: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        section({"learner": {"side": side}}, "learner", Nested)
    assert expected in caught.value.render()


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("run: {}\n")
    with pytest.raises(UserError) as caught:
        read_tree(tmp_path / "demmo.yaml")
    assert "demo.yaml" in caught.value.todo


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [(["nonsense"], "key=value"), (["runn.id=x"], "did you mean 'run'?"), (["run.id.x.y=1"], "single value")],
)
def test_bad_overrides_are_explained(tmp_path: Path, overrides: list[str], expected: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {id: x}\n")
    with pytest.raises(UserError) as caught:
        read_tree(path, overrides)
    assert expected in caught.value.render()


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n"])
def test_a_file_that_is_no_tree_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        read_tree(path)


def test_run_ids_cannot_leave_their_key_space() -> None:
    assert Keys("a-1").tasks == "{a-1}:tasks"
    for bad in ("", "A", "a b", "a}:x", "-a", "a" * 64):
        with pytest.raises(UserError):
            Keys(bad)


def test_redis_is_where_the_setting_says_and_else_where_the_environment_does() -> None:
    environ = {"FORAY_REDIS_URL": "redis://:geheim@outer:1/0"}
    assert RunSettings().with_redis(environ).redis_url == environ["FORAY_REDIS_URL"]
    assert RunSettings(redis_url="unix:///mine").with_redis(environ).redis_url == "unix:///mine"
    with pytest.raises(UserError, match="no Redis is configured"):
        RunSettings().with_redis({})


class Wide(Settings):
    note: str = ""
    names: tuple[str, ...] = ()
    sides: tuple[Annotated[Left | Right, Field(discriminator="type")], ...] = ()


@pytest.mark.parametrize("text", ["query: ", "2024", "1e5", "true", "[a, b]", "2024-01-01"])
def test_a_text_field_takes_an_override_as_it_is_spelt(text: str) -> None:
    tree = read_tree(None, [f"demo.note={text}"])
    assert section(tree, "demo", Wide).note == text


def test_the_text_inside_a_union_too_and_no_other_field() -> None:
    class Named(Settings):
        type: Literal["named"] = "named"
        prefix: str | None = None

    class Outer(Settings):
        inner: Annotated[Named | Left, Field(discriminator="type")] = Named()

    tree = read_tree(None, ["demo.inner.type=named", "demo.inner.prefix=query: "])
    inner = section(tree, "demo", Outer).inner
    assert isinstance(inner, Named) and inner.prefix == "query: "
    with pytest.raises(UserError, match=r"demo\.inner\.left\.speed"):
        section(read_tree(None, ["demo.inner.type=left", "demo.inner.speed=query: "]), "demo", Outer)


def test_the_bare_name_of_a_type_selects_it() -> None:
    tree = read_tree(None, ["demo.sides=[left, {type: right, height: 5}]"])
    assert section(tree, "demo", Wide).sides == (Left(), Right(height=5))
    assert section(read_tree(None, ["demo.side=right"]), "demo", Nested).side == Right()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("demo.names=em", "demo.names = 'em': must be a list, in brackets: [a, b]"),
        (
            "demo.sides=[up]",
            "must be a group of settings: {name: value}, type = left or right",
        ),
        ("demo.sides=[{type: lift}]", "unknown type 'lift': did you mean 'left'?"),
        ("run.id=qwen2.5", "an id has at most 63 lower-case letters, digits and hyphens"),
    ],
)
def test_common_mistakes_are_explained_in_terms_of_yaml(override: str, expected: str) -> None:
    tree = read_tree(None, [override])
    with pytest.raises(UserError) as caught:
        section(tree, override.split(".")[0], RunSettings if override.startswith("run") else Wide)
    assert expected in caught.value.render()


def test_an_unknown_name_is_answered_with_the_nearest_or_all() -> None:
    assert suggest("sandbx", ("timeout_s", "sandbox")) == "did you mean 'sandbox'?"
    assert suggest("allow_unisolated", ("timeout_s",)) == "valid names: timeout_s"


@pytest.mark.parametrize(
    ("given", "expected"), [("top_k=1", "of a group equal"), ("top_k=0", "of a group equal"), ("top_p=0", "top_p")]
)
def test_sampling_that_draws_nothing_is_refused(given: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        section(read_tree(None, [f"run.{given}"]), "run", RunSettings)
    kept = section(read_tree(None, ["run.top_k=2", "run.top_p=0.95"]), "run", RunSettings)
    assert (kept.top_k, kept.top_p) == (2, 0.95)


@pytest.mark.parametrize(
    "text", ["run: {id: a}\nrun: {steps: 3}\n", "run:\n  id: a\n  id: b\n", "learner: {optim: {lr: 1, 'lr': 2}}\n"]
)
def test_two_equal_keys_are_refused_with_their_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="not valid YAML") as refused:
        read_tree(path)
    assert "occurs twice" in refused.value.why and "line " in refused.value.why
    with pytest.raises(UserError, match="not valid YAML"):
        read_tree(None, ["run={id: a, id: b}"])


def test_an_anchor_may_be_merged_and_overridden() -> None:
    text = "a: &a {x: 1, y: 2}\ntop: {b: &b {<<: *a, x: 3}}\nc: {<<: *b, y: 4}\n"
    assert parse_yaml(text) == {"a": {"x": 1, "y": 2}, "top": {"b": {"x": 3, "y": 2}}, "c": {"x": 3, "y": 4}}
