"""Unpack downloaded files: gzip, zip, tar (also inside a gzip with another name), and parts of one file.

The content decides, not the name: Search-R1's `wiki-18.jsonl.gz` holds a tar archive with one file.
"""

from __future__ import annotations

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, cast

from foray.data.download import require_space
from protocol.errors import UserError
from protocol.runtime.progress import Progress

_CHUNK = 1 << 24
_TAR_MAGIC, _TAR_PLACE = b"ustar", 257


def join(parts: Sequence[Path], target: Path, progress: Progress) -> None:
    """Write the parts, one after another, as `target`, then delete them."""
    total = sum(part.stat().st_size for part in parts)
    require_space(target, total)
    with _building(target) as file, progress.task(f"{target.name}: joining {len(parts)} parts", total, "B") as task:
        for part in parts:
            with part.open("rb") as source:
                _copy(source, file, lambda: task(file.tell()))
    _finish(target, parts)


def unpack(packed: Path, target: Path, progress: Progress, member: str = "") -> None:
    """Write the file inside `packed` as `target`, then delete `packed`.

    member  name (or its end) of the file to take from an archive with several. Raises UserError for a damaged archive,
            or one with several files and no `member`.
    """
    size = max(packed.stat().st_size, 1)
    try:
        with packed.open("rb") as file, progress.task(f"{target.name}: unpacking", size, "B") as task:
            magic = file.read(4)
            file.seek(0)

            def tick() -> None:
                task(file.tell())

            if magic[:2] == b"PK":
                with zipfile.ZipFile(file) as archive:
                    names = [info.filename for info in archive.infolist() if not info.is_dir()]
                    chosen = _chosen(names, member, packed)
                    require_space(target, archive.getinfo(chosen).file_size)
                    with archive.open(chosen) as source:
                        _write(source, target, tick)
            else:
                with _plain(file, magic) as source:
                    head = source.peek(512) if hasattr(source, "peek") else b""
                    if head[_TAR_PLACE : _TAR_PLACE + len(_TAR_MAGIC)] == _TAR_MAGIC:
                        _untar(source, target, packed, member, tick)
                    else:
                        _write(source, target, tick)
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(
            f"cannot unpack {packed}", why=str(error) or type(error).__name__, todo="delete it and download it again"
        ) from None
    _finish(target, [packed])


def _plain(file: IO[bytes], magic: bytes) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file, "rb")) if magic[:2] == b"\x1f\x8b" else file


def _untar(source: IO[bytes], target: Path, packed: Path, member: str, tick: Callable[[], None]) -> None:
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
            _write(content, target, tick)
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


def _write(source: IO[bytes], target: Path, tick: Callable[[], None]) -> None:
    with _building(target) as file:
        _copy(source, file, tick)


def _copy(source: IO[bytes], file: IO[bytes], tick: Callable[[], None]) -> None:
    """Copy to the end of `source`, and call `tick` after each piece."""
    while piece := source.read(_CHUNK):
        file.write(piece)
        tick()


def _finish(target: Path, packed: Sequence[Path]) -> None:
    _part(target).replace(target)
    for path in packed:
        path.unlink()
