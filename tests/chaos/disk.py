"""A small file system for a folder, which can be full: ENOSPC at each write, also of the shortest file."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SIZE = 384 << 20
"""Bytes, for twenty minutes of a tiny model with its checkpoints, weights and journal."""
PIECE = 4 << 20


@dataclass
class SmallDisk:
    """A tmpfs at `folder` from `open` on, until `close`, which leaves the files in an ordinary folder."""

    folder: Path
    mounted: bool = False

    def open(self) -> None:
        """Mount it, with the files of the folder. Raises CalledProcessError where `mountable` is False."""
        before = self._moved()
        self.folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(self.folder)], check=True)
        self.mounted = True
        shutil.copytree(before, self.folder, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(before)

    def _moved(self) -> Path:
        return self.folder.rename(self.folder.with_name(f"{self.folder.name}.before"))

    @property
    def _filler(self) -> Path:
        return self.folder / ".filler"

    def fill(self, left: int) -> None:
        """Use all space but `left` bytes."""
        with self._filler.open("ab", buffering=0) as file:
            try:
                while (more := self.free_bytes() - left) > 0:
                    file.write(b"f" * min(PIECE, more))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free_bytes(self) -> int:
        """Bytes that are left."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        if not self.mounted:
            return
        self.free()
        kept = self.folder.with_name(f"{self.folder.name}.kept")
        shutil.copytree(self.folder, kept, symlinks=True)
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
        self.mounted = False
        self.folder.rmdir()
        kept.rename(self.folder)


@cache
def mountable() -> bool:
    """Whether this user may mount a file system."""
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True, check=False).returncode == 0
