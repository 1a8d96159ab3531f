"""The model's tokenizer, read by the `tokenizers` library alone: importing transformers would cost seconds at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from protocol.errors import UserError


class Tokenizer:
    """Text to ids and back. `eos_ids` end a generation unless it says ignore_eos."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        try:
            self._rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"cannot read {path}", why=str(error), todo="save the tokenizer beside the model") from None
        self._rust.no_truncation()
        self._rust.no_padding()
        self.eos_ids = _eos_ids(directory, self._rust)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer's own template adds."""
        ids: list[int] = self._rust.encode(text).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; bytes that are no whole character become U+FFFD."""
        text: str = self._rust.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def _eos_ids(directory: Path, rust: Any) -> frozenset[int]:
    """End tokens of generation_config.json, config.json and the tokenizer together, as SGLang takes them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    token = _read_json(directory / "tokenizer_config.json").get("eos_token")
    number = rust.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None
    found.update([] if number is None else [number])
    return frozenset(found)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON", why=str(error)) from None
    return value if isinstance(value, dict) else {}
