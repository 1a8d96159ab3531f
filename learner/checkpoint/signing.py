"""The run's key, with which the manifests of its checkpoints are signed (HMAC-SHA256, RFC 2104).

The key is FORAY_RUN_KEY, or the text of the file that FORAY_RUN_KEY_FILE names, or else one that the first start
makes in `run.dir/run.key` (mode 0600).

What that protects against: a checkpoint of another run, one of another person that was copied into the directory, one
whose manifest was changed by accident or by hand. With the key from the environment also against whoever may write to
the run directory but does not know the key. With the key in the run directory not against that one: who can read
`run.key` can sign. Nothing in a checkpoint is executed when it is read, signed or not.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from protocol.runtime.files import create_once, durable_mkdir

KEY_VARIABLE, KEY_FILE_VARIABLE = "FORAY_RUN_KEY", "FORAY_RUN_KEY_FILE"
KEY_FILE = "run.key"
SHORTEST = 16
"""Characters that a key has at least; one that we make has 64, which are 256 random bits."""
SIGNATURE = "signature"


class RunKey:
    """A key that signs and verifies. `source`: where it is from, for messages."""

    def __init__(self, key: str, source: str) -> None:
        """Raise UserError for a key that is too short to be one."""
        if len(key) < SHORTEST:
            raise UserError(
                f"the run's key from {source} has {len(key)} characters",
                why=f"checkpoints are signed with it, and it must have at least {SHORTEST}",
                todo="make one: python -c 'import secrets; print(secrets.token_hex(32))'",
            )
        self._key, self.source = key.encode(), source

    @property
    def name(self) -> str:
        """Eight hex digits that tell keys apart and say nothing of the key."""
        return self._mac(b"foray run key")[:8]

    def sign(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        """Return the signature of a manifest, to be put into it as its field SIGNATURE."""
        return {"key": self.name, "hmac_sha256": self._mac(_canonical(manifest))}

    def refuses(self, manifest: Mapping[str, Any]) -> str:
        """ "" when the manifest was signed with this key and has not changed since; else what is wrong."""
        found = manifest.get(SIGNATURE)
        if not isinstance(found, dict):
            return "it is not signed"
        if not hmac.compare_digest(str(found.get("hmac_sha256")).encode(), self._mac(_canonical(manifest)).encode()):
            named = str(found.get("key"))[:8]
            if named != self.name:
                return f"it is signed with another key ({named!r}; ours is {self.name!r}, from {self.source})"
            return f"its signature does not fit: it was changed after it was signed (key {self.name!r})"
        return ""

    def _mac(self, message: bytes) -> str:
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def run_key(run_dir: Path, environ: Mapping[str, str]) -> RunKey:
    """Return the key of the run in `run_dir`; made there at the first start when the environment gives none.

    Raises UserError when the file that is named cannot be read, or holds no key.
    """
    if given := environ.get(KEY_VARIABLE, "").strip():
        return RunKey(given, KEY_VARIABLE)
    named = environ.get(KEY_FILE_VARIABLE, "")
    path = Path(named) if named else run_dir / KEY_FILE
    if not named:
        durable_mkdir(run_dir)
        create_once(path, secrets.token_hex(32) + "\n", mode=0o600)
    try:
        return RunKey(path.read_text().strip(), str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the run's key cannot be read: {path}",
            why=str(error),
            todo=f"repair the file or {KEY_FILE_VARIABLE}; without its key the run's checkpoints are not trusted",
        ) from None


def _canonical(manifest: Mapping[str, Any]) -> bytes:
    """Return the same bytes for the same content, whatever the order and the blanks. Without the signature itself."""
    rest = {name: value for name, value in manifest.items() if name != SIGNATURE}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
