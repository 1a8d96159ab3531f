"""The run's key, with which the manifests of its checkpoints are signed (HMAC-SHA256, RFC 2104).

The key is FORAY_RUN_KEY, or the text of the file named by FORAY_RUN_KEY_FILE, or a key that the first start generates
in `run.dir/run.key` (mode 0600).

The signature protects against a checkpoint of another run, a foreign checkpoint copied into the directory, and a
manifest changed by accident or manually. A key from the environment also protects against anyone who can write to the
run directory but does not know the key. A key in the run directory does not: any user who can read `run.key` can sign.
Nothing in a checkpoint is executed when it is read, signed or not.
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
"""Minimum length of a key, in characters; a generated key has 64 (256 random bits)."""
SIGNATURE = "signature"


class RunKey:
    """Signs and verifies manifests. `source`: origin of the key, for messages."""

    def __init__(self, key: str, source: str) -> None:
        """Raise UserError if the key is too short."""
        if len(key) < SHORTEST:
            raise UserError(
                f"the run key from {source} is too short: {len(key)} characters",
                why=f"it signs the checkpoints and needs at least {SHORTEST} characters",
                todo="generate one: python -c 'import secrets; print(secrets.token_hex(32))'",
            )
        self._key, self.source = key.encode(), source

    @property
    def name(self) -> str:
        """Return eight hex digits that identify the key without revealing it."""
        return self._mac(b"foray run key")[:8]

    def sign(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        """Return the signature of a manifest, for its field SIGNATURE."""
        return {"key": self.name, "hmac_sha256": self._mac(_canonical(manifest))}

    def refuses(self, manifest: Mapping[str, Any]) -> str:
        """Return "" if the manifest is signed with this key and unchanged, else the reason why not."""
        found = manifest.get(SIGNATURE)
        if not isinstance(found, dict):
            return "it is not signed"
        if not hmac.compare_digest(str(found.get("hmac_sha256")).encode(), self._mac(_canonical(manifest)).encode()):
            named = str(found.get("key"))[:8]
            if named != self.name:
                return f"it is signed with another key ({named!r}; this run's key is {self.name!r}, from {self.source})"
            return f"its signature is invalid: it was changed after it was signed (key {self.name!r})"
        return ""

    def _mac(self, message: bytes) -> str:
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def run_key(run_dir: Path, environ: Mapping[str, str]) -> RunKey:
    """Return the key of the run in `run_dir`. Generated there at the first start if the environment has none.

    Raises UserError if the named file cannot be read or contains no key.
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
            f"cannot read the run key: {path}",
            why=str(error),
            todo=f"fix the file or {KEY_FILE_VARIABLE}; without its key the run's checkpoints are not trusted",
        ) from None


def _canonical(manifest: Mapping[str, Any]) -> bytes:
    """Return canonical bytes of the content without the signature: independent of key order and white space."""
    rest = {name: value for name, value in manifest.items() if name != SIGNATURE}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
