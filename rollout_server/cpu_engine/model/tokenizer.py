"""The model's tokenizer, with the `tokenizers` library only: importing transformers would take seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from protocol.errors import UserError
from protocol.runtime.files import read_json_object

LONG_TEXT = 1 << 14
"""Number of characters from which encoding is slow enough that other threads must be able to run."""
WORD_MARK = "\u2581"
"""SentencePiece's mark for a space."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""Character of a byte-level vocabulary -> byte. Printable bytes map to themselves (GPT-2, Radford et al. 2019)."""


class Tokenizer:
    """Converts text to ids and back. `eos_ids` end a generation without ignore_eos."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        try:
            self._rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"cannot read {path}", why=str(error), todo="save the tokenizer with the model") from None
        self._rust.no_truncation()
        self._rust.no_padding()
        self.eos_ids = _eos_ids(directory, self._rust)
        self._added = self._rust.get_added_tokens_decoder()
        decoder = json.dumps(json.loads(self._rust.to_str())["decoder"], ensure_ascii=False)
        self._byte_level, self._word_marks = '"ByteLevel"' in decoder, WORD_MARK in decoder
        self._texts: dict[int, str] = {}
        self._spellings: dict[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, by default with the special tokens that the tokenizer adds."""
        if len(text) < LONG_TEXT:
            ids: list[int] = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        # unlike `encode`, this releases the GIL
        (long,) = self._rust.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(long.ids)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of `ids`. Incomplete characters become U+FFFD."""
        text: str = self._rust.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def text_of(self, token: int) -> str:
        """Return the text of a single token; U+FFFD for a part of a character. Special tokens are included."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = self.decode([token], False)
        return found

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token; b"" for an unknown id."""
        piece: str | None = self._rust.id_to_token(token)
        if piece is None or token in self._added:
            return (piece or "").encode()
        if self._byte_level and all(char in BYTE_OF for char in piece):
            return bytes(BYTE_OF[char] for char in piece)
        if match := _BYTE.fullmatch(piece):
            return bytes.fromhex(match[1])
        return (piece.replace(WORD_MARK, " ") if self._word_marks else self.text_of(token)).encode()

    def spelling(self, token: int) -> str:
        """Return the text of one token in OpenAI's form: a part of a character as `bytes:` and its bytes in hex."""
        found = self._spellings.get(token)
        if found is None:
            raw = self.bytes_of(token)
            try:
                found = raw.decode()
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._spellings[token] = found
        return found

    def is_special(self, token: int) -> bool:
        """Return whether decoding with `skip_special_tokens` omits this token."""
        return token in self._added and self._added[token].special


def _eos_ids(directory: Path, rust: Any) -> frozenset[int]:
    """Return the end tokens of generation_config.json, config.json and the tokenizer together, as SGLang does."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(directory / name).get("eos_token_id")
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    token = read_json_object(directory / "tokenizer_config.json").get("eos_token")
    number = rust.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None
    found.update([] if number is None else [number])
    return frozenset(found)
