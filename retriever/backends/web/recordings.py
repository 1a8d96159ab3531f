"""Recorded replies on disk, found by their request: repeat a run without network and cost.

One JSON file per reply, `PROVIDER-HASH.json` with `request` and `reply`, written atomically. Requests have no key, and
replies are redacted before they are recorded, so the files can be shared.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from protocol.runtime.files import atomic_write
from retriever.backends.web.provider import ProviderRequest, WebSearchError

log = logging.getLogger(__name__)


class Recordings:
    """A directory of replies. Blocking: call it in a thread."""

    def __init__(self, directory: Path, provider: str, *, writing: bool) -> None:
        self._directory, self._provider = directory, provider
        self.unwritten = 0
        try:
            if writing:
                directory.mkdir(parents=True, exist_ok=True)
            elif not directory.is_dir():
                raise FileNotFoundError(2, "no such directory")
        except OSError as error:
            raise UserError(
                f"cannot use {directory} for recordings",
                why=error.strerror or str(error),
                todo="set retriever.online.recordings to a directory of recordings, or record=record to create one",
            ) from None

    def path(self, request: ProviderRequest) -> Path:
        """Return the path of the recorded reply to a request."""
        line = json.dumps([self._provider, _plain(request)], sort_keys=True, ensure_ascii=True)
        return self._directory / f"{self._provider}-{hashlib.sha256(line.encode()).hexdigest()[:32]}.json"

    def load(self, request: ProviderRequest) -> Any:
        """Return the reply. Raises WebSearchError: "not_recorded" if there is none, "garbage" for a damaged file."""
        path = self.path(request)
        try:
            content = json.loads(path.read_bytes())
            if content["request"] != _plain(request):
                raise ValueError("it belongs to another request")
            return content["reply"]
        except FileNotFoundError:
            raise WebSearchError("not_recorded", path.name) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise WebSearchError("garbage", f"recording {path.name}: {type(error).__name__}") from None

    def save(self, request: ProviderRequest, reply: Any) -> bool:
        """Record a reply, replacing an older one; return whether it was written.

        A failed write loses only the recording, not the answer, which has been paid for. It is counted in `unwritten`
        and logged.
        """
        path = self.path(request)
        content = {"provider": self._provider, "request": _plain(request), "reply": reply}
        try:
            # ASCII: a reply may contain a lone surrogate, which UTF-8 cannot encode
            text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True)
            atomic_write(path, text + "\n", durable=False)
            return True
        except OSError as error:
            self.unwritten += 1
            log.error("could not record a reply: %s", error.strerror)
            return False


def _plain(request: ProviderRequest) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(request)))
    return plain
