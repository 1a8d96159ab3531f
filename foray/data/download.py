"""Download one file over HTTP: resumable, verified. Files of the Hugging Face hub go through `huggingface_hub` if it is
installed (Xet, logins), else over plain HTTP.

A partial file is `NAME.part`, with the server's ETag in `NAME.part.json`: if the content changed in the
meantime, the download begins again (`If-Range`, RFC 9110, section 13.1.5).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, cast

from protocol.errors import ForayError, UserError
from protocol.runtime.http.client import read_json
from protocol.runtime.progress import Progress, amount
from protocol.runtime.timing import backoff_s

ATTEMPTS = 6
"""Connections in a row that may fail without a byte."""
TIMEOUT_S, PAUSE_S = 60.0, 1.0
CHUNK, LARGEST_LISTING = 1 << 20, 64 << 20
HUB = "https://huggingface.co"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Remote:
    """A file on a server.

    name    its name in messages
    url     its address
    repo    of the Hugging Face hub: "datasets/OWNER/NAME" or "models/OWNER/NAME", with `path` in it; "" elsewhere
    sha256  expected checksum in hex, "" if unknown
    """

    name: str
    url: str
    repo: str = ""
    path: str = ""
    sha256: str = ""


class Interrupted(ForayError):
    """The connection failed too often; the partial file is kept."""


def hub_file(repo: str, path: str, sha256: str = "") -> Remote:
    """Return the file `path` of a repository of the Hugging Face hub, at HF_ENDPOINT if it is set."""
    kind, _, name = repo.partition("/")
    prefix = "datasets/" if kind == "datasets" else ""
    return Remote(path, f"{endpoint()}/{prefix}{name}/resolve/main/{urllib.parse.quote(path)}", repo, path, sha256)


def endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT", HUB).rstrip("/")


def hub_listing(repo: str) -> list[str]:
    """Return the paths of a repository's files. Raises UserError."""
    url = f"{endpoint()}/api/{repo}/revision/main"
    try:
        with _open(urllib.request.Request(url), _login()) as response:
            found = read_json(response, LARGEST_LISTING)
        return [str(file["rfilename"]) for file in found["siblings"]]
    except (OSError, ValueError, KeyError, TypeError, HTTPException) as error:
        raise _unreachable(url, error) from None


def fetch(remote: Remote, target: Path, progress: Progress) -> str:
    """Download `remote` to `target` unless it is complete there; return its sha256.

    Raises UserError if the server has no such file, or the checksum is wrong (the file is then deleted); Interrupted if
    the connection fails too often (what arrived is kept, and the next call continues).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    expected = remote.sha256
    if remote.repo and not expected:
        expected = _hub_checksum(remote)
    through_hub = _hub_client() if remote.repo else None
    if through_hub is not None:
        part = _through_hub(through_hub, remote, target, progress)
    else:
        part = target.with_name(target.name + ".part")
        _over_http(remote, part, progress)
    found = _sha256(part, f"{remote.name}: verifying", progress)
    if expected and found != expected:
        part.unlink()
        _tag_file(part).unlink(missing_ok=True)
        raise UserError(
            f"{remote.name} has the wrong checksum and was deleted",
            why=f"its sha256 is {found}, expected {expected} ({remote.url})",
            todo="download it again; if it stays wrong, the file on the server is damaged or was changed: to accept a "
            "change, delete the file's entry in downloads.json",
        )
    part.replace(target)
    _tag_file(part).unlink(missing_ok=True)
    return found


def _sha256(path: Path, name: str, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file, progress.task(name, path.stat().st_size, "B") as task:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            task(done := done + len(chunk))
    return digest.hexdigest()


def _over_http(remote: Remote, part: Path, progress: Progress) -> None:
    """Download into `part`, continuing what is there."""
    login = _login() if remote.repo else ""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _continue(remote, part, login, progress)
            return
        except (KeyboardInterrupt, SystemExit):
            have = part.stat().st_size if part.exists() else 0
            progress(f"{remote.name}: stopped; {amount(have)} are kept in {part}")
            raise
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise _unreachable(remote.url, error) from None
            why = f"{error.code} {error.reason}"
        except (OSError, HTTPException) as error:
            why = str(error) or type(error).__name__
        gained = (part.stat().st_size if part.exists() else 0) - before
        failures = 1 if gained > 0 else failures + 1
        if failures > ATTEMPTS:
            raise Interrupted(
                f"{remote.url}: {why}; {amount(before + gained)} of {remote.name} are kept in {part}: the same command "
                "continues there"
            )
        progress(f"{remote.name}: {why}; connecting again")
        time.sleep(backoff_s(failures, PAUSE_S, TIMEOUT_S) if gained <= 0 else 0)


def _continue(remote: Remote, part: Path, login: str, progress: Progress) -> None:
    """Append the rest of the file to `part`. Raises OSError or HTTPException if the connection ends early."""
    have, tag = part.stat().st_size if part.exists() else 0, _read_tag(part, remote.url)
    request = urllib.request.Request(remote.url, headers={"Accept-Encoding": "identity"})
    if have and tag:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", tag)
    try:
        response = _open(request, login)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # all of it was there, or more than all of it
        complete = error.headers.get("Content-Range", "").rpartition("/")[2] == str(have)
        if not complete:
            part.unlink()
            raise ConnectionError("the partial file does not fit the server's") from None
        return
    with response:
        resumed = response.status == 206
        length = response.headers.get("Content-Length")
        total = int(length) + (have if resumed else 0) if length else None
        _write_tag(part, remote.url, _strong(response.headers.get("ETag")))
        done = have if resumed else 0
        require_space(part, (total or 0) - done)
        most = done + shutil.disk_usage(part.parent).free // 2 if total is None else total
        with part.open("ab" if resumed else "wb") as file, progress.task(remote.name, total, "B") as task:
            task(done)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                task(done)
                if done > most:
                    part.unlink()
                    raise UserError(
                        f"{remote.url} sent more than {amount(most)}",
                        why="the server does not say how large the file is, and half of the free disk space is used",
                        todo="check the address, or download it yourself",
                    )
        if total is not None and done < total:
            raise ConnectionError(f"the connection was closed after {amount(done)} of {amount(total)}")


def _through_hub(client: _HubClient, remote: Remote, target: Path, progress: Progress) -> Path:
    """Download with `huggingface_hub`, which keeps partial files itself; return the complete file."""
    kind, _, repo = remote.repo.partition("/")
    folder = target.parent / ".hub"
    progress(f"{remote.name}: downloading from {remote.repo.partition('/')[2]}")
    done, failures = "", 0
    while not done:
        try:
            done = client.download(
                repo,
                remote.path,
                repo_type=kind.removesuffix("s"),
                local_dir=folder,
                endpoint=endpoint(),
            )
        except client.failures as error:
            status = getattr(getattr(error, "response", None), "status_code", 0)
            if 400 <= status < 500 and status != 429:
                raise _unreachable(remote.url, error) from None
            failures += 1
            if failures > ATTEMPTS:
                raise Interrupted(f"{remote.url}: {error}; the same command continues") from None
            progress(f"{remote.name}: {str(error).splitlines()[0][:200]}; connecting again")
            time.sleep(backoff_s(failures, PAUSE_S, TIMEOUT_S))
    part = target.with_name(target.name + ".part")
    shutil.move(done, part)
    shutil.rmtree(folder)
    return part


@dataclass(frozen=True)
class _HubClient:
    """`huggingface_hub.hf_hub_download`, and what it raises for a connection that fails."""

    download: Callable[..., str]
    failures: tuple[type[Exception], ...]


def _hub_client() -> _HubClient | None:
    try:
        import httpx
        from huggingface_hub import hf_hub_download
    except ImportError:
        return None
    return _HubClient(cast(Callable[..., str], hf_hub_download), (OSError, ValueError, httpx.HTTPError))


class _Here(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Refuse redirects: the hub's answer itself names the checksum, not that of the storage behind it."""


class _Elsewhere(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Refuse what only this machine can reach, and other protocols. Raises UserError."""
        before, after = (urllib.parse.urlsplit(url) for url in (req.full_url, newurl))
        if after.scheme not in ("http", "https") or (_is_private(after.hostname) and not _is_private(before.hostname)):
            raise UserError(
                f"{req.full_url} redirects to {newurl}, which was not followed",
                why="it is not http or https, or an address of a private network",
                todo="give that address itself, if you trust it",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_private(host: str | None) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:  # the connection fails, or a proxy knows the name
        return False
    return any(not ipaddress.ip_address(str(row[4][0]).partition("%")[0]).is_global for row in found)


_opener = urllib.request.build_opener(_Elsewhere)


def _hub_checksum(remote: Remote) -> str:
    """Return the sha256 that the hub has for a file, "" if it has none (it does for large files only)."""
    request = urllib.request.Request(remote.url, method="HEAD")
    if login := _login():
        request.add_unredirected_header("Authorization", login)
    try:
        with urllib.request.build_opener(_Here).open(request, timeout=TIMEOUT_S) as response:
            headers = response.headers
    except urllib.error.HTTPError as error:
        if error.code not in (301, 302, 303, 307, 308):
            raise _unreachable(remote.url, error) from None
        headers = error.headers
    except (OSError, HTTPException) as error:
        raise _unreachable(remote.url, error) from None
    tag = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").strip('"')
    return tag if _SHA256.fullmatch(tag) else ""


def _open(request: urllib.request.Request, login: str) -> HTTPResponse:
    if login:  # not sent to the target of a redirect, which is another host
        request.add_unredirected_header("Authorization", login)
    return cast(HTTPResponse, _opener.open(request, timeout=TIMEOUT_S))


def _login() -> str:
    token = os.environ.get("HF_TOKEN", "")
    return f"Bearer {token}" if token else ""


def _unreachable(url: str, error: Exception) -> UserError:
    code = getattr(error, "code", 0) or getattr(getattr(error, "response", None), "status_code", 0)
    todo = "check the address and your network; behind a mirror, set HF_ENDPOINT"
    if code in (401, 403):
        todo = "accept the terms on the repository's page, then export HF_TOKEN with a token of your account"
    elif code == 404:
        todo = "check the name: the server has no such file"
    return UserError(f"cannot download {url}", why=str(error).strip().splitlines()[0][:300], todo=todo)


def _strong(tag: str | None) -> str:
    """Return the entity tag if it may be used to resume: a weak one may not."""
    return "" if tag is None or tag.startswith("W/") else tag


def _tag_file(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_tag(part: Path, url: str) -> str:
    try:
        found = json.loads(_tag_file(part).read_text())
        return str(found["etag"]) if found["url"] == url else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write_tag(part: Path, url: str, tag: str) -> None:
    _tag_file(part).write_text(json.dumps({"url": url, "etag": tag}))


def require_space(target: Path, needed: int) -> None:
    """Raise UserError if the disk of `target` has less than `needed` bytes free."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise UserError(
            f"not enough disk space for {target.name} in {target.parent.absolute()}",
            why=f"{amount(needed)} are needed, {amount(free)} are free",
            todo="free some, or give another directory with --to; the next call continues",
        )
