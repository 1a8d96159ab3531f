"""The recipe of an evaluation: everything that a score depends on besides the policy. Stored with the result. Pure.

    {"format": 1,
     "foray": "VERSION",
     "subject": {..},          # what was evaluated: target, model digest, run; never compared
     "methods": {"policy": {..settings, "prompt_sha256"}},
     "limits": {"max_turns": 4, ..},
     "sampler": {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "n": 1},
     "search": true,
     "retriever": {"topk": 3, "fingerprint": "..", ..},
     "data": {"nq": {"questions": 3610, "fingerprint": ".."}},
     "judge": null}

An unknown part is null: the limits of a rollout server that was given by its URL, for example.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from foray.evaluation.suites import DataSet
from foray.watch.records import leaves
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.environment.prompts import TEMPLATES

FORMAT = 1
ASIDE = ("format", "subject")
"""Parts that do not describe the conditions."""
LIMITS = ("max_turns", "max_new_tokens", "max_obs_tokens", "max_context", "reserve_tokens", "on_search_error")
INFO = ("backend", "type", "kind", "fingerprint", "index_fingerprint", "corpus_sha256", "passages", "encoder")
"""Fields of a retriever's `GET /info` that decide what it finds, where it has them."""

EvalRecipe = dict[str, Any]


def digest(value: Any) -> str:
    """Return 16 hex digits of the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def template_of(environment: EnvironmentSettings | None) -> dict[str, Any] | None:
    """Return name and digest of the policy's prompt template and tools; None if unknown."""
    if environment is None:
        return None
    template = TEMPLATES[environment.template]
    tools = [tool.model_dump(mode="json") for tool in environment.tools]
    return {"name": template.name, "sha256": digest([vars(template), tools]), "tools": [tool["type"] for tool in tools]}


def limits_of(environment: EnvironmentSettings | None) -> dict[str, Any] | None:
    """Return the limits of a trajectory; None if unknown."""
    return None if environment is None else {name: getattr(environment, name) for name in LIMITS}


def retriever_of(info: Mapping[str, Any] | None, topk: int) -> dict[str, Any]:
    """Return what is known of the retriever. info: its `GET /info`; None: a server without it."""
    known = info or {}
    return {"topk": topk} | {name: known[name] for name in INFO if name in known}


def data_of(sets: Sequence[DataSet]) -> dict[str, dict[str, Any]]:
    """Return number and fingerprint of the questions of each data set."""
    return {one.name: {"questions": len(one.questions), "fingerprint": one.fingerprint} for one in sets}


def differences(first: EvalRecipe, second: EvalRecipe) -> list[str]:
    """Return how the conditions of two results differ, one line a value. Methods and data of both are compared only.

    Every line names the value and both sides: `sampler.temperature: 0.0 and 1.0`.
    """
    lines = []
    for name in sorted((first.keys() | second.keys()) - set(ASIDE)):
        one, two = first.get(name), second.get(name)
        if name in ("methods", "data") and isinstance(one, Mapping) and isinstance(two, Mapping):
            common = one.keys() & two.keys()
            one, two = ({key: side[key] for key in common} for side in (one, two))
        left, right = dict(leaves(one, name)), dict(leaves(two, name))
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key):
                lines.append(f"{key}: {_shown(left.get(key))} and {_shown(right.get(key))}")
    return lines


def _shown(value: Any) -> str:
    text = "unknown" if value is None else str(value)
    return text if len(text) <= 20 else f"{text[:12]}.."
