"""Small readers for JSON that somebody else wrote: every surprise is Failed("garbage"), never a KeyError."""

from __future__ import annotations

from typing import Any

from retriever.online.provider import Failed


def expect(reply: dict[str, Any], *names: str) -> None:
    """Raise Failed("garbage") where none of `names` is there: then this is no reply of this provider."""
    if not any(name in reply for name in names):
        raise Failed("garbage", f"none of {', '.join(names)} in the reply")


def objects(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects of the list `name`; [] where it is absent or null."""
    value = holder.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise Failed("garbage", f"{name} is no list")
    return [item for item in value if isinstance(item, dict)]


def inner(holder: dict[str, Any], name: str) -> dict[str, Any]:
    """The object `name`; {} where it is absent or null. Of a list, its first object."""
    value = holder.get(name)
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, dict)), None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Failed("garbage", f"{name} is no object")
    return value


def text(holder: dict[str, Any], *names: str) -> str:
    """The first of `names` that is a text or a number with something in it, as a text; "" without one."""
    for name in names:
        value = holder.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return ""


def facts(holder: dict[str, Any]) -> str:
    """The short texts of an object, one `name: value` a line, without addresses: attributes of a panel."""
    lines = [f"{name}: {value}" for name, value in holder.items() if isinstance(value, str) and "://" not in value]
    return "\n".join(lines)
