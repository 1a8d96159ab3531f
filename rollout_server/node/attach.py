"""Validate an attached engine before it is registered.

Raises UserError for what an operator must correct: no connection, not an engine, missing key, a different model, a
different tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from protocol.runtime.files import read_json_object
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError
from rollout_server.engine.client import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from rollout_server.environment.tokenizer import TrajectoryTokenizer, load_tokenizer

log = logging.getLogger(__name__)

PROBE_TEXT = "Who wrote <think>Emma</think>? <search> naïve 東京 1815 </search>\n\n  <answer>Jane  Austen</answer>"
"""Words, tags, accents, another script, digits and white space: different tokenizers will encode it differently."""


async def validate_engine(client: EngineAdmin, url: str, model: Path, *, wait_s: float) -> None:
    """Raise UserError unless `url` is an engine with the architecture and the tokenizer of `model`.

    wait_s  timeout for its first answer
    """
    info = await _first_answer(client, url, wait_s)
    if "weight_version" not in info:
        raise _no_engine(url, f"its /model_info has no weight version: {str(info)[:200]}")
    try:
        # aborts an unknown request, only to check that our key is accepted by the control routes
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
        return UserError(f"no engine answers at {url}", why=error.detail, todo="check the URL and that it is running")
    if any(code in error.detail for code in (" 401 ", " 403 ")):
        return UserError(
            f"the engine at {url} requires a key",
            why=error.detail,
            todo=f"export {API_KEY_VARIABLE} with its --api-key, and {ADMIN_KEY_VARIABLE} with its --admin-api-key",
        )
    return _no_engine(url, error.detail)


def _no_engine(url: str, why: str) -> UserError:
    return UserError(
        f"the server at {url} is not an engine",
        why=why,
        todo="use the base URL of an SGLang server (0.5.21 or newer) or of a CPU engine, not of a router",
    )


def _same_architecture(info: dict[str, Any], url: str, model: Path) -> None:
    ours = read_json_object(model / "config.json")
    for name in ("model_type", "vocab_size"):
        theirs = info.get(name)
        if theirs is not None and ours.get(name) is not None and theirs != ours[name]:
            raise UserError(
                f"the engine at {url} serves a different model than the run",
                why=f"its {name} is {theirs}, but {model} has {ours[name]}",
                todo="start it with --model-path set to the run's model, or change run.model",
            )


async def _same_tokenizer(client: EngineAdmin, info: dict[str, Any], url: str, model: Path) -> None:
    """Raise UserError for a different tokenizer. Compares its files if readable, otherwise its ids of PROBE_TEXT."""
    ours = load_tokenizer(model)
    why = _by_files(ours, info)
    if why is None:
        why = await _by_text(client, ours)
    if why is None:
        log.warning("could not compare the tokenizer of %s with the run's", url)
    elif why:
        raise UserError(
            f"the engine at {url} has a different tokenizer than the run",
            why=why,
            todo="start it with the run's model, or set run.model to the model that it serves",
        )


def _by_files(ours: TrajectoryTokenizer, info: dict[str, Any]) -> str | None:
    """Return "" for the same tokenizer, else the difference; None if its files are not on this machine."""
    named = str(info.get("tokenizer_path") or info.get("model_path") or "")
    if not named or not (Path(named) / "tokenizer.json").is_file():
        return None
    theirs = load_tokenizer(Path(named)).fingerprint
    return "" if theirs == ours.fingerprint else f"fingerprint {theirs[:12]} of {named}, not {ours.fingerprint[:12]}"


async def _by_text(client: EngineAdmin, ours: TrajectoryTokenizer) -> str | None:
    try:
        theirs = await client.tokenize(PROBE_TEXT)
    except EngineError as error:
        log.info("the engine has no /tokenize: %s", error)
        return None
    expected = ours.encode_trusted(PROBE_TEXT)
    return (
        "" if theirs == expected else f"ids of {PROBE_TEXT[:20]!r}... are {theirs and theirs[:8]}, not {expected[:8]}"
    )
