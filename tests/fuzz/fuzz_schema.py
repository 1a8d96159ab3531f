"""Requests that schemathesis draws from the OpenAPI descriptions, valid and invalid ones.

Every answer is held against the description: no server error, a status, a media type and a body that it knows.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import hypothesis
import requests
import schemathesis
from fuzz_raw import FINE, Tally
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

TIMEOUT_S = 20.0
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
ROUTES_OF_FRAMEWORK = frozenset({404, 405})
"""What the router itself answers when a hurt path leads elsewhere."""


def send_drawn(kind: str, url: str, document: dict[str, Any], count: int, seed: int) -> Tally:
    """Sends about `count` requests, shared out over operations; those with a body get five times as many."""
    schema = schemathesis.openapi.from_dict(_lighter(document))
    operations = [found.ok() for found in schema.get_all_operations()]
    weights = {(o.method, o.path): 1 if o.method == "get" else 5 for o in operations}
    each = count / sum(weights.values())
    tally = Tally()
    with requests.Session() as session:
        for operation in operations:
            number = max(2, round(each * weights[operation.method, operation.path]))
            # an operation without parameters has no invalid requests
            modes = (
                [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
                if operation.body or list(operation.iter_parameters())
                else [GenerationMode.POSITIVE]
            )
            for mode in modes:
                _send(kind, url, operation, mode, number // len(modes), seed, session, tally)
    return tally


def _lighter(document: dict[str, Any]) -> dict[str, Any]:
    """The description with less work in one request: hundreds of episodes a request would be a load test."""
    document = copy.deepcopy(document)
    asked = document["components"].get("schemas", {}).get("EpisodesRequest")
    if asked is not None:
        asked["properties"]["n"]["maximum"] = 3
        asked["properties"]["questions"]["maxItems"] = 3
        asked["properties"]["pin"] = {"const": False}  # nodes are given 0.3 s to notice one
    return document


def _send(
    kind: str, url: str, operation: Any, mode: GenerationMode, count: int, seed: int, session: Any, tally: Tally
) -> None:
    sent = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal sent
        sent += 1
        _one(kind, url, operation, case, session, tally)

    # few shapes there are: hypothesis stops when it has drawn each of them
    end = time.monotonic() + 600
    while sent < count and time.monotonic() < end:
        before = sent
        try:
            send()
        except hypothesis.errors.Unsatisfiable:
            return  # nothing breaks the description of this operation
        if sent - before < 2:
            break


def _one(kind: str, url: str, operation: Any, case: Any, session: Any, tally: Tally) -> None:
    tally.sent += 1
    request = f"{operation.method.upper()} {operation.path}".encode()
    try:
        response = case.call(base_url=url, session=session, timeout=TIMEOUT_S)
    except requests.Timeout:
        tally.bad.append(("no answer in time", request + b" " + repr(case.body).encode("utf-8", "replace")[:1000]))
        return
    except (requests.RequestException, UnicodeError) as error:
        tally.statuses[f"({type(error).__name__})"] += 1
        return
    tally.statuses[str(response.status_code)] += 1
    if (kind, operation.path.encode(), response.status_code) in FINE:
        return
    checks = CHECKS if response.status_code not in ROUTES_OF_FRAMEWORK else []
    try:
        case.validate_response(response, checks=[not_a_server_error, *checks])
    except FailureGroup as failures:
        for failure in failures.exceptions:
            detail = str(failure).splitlines()[0:3]
            raw = request + b" " + repr(case.body).encode("utf-8", "replace")[:500] + b" -> " + response.content[:300]
            tally.bad.append((" ".join([type(failure).__name__, *detail])[:200], raw))
