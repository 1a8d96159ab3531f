"""Check, before it is registered, that an engine that others run is the one that this run needs.

What an operator has to correct is a UserError: nothing listens there, it is no engine, it wants a key, it serves
another model, it speaks with another tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError
from rollout_server.engine.client import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from rollout_server.environment.tokenizer import TrajectoryTokenizer, load_tokenizer

log = logging.getLogger(__name__)

PROBE_TEXT = "Who wrote <think>Emma</think>? <search> naïve 東京 1815 </search>\n\n  <answer>Jane  Austen</answer>"
"""Words, tags, accents, another script, digits and blanks: two tokenizers that agree on it agree on much."""


async def validate_engine(client: EngineAdmin, url: str, model: Path, *, wait_s: float) -> None:
    """Returns when `url` is an engine that serves the architecture and the tokenizer of `model`, else UserError.

    wait_s  how long it may take to answer at all
    """
    info = await _first_answer(client, url, wait_s)
    if "weight_version" not in info:
        raise _no_engine(url, f"its /model_info says nothing of a weight version: {str(info)[:200]}")
    try:
        # of a request that does not exist: only to see whether our key opens the control routes
        await client.abort(uuid.uuid4().hex)
    except EngineError as error:
        raise _refused(url, error) from None
    _same_architecture(info, url, model)
    await _same_tokenizer(client, info, url, model)


async def _first_answer(client: EngineAdmin, url: str, wait_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return await client.model_info()
        except EngineError as error:
            if error.cause in ("unreachable", "timeout") and time.monotonic() < deadline:
                log.info("waiting for %s to answer: %s", url, error.detail)
                await asyncio.sleep(min(1.0, wait_s))
                continue
            raise _refused(url, error) from None


def _refused(url: str, error: EngineError) -> UserError:
    if error.cause in ("unreachable", "timeout", "http_500"):
        return UserError(f"no engine answers at {url}", why=error.detail, todo="check the URL, and that it is running")
    if any(code in error.detail for code in (" 401 ", " 403 ")):
        return UserError(
            f"the engine at {url} wants a key",
            why=error.detail,
            todo=f"export {API_KEY_VARIABLE} with its --api-key, and {ADMIN_KEY_VARIABLE} with its --admin-api-key",
        )
    return _no_engine(url, error.detail)


def _no_engine(url: str, why: str) -> UserError:
    return UserError(
        f"what answers at {url} is not an engine",
        why=why,
        todo="give the base URL of an SGLang server (0.5.21 or newer) or of an embedded engine, not of a router",
    )


def _same_architecture(info: dict[str, Any], url: str, model: Path) -> None:
    path = model / "config.json"
    ours = json.loads(path.read_bytes()) if path.is_file() else {}
    for name in ("model_type", "vocab_size"):
        theirs = info.get(name)
        if theirs is not None and ours.get(name) is not None and theirs != ours[name]:
            raise UserError(
                f"the engine at {url} serves another model than the run's",
                why=f"its {name} is {theirs}, that of {model} is {ours[name]}",
                todo="start it with --model-path of the run's model, or set run.model",
            )


async def _same_tokenizer(client: EngineAdmin, info: dict[str, Any], url: str, model: Path) -> None:
    """By the files where we can read them, else by what it makes of a text, where it shows that."""
    ours = load_tokenizer(model)
    why = _by_files(ours, info)
    if why is None:
        why = await _by_text(client, ours)
    if why is None:
        log.warning("the tokenizer of %s could not be compared with the run's", url)
    elif why:
        raise UserError(
            f"the engine at {url} has another tokenizer than the run",
            why=why,
            todo="start it with the run's model, or set run.model to what it serves",
        )


def _by_files(ours: TrajectoryTokenizer, info: dict[str, Any]) -> str | None:
    """ "" the same, else the difference; None: its files are not on this machine."""
    named = str(info.get("tokenizer_path") or info.get("model_path") or "")
    if not named or not (Path(named) / "tokenizer.json").is_file():
        return None
    theirs = load_tokenizer(Path(named)).fingerprint
    return "" if theirs == ours.fingerprint else f"fingerprint {theirs[:12]} of {named}, not {ours.fingerprint[:12]}"


async def _by_text(client: EngineAdmin, ours: TrajectoryTokenizer) -> str | None:
    try:
        theirs = await client.tokenize(PROBE_TEXT)
    except EngineError as error:
        log.info("it does not tokenise: %s", error)
        return None
    expected = ours.encode_trusted(PROBE_TEXT)
    return (
        "" if theirs == expected else f"it reads {PROBE_TEXT[:20]!r}... as {theirs and theirs[:8]}, not {expected[:8]}"
    )
