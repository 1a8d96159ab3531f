"""Keys: the API key is for generation, only the admin key is for changes of the engine."""

from __future__ import annotations

import aiohttp
import pytest
from contract_engines import ADMIN_KEY, USER_KEY, Server

USER, ADMIN, WRONG, NONE = USER_KEY, ADMIN_KEY, "wrong", ""
CASES = [
    ("GET", "/health", NONE, 200),
    ("GET", "/metrics", NONE, 200),
    ("GET", "/ready", NONE, 200),
    ("GET", "/model_info", NONE, 401),
    ("GET", "/model_info", WRONG, 401),
    ("GET", "/model_info", USER, 200),
    ("POST", "/generate", NONE, 401),
    ("POST", "/generate", USER, 200),
    ("GET", "/flush_cache", USER, 401),
    ("GET", "/flush_cache", ADMIN, 200),
    ("POST", "/pause_generation", USER, 401),
    ("POST", "/continue_generation", ADMIN, 200),
    ("POST", "/abort_request", USER, 401),
    ("POST", "/abort_request", ADMIN, 200),
    ("POST", "/update_weights_from_disk", USER, 401),
    ("POST", "/update_weight_version", USER, 401),
    ("POST", "/weights_checker", USER, 401),
    ("POST", "/init_weights_update_group", USER, 401),
    ("POST", "/destroy_weights_update_group", USER, 401),
    ("POST", "/begin_weight_update", USER, 401),
    ("POST", "/end_weight_update", USER, 401),
    ("POST", "/update_weights_from_distributed", USER, 401),
]


@pytest.mark.parametrize(("method", "path", "key", "status"), CASES)
async def test_keys_open_the_routes_that_they_are_for(
    guarded: Server, method: str, path: str, key: str, status: int
) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    bodies = {"/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}}
    body = bodies.get(path, {"rid": "nobody"} if path == "/abort_request" else {}) if method == "POST" else None
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, guarded.url + path, headers=headers, json=body) as response,
    ):
        assert response.status == status, await response.text()
