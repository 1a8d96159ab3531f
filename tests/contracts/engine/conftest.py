"""The engines of the contract tests, selected per test and shared by the whole session.

Engines: `fake` (scripted, in this process), `cpu` (rollout_server.cpu_engine as a process), and `sglang`: real
SGLang, the reference. SGLang takes part where FORAY_SGLANG_PYTHON names an interpreter that has it
(`make test-sglang` builds one), or where FORAY_SGLANG_URL and FORAY_SGLANG_MODEL name one that runs, started with
`--weight-version 1.0 --dtype float32` on a small model that this machine can read.

A test meets `cpu` and `sglang` unless `@pytest.mark.engines(...)` says otherwise. A test of the CPU engine
alone says why: nothing but a documented deviation, or a thing that no two implementations share, is a reason.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import pytest
import torch
from contract_client import Client
from contract_engines import ADMIN_KEY, LOGS, PATIENCE_S, USER_KEY, Kind, Server, cpu_engine, scripted, sglang, tail
from contract_models import RANK, perturbed, write_model, write_word_model

from tests.support.forks import Zygote

PYTHON, URL, MODEL = (os.environ.get(f"FORAY_SGLANG_{name}", "") for name in ("PYTHON", "URL", "MODEL"))
Flags = Mapping[Kind, Sequence[str]]
AVAILABLE: tuple[Kind, ...] = ("fake", "cpu", "sglang") if PYTHON or URL else ("fake", "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each engine that the test is for and that is there."""
    mark = metafunc.definition.get_closest_marker("engines")
    wanted = mark.args if mark else ("cpu", "sglang")
    assert "sglang" in wanted or (mark and mark.kwargs.get("why")), f"{metafunc.definition.nodeid}: say why"
    for fixture in ("server", "guarded", "unlapped"):
        if fixture in metafunc.fixturenames:
            kinds = [
                # the first test of each engine waits until it has started
                pytest.param(kind, marks=pytest.mark.timeout(360)) if kind == "sglang" else kind
                for kind in AVAILABLE
                if kind in wanted and not (URL and kind == "sglang" and fixture != "server")
            ]
            metafunc.parametrize(fixture, kinds, indirect=True, scope="session")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where something failed: the end of each log of SGLang, and where all of it is."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        for log in LOGS:
            terminalreporter.section(str(log))
            terminalreporter.write_line(tail(log))


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def two_models(scratch: Path) -> tuple[Path, Path]:
    """The same architecture and tokenizer with different weights."""
    if URL:
        first = Path(MODEL)
        return first, perturbed(first, scratch / "second")
    return write_model(scratch / "first", 0), write_model(scratch / "second", 1)


class Engines:
    """The engines of this session, each started by the first test that asks for it. Tests of one file meet several
    kinds, one after the other, so they run side by side until the end."""

    def __init__(self, zygote: Zygote, scratch: Path, running: contextlib.ExitStack) -> None:
        self._zygote, self._scratch, self._running = zygote, scratch, running
        self._started: dict[tuple[str, Kind], Server] = {}

    def get(self, name: str, kind: Kind, models: tuple[Path, Path], flags: Flags, **env: str) -> Server:
        """The engine `name` of this kind with the first of the models, and the flags for its kind."""
        if (name, kind) not in self._started:
            log = self._scratch / f"{name}-{kind}.log"
            self._started[name, kind] = Server(
                self._start(kind, models[0], log, flags, env), kind, *models, self._scratch, log
            )
        return self._started[name, kind]

    def _start(self, kind: Kind, model: Path, log: Path, flags: Flags, env: dict[str, str]) -> str:
        if kind == "fake":
            return self._running.enter_context(scripted())
        if kind == "cpu":
            return self._running.enter_context(cpu_engine(self._zygote, model, log, *flags[kind], env=env))
        if URL:
            return URL.rstrip("/")
        return self._running.enter_context(sglang(Path(PYTHON), model, log, *flags[kind]))


@pytest.fixture(scope="session")
def engines(zygote: Zygote, scratch: Path) -> Iterator[Engines]:
    """All of them; they end with the session."""
    with contextlib.ExitStack() as running:
        yield Engines(zygote, scratch, running)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, engines: Engines, two_models: tuple[Path, Path]) -> Server:
    """One engine of each kind for nearly all tests."""
    flags = ["--weight-version", "1.0"]
    return engines.get("server", request.param, two_models, {"cpu": [*flags, "--max-running", "32"], "sglang": flags})


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    """A client of an engine that holds the first weights as version 1.0, not paused, with an empty cache."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
        client = Client(server, session)
        if await client.version() != "1.0":
            await client.swap(server.first, "1.0")
        await client.ok("/flush_cache")
        yield client
        await client.ok("/abort_request", {"abort_all": True})
        await client.ok("/continue_generation")
        await client.until_running(0)


@pytest.fixture(scope="session")
def guarded(request: pytest.FixtureRequest, engines: Engines, scratch: Path) -> Server:
    """A second engine of each kind: with keys, streaming in increments, and with the demo's kind of tokenizer.
    SGLang must be started with adapters enabled."""
    model = scratch / f"words-{request.param}"
    if not model.exists():
        write_word_model(model, 0)
    flags = ["--api-key", USER_KEY, "--admin-api-key", ADMIN_KEY, "--incremental-streaming-output"]
    flags += ["--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK)]
    flags += ["--lora-target-modules", "all"]
    ours = ["--api-key-env", "TEST_KEY", "--admin-api-key-env", "TEST_ADMIN_KEY"]
    ours += ["--incremental-streaming-output", "true"]
    keys = {"TEST_KEY": USER_KEY, "TEST_ADMIN_KEY": ADMIN_KEY}
    return engines.get("guarded", request.param, (model, model), {"cpu": ours, "sglang": flags}, **keys)


@pytest.fixture(scope="session")
def unlapped(request: pytest.FixtureRequest, engines: Engines, two_models: tuple[Path, Path]) -> Server:
    """A third one, for swaps in place: SGLang's versions are right to the token when it does not launch a step before
    it has recorded the one before."""
    flags: Flags = {"cpu": ["--max-running", "32"], "sglang": ["--disable-overlap-schedule"]}
    return engines.get("unlapped", request.param, two_models, flags)


@pytest.fixture
async def guarded_client(guarded: Server) -> AsyncIterator[Client]:
    """A client of it that holds the user's key."""
    headers = {"Authorization": f"Bearer {USER_KEY}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S), headers=headers) as session:
        yield Client(guarded, session)
