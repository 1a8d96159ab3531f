"""The catalogue of `foray data list`: known data sets, corpora, indexes and models, and which are on this disk.

`downloads.json` in the data directory records the sha256 of each downloaded file at its first download. A later
download of the same file must have the same content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from foray.data.download import Remote, fetch, hub_file, hub_listing
from foray.data.unpack import join, unpack
from protocol.errors import UserError
from protocol.runtime.config import parse_yaml
from protocol.runtime.files import atomic_write
from protocol.runtime.progress import Progress
from protocol.runtime.settings_errors import suggest

CATALOGUE = Path(__file__).with_name("catalogue.yaml")
RECORD = "downloads.json"
MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Files of a model to download: weights in safetensors, tokenizer, configuration."""


@dataclass(frozen=True)
class Entry:
    """One row of the catalogue; the fields are explained in catalogue.yaml."""

    name: str
    kind: str
    about: str
    hub: str = ""
    url: str = ""
    files: tuple[str, ...] = ()
    folder: str = ""
    makes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    member: str = ""
    seen: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Return where it comes from: the page of its repository, or its address."""
        return self.url or "https://huggingface.co/" + self.hub.removeprefix("models/")

    def remotes(self) -> dict[str, Remote]:
        """Return path below the data directory -> file to download. Asks the hub for the files of a model."""
        if self.url:
            name = self.url.rpartition("/")[2]
            return {self._below(name): Remote(name, self.url)}
        files = self.files or [name for name in hub_listing(self.hub) if _is_of_model(name)]
        if not files:
            raise UserError(f"{self.hub} holds no model in safetensors", todo="look at the repository's page")
        return {self._below(name): hub_file(self.hub, name) for name in files}

    def results(self) -> tuple[str, ...]:
        """Return the paths that `get` leaves below the data directory; those of a model are unknown without the hub."""
        if self.url:
            return tuple(self.makes) or (self._below(self.url.rpartition("/")[2]),)
        consumed = {part for parts in self.makes.values() for part in parts}
        kept = [path for name in self.files if (path := self._below(name)) not in consumed]
        return (*kept, *self.makes)

    def present(self, root: Path) -> bool:
        """Return whether everything of it is in the data directory `root`."""
        if self.kind == "model":
            return any((root / self.folder).glob("*.safetensors")) and (root / self.folder / "config.json").is_file()
        return all((root / path).is_file() for path in self.results())

    def _below(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


def _is_of_model(name: str) -> bool:
    return ("/" not in name or name.startswith("1_Pooling/")) and name.endswith(MODEL_SUFFIXES)


@cache
def catalogue() -> dict[str, Entry]:
    """Return the entries by name."""
    found = {}
    for name, row in parse_yaml(CATALOGUE.read_text(encoding="utf-8")).items():
        facts = {key: _fact(row.pop(key)) for key in ("rows", "license", "note") if key in row}
        makes = {path: tuple(parts) for path, parts in row.pop("makes", {}).items()}
        found[name] = Entry(name=name, files=tuple(row.pop("files", ())), makes=makes, facts=facts, **row)
    return found


def _fact(row: dict[str, str]) -> str:
    return f"{row['value']} ({row['source']})"


def entry(name: str) -> Entry:
    """Return an entry. Raises UserError for an unknown name."""
    known = catalogue()
    if name not in known:
        raise UserError(
            f"unknown data set {name!r}", todo=f"{suggest(name, tuple(known))}; `foray data list` shows all of them"
        )
    return known[name]


def get(wanted: Entry, root: Path, progress: Progress) -> list[Path]:
    """Download an entry into `root` and unpack it; return its files. What is there already is not fetched again.

    Raises UserError, and what `download.fetch` raises: the same call then continues.
    """
    if wanted.present(root):
        progress(f"{wanted.name}: already in {root}")
    else:
        remotes = wanted.remotes()
        done = {part for path, parts in wanted.makes.items() if (root / path).is_file() for part in parts}
        for path, remote in remotes.items():
            if path not in done and not (root / path).is_file():
                _fetch(remote, root, path, progress)
        for path, parts in wanted.makes.items():
            if not (root / path).is_file():
                _make(root / path, [root / part for part in parts], wanted.member, progress)
    if wanted.kind == "model":
        return [root / wanted.folder]
    return [root / path for path in wanted.results()]


def get_url(url: str, root: Path, progress: Progress, sha256: str = "") -> Path:
    """Download one file of any address into `root`; return it. Raises what `download.fetch` raises."""
    name = url.partition("?")[0].rpartition("/")[2]
    if name in ("", ".", ".."):
        raise UserError(f"{url} does not end in a file name", todo="give the address of one file")
    if not (root / name).is_file():
        _fetch(Remote(name, url, sha256=sha256), root, name, progress)
    return root / name


def recorded(root: Path) -> dict[str, dict[str, str]]:
    """Return path -> {url, sha256} of everything that was downloaded into `root`."""
    try:
        rows = json.loads((root / RECORD).read_bytes())["files"]
        return {str(path): {name: str(row[name]) for name in ("url", "sha256")} for path, row in rows.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"cannot read {root / RECORD}", why=str(error), todo="delete it: checksums are then recorded again"
        ) from None


def _fetch(remote: Remote, root: Path, path: str, progress: Progress) -> None:
    known = recorded(root).get(path)
    first = known["sha256"] if known is not None and known["url"] == remote.url else ""
    target = root / path
    expected = remote.sha256 or first
    sha256 = fetch(Remote(remote.name, remote.url, remote.repo, remote.path, expected), target, progress)
    if not expected:
        progress(f"{remote.name}: no checksum is published; recorded sha256 {sha256[:16]}.. in {root / RECORD}")
    files = recorded(root) | {path: {"url": remote.url, "sha256": sha256}}
    atomic_write(root / RECORD, json.dumps({"files": files}, indent=1) + "\n", durable=False)


def _make(target: Path, parts: Sequence[Path], member: str, progress: Progress) -> None:
    if len(parts) > 1:
        join(parts, target, progress)
    else:
        unpack(parts[0], target, progress, member)
