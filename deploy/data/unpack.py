"""Unpack downloaded files: gzip, zip, tar (also inside a gzip with another name), and parts of one file.

The content decides, not the name: Search-R1's `wiki-18.jsonl.gz` holds a tar archive with one file.
"""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, cast

from deploy.data.download import require_space
from protocol.errors import UserError

_CHUNK = 1 << 24
_TAR_MAGIC, _TAR_PLACE = b"ustar", 257
Tick = Callable[[str], None]


def join(parts: Sequence[Path], target: Path, tick: Tick) -> None:
    """Write the parts, one after another, as `target`, then delete them."""
    require_space(target, sum(part.stat().st_size for part in parts))
    with _building(target) as file:
        for number, part in enumerate(parts, 1):
            tick(f"{target.name}: part {number} of {len(parts)}")
            with part.open("rb") as source:
                shutil.copyfileobj(source, file, _CHUNK)
    _finish(target, parts)


def unpack(packed: Path, target: Path, tick: Tick, member: str = "") -> None:
    """Write the file inside `packed` as `target`, then delete `packed`.

    member  name (or its end) of the file to take from an archive with several. Raises UserError for a damaged archive,
            or one with several files and no `member`.
    """
    tick(f"{target.name}: unpacking {packed.name}")
    try:
        with packed.open("rb") as file:
            magic = file.read(4)
        if magic[:2] == b"PK":
            with zipfile.ZipFile(packed) as archive:
                names = [info.filename for info in archive.infolist() if not info.is_dir()]
                chosen = _chosen(names, member, packed)
                require_space(target, archive.getinfo(chosen).file_size)
                with archive.open(chosen) as source:
                    _write(source, target)
        else:
            with _plain(packed, magic) as source:
                head = source.peek(512) if hasattr(source, "peek") else b""
                if head[_TAR_PLACE : _TAR_PLACE + len(_TAR_MAGIC)] == _TAR_MAGIC:
                    _untar(source, target, packed, member)
                else:
                    _write(source, target)
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(
            f"cannot unpack {packed}", why=str(error) or type(error).__name__, todo="delete it and download it again"
        ) from None
    _finish(target, [packed])


def _plain(packed: Path, magic: bytes) -> IO[bytes]:
    if magic[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.open(packed, "rb"))
    return packed.open("rb")


def _untar(source: IO[bytes], target: Path, packed: Path, member: str) -> None:
    """Write the one regular file of a tar stream, or the one named `member`."""
    written: list[str] = []
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for info in archive:
            if not info.isfile() or not info.name.endswith(member):
                continue
            written.append(info.name)
            if len(written) > 1:
                _part(target).unlink(missing_ok=True)
                raise _several(packed, written)
            require_space(target, info.size)
            content = archive.extractfile(info)
            assert content is not None
            _write(content, target)
    if not written:
        raise UserError(f"{packed} holds no file{f' named {member}' if member else ''}")


def _chosen(names: Sequence[str], member: str, packed: Path) -> str:
    found = [name for name in names if name.endswith(member) and not name.startswith("__MACOSX/")]
    if not found:
        raise UserError(f"{packed} holds no file named {member}", why=f"it has {', '.join(names[:10])}")
    if len(found) > 1:
        raise _several(packed, found)
    return found[0]


def _several(packed: Path, names: Sequence[str]) -> UserError:
    return UserError(
        f"{packed} holds several files: {', '.join(names[:10])}", todo="unpack it yourself: unzip or tar -xf"
    )


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".unpacking")


def _building(target: Path) -> IO[bytes]:
    target.parent.mkdir(parents=True, exist_ok=True)
    return _part(target).open("wb")


def _write(source: IO[bytes], target: Path) -> None:
    with _building(target) as file:
        shutil.copyfileobj(source, file, _CHUNK)


def _finish(target: Path, packed: Sequence[Path]) -> None:
    _part(target).replace(target)
    for path in packed:
        path.unlink()
