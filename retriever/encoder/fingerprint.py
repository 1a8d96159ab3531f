"""Which model a folder holds, as 16 hexadecimal digits: the same wherever the folder is, another for other weights.

Read are the model's JSON files (without the keys that saving again changes), the tokenizer's files, and of every tensor
in safetensors its name, type, shape and its first and last 32 KiB: a trained model differs from its start in every
tensor, so this tells models apart without reading 14 GB. How the tensors are spread over files does not matter. Other
weight files are read in full. A change of a few numbers in the middle of one tensor, by hand, is not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from protocol.errors import UserError

EDGE_BYTES = 32 * 1024
_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "__version__"})
_TOKENIZER_STATE = frozenset({"truncation", "padding"})
"""Parts of tokenizer.json that depend on how it was last called."""
_TEXT_FILES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
_JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "modules.json",
    "sentence_bert_config.json",
)
_BIN = "pytorch_model*.bin"


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits over everything in `folder` that decides a vector. UserError where it holds no weights."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _counts(path))
    stamps = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return _digest(folder, stamps)


def _counts(path: Path) -> bool:
    return path.name in _JSON_FILES or path.name in _TEXT_FILES or path.suffix == ".safetensors" or path.match(_BIN)


@lru_cache(maxsize=64)
def _digest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    """The stamps make a changed file a new key."""
    parts: list[tuple[str, str]] = []
    weights = 0
    directories: dict[Path, set[str]] = {}
    for name, _, _ in stamps:
        directories.setdefault(Path(name).parent, set()).add(Path(name).name)
    for directory, names in directories.items():
        where = str(directory.relative_to(folder))
        tensors = sorted(name for name in names if name.endswith(".safetensors"))
        others = [] if tensors else sorted(name for name in names if Path(name).match(_BIN))
        weights += len(tensors) + len(others)
        for name in tensors:
            parts += [(f"{where}/{tensor}", digest) for tensor, digest in _tensors(directory / name)]
        parts += [(f"{where}/{name}", _sha256(directory / name)) for name in others]
        parts += [(f"{where}/{name}", _sha256(directory / name)) for name in names if name in _TEXT_FILES]
        parts += [(f"{where}/{name}", _json(directory / name)) for name in names if name in _JSON_FILES]
    if not weights:
        raise UserError(f"there are no weights in {folder}", todo="put model.safetensors (or its shards) there")
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()[:16]


def _tensors(path: Path) -> list[tuple[str, str]]:
    """Name and digest of every tensor of one safetensors file: 8 bytes of length, a JSON header, the data."""
    with path.open("rb") as file:
        try:
            size = int.from_bytes(file.read(8), "little")
            if size > os.fstat(file.fileno()).st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(size))
            found = []
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, end = entry["data_offsets"]
                digest = hashlib.sha256(f"{entry['dtype']} {entry['shape']}".encode())
                for at in sorted({start, max(start, end - EDGE_BYTES)}):
                    file.seek(8 + size + at)
                    digest.update(file.read(min(EDGE_BYTES, end - at)))
                found.append((name, digest.hexdigest()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a safetensors file", why=str(error), todo="copy the model again") from None
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(path: Path) -> str:
    try:
        value: Any = json.loads(path.read_bytes())
    except ValueError:
        # whoever reads it for its content complains in words
        return _sha256(path)
    if isinstance(value, dict):
        dropped = _VOLATILE | (_TOKENIZER_STATE if path.name == "tokenizer.json" else frozenset())
        value = {key: item for key, item in value.items() if key not in dropped}
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
