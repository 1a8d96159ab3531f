"""Every fault that `foray doctor` must find, caused for real; fixes that are commands are executed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.config import RunConfig, load_config
from deploy.doctor import redis as doctor_redis
from deploy.doctor.finding import Finding
from deploy.doctor.machine import main_memory
from deploy.doctor.run import examine
from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.process import ManagedProcess
from deploy.run.redis_server import find_server, ping, redis_argv
from deploy.secrets.acl import rules
from deploy.secrets.files import RedisEndpoint, write_secrets
from protocol.codec import encode
from protocol.keys import Keys
from protocol.messages import EngineInfo, NodeState
from protocol.run_meta import RunMeta
from protocol.runtime import net
from protocol.runtime.net import free_port, port_owner

RUN = "test"


@dataclass
class World:
    """A healthy run: its files, its own Redis, and the doctor's arguments. A fault changes one thing of it."""

    directory: Path
    url: str
    child: ManagedProcess
    admin: redis.Redis
    overrides: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.time

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def config(self) -> RunConfig:
        model, questions = self.model, self.directory / "questions.jsonl"
        given = [
            f"run.id={RUN}",
            f"run.model={model}",
            f"run.dir={self.directory}/run",
            f"learner.questions={questions}",
        ]
        given += [f"retriever.corpus={self.directory}/corpus.jsonl", "run.groups_per_step=1", "run.group_size=2"]
        return load_config(None, [*given, "learner.checkpoint_every=1", f"run.redis_url={self.url}", *self.overrides])

    def findings(self) -> list[Finding]:
        found = examine(self.config, environ=self.environ, clock=self.clock)
        assert all(f.fix for f in found if f.verdict != "ok"), "a finding has a fix"
        return found

    def of(self, check: str) -> Finding:
        """The finding of that name; of several the first that is not ok."""
        found = [f for f in self.findings() if f.check == check]
        assert found, [f.check for f in self.findings()]
        return next((f for f in found if f.verdict != "ok"), found[0])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ManagedProcess]]:
    directory, port = tmp_path_factory.mktemp("doctor"), free_port()
    url = f"redis://127.0.0.1:{port}/0"
    argv = redis_argv(find_server().path, directory, url, maxmemory_mb=64)
    child = ManagedProcess(ProcessSpec("redis", "redis", argv, directory / "log", Ready.PING, url))
    deadline = time.monotonic() + 20
    while ping(url):
        assert child.poll() is None and time.monotonic() < deadline, child.tail()
        time.sleep(0.02)
    yield url, child
    child.kill()
    child.wait(5)


@pytest.fixture
def world(run_files: Path, healthy: tuple[str, ManagedProcess], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(doctor_redis, "ANSWER_S", 1.0)
    admin = redis.Redis.from_url(healthy[0])
    admin.flushall()
    for name, value in (("maxmemory-policy", "noeviction"), ("maxmemory", 64 << 20), ("appendonly", "yes")):
        admin.config_set(name, value)
    for user in admin.acl_users():
        if user != "default":
            admin.acl_deluser(user)
    yield World(run_files, *healthy, admin)
    admin.close()


@pytest.mark.slow
def test_a_healthy_run_is_in_order(world: World) -> None:
    assert {f.check: f.detail for f in world.findings() if f.verdict != "ok"} == {}


Fault = Callable[[World], AbstractContextManager[Any]]


def setting(name: str, value: str) -> Fault:
    @contextmanager
    def change(world: World) -> Iterator[None]:
        world.admin.config_set(name, value)
        yield

    return change


def configured(*overrides: str, **environ: str) -> Fault:
    @contextmanager
    def change(world: World) -> Iterator[None]:
        world.overrides += overrides
        world.environ |= environ
        yield

    return change


def written(name: str, text: str) -> Fault:
    @contextmanager
    def change(world: World) -> Iterator[None]:
        (world.directory / name).write_text(text)
        yield

    return change


@contextmanager
def stopped(world: World) -> Iterator[None]:
    os.kill(world.child.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(world.child.pid, signal.SIGCONT)


@contextmanager
def nobody_there(world: World) -> Iterator[None]:
    world.overrides.append(f"run.redis_url=redis://127.0.0.1:{free_port()}/0")
    yield


@contextmanager
def slow_clock(world: World) -> Iterator[None]:
    world.clock = lambda: time.time() - 3600
    yield


@contextmanager
def replica(world: World) -> Iterator[None]:
    world.admin.replicaof("127.0.0.1", free_port())
    try:
        yield
    finally:
        world.admin.replicaof("NO", "ONE")


@contextmanager
def taken(world: World) -> Iterator[None]:
    """Use a separate process, so that the fix may end it."""
    script = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        world.overrides.append(f"rollout.port={child.stdout.readline().strip()}")
        yield
        child.kill()


@contextmanager
def small_disk(world: World) -> Iterator[None]:
    (world.model / "other.safetensors").write_bytes(b"\0" * (1 << 20))
    usage = shutil.disk_usage(world.directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100 << 20))
        yield


def user(name: str, rights: str) -> Fault:
    @contextmanager
    def change(world: World) -> Iterator[None]:
        world.admin.execute_command("ACL", "SETUSER", name, "on", ">geheim", *rights.split())
        world.overrides.append(f"run.redis_url={world.url.replace('//', f'//{name}:geheim@')}")
        yield

    return change


@contextmanager
def wrong_password(world: World) -> Iterator[None]:
    world.overrides.append(f"run.redis_url={world.url.replace('//', '//default:wrong-one@')}")
    world.admin.execute_command("ACL", "SETUSER", "default", "on", ">right", "~*", "+@all")
    try:
        yield
    finally:
        world.admin.execute_command("ACL", "SETUSER", "default", "nopass")


def registered(**facts: Any) -> Fault:
    @contextmanager
    def change(world: World) -> Iterator[None]:
        keys = Keys(RUN)
        info = EngineInfo(id="e1", url="http://127.0.0.1:1", state=NodeState.READY, **facts)
        world.admin.hset(keys.engine("e1"), "b", encode(info))
        world.admin.zadd(keys.engines, {"e1": time.time() + 60})
        from deploy.doctor import model as doctor_model

        with pytest.MonkeyPatch.context() as patch:
            # the fingerprint of a whole tokenizer is tested where it is computed
            patch.setattr(doctor_model, "_fingerprint", lambda model: "b" * 64)
            yield

    return change


@contextmanager
def other_learner(world: World) -> Iterator[None]:
    world.admin.hset(Keys(RUN).meta, mapping=RunMeta(tokenizer="c" * 64).fields())
    yield


@contextmanager
def other_run(world: World) -> Iterator[None]:
    meta = RunMeta(facts={"host": "far", "dir": "/runs/theirs"}, lineage_id="d" * 32)
    world.admin.hset(Keys(RUN).meta, mapping=meta.fields())
    yield


@contextmanager
def other_for_sglang(world: World) -> Iterator[None]:
    other = world.directory / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text('{"model": {"vocab": {"z": 0}}}')
    world.overrides.append(f"engine.kind={{type: sglang, args: ['--tokenizer-path', '{other}']}}")
    yield


@contextmanager
def open_secrets(world: World) -> Iterator[None]:
    directory = world.directory / "secrets"
    write_secrets(directory, RUN, RedisEndpoint(tls=False), force=False)
    (directory / "learner.env").chmod(0o644)
    directory.chmod(0o755)
    world.overrides += [f"launch.secrets={directory}", "launch.redis=own", "run.redis_url=''"]
    yield


@contextmanager
def password_in_file(world: World) -> Iterator[None]:
    world.admin.execute_command("ACL", "SETUSER", "learner", "on", ">geheim", *rules(RUN, "learner").split())
    world.overrides.append(f"run.redis_url={world.url.replace('//', '//learner:geheim@')}")
    yield


def run_mend(world: World, fix: str) -> None:
    """Execute a fix that is a command: `redis-cli ...` with a client, the others in a shell."""
    if fix.startswith("redis-cli"):
        words = shlex.split(fix)
        start = next(i for i, word in enumerate(words) if word in ("CONFIG", "ACL"))
        world.admin.execute_command(*words[start:])
    else:
        command = fix.partition(",")[0]
        subprocess.run(command, shell=True, check=True, timeout=10)


TOO_LITTLE = "~{test}:* +@read +@connection +@transaction +info +time"
EVERY_KEY = "~* +@all -@admin -@dangerous -@scripting +info +fcall"
TRUSTING = "engine.kind={type: sglang, args: ['--trust-remote-code']}"
WITH_CODE = '{"auto_map": {"AutoModel": "x.Y"}}'
METRICS = ("learner.metrics_host=0.0.0.0", "learner.metrics_port=9100")

FAULTS: Mapping[str, tuple[Fault, str, str, str, bool]] = {
    # fault: how it is caused, name of the finding, verdict, words, whether the fix is executed
    "evicting policy": (setting("maxmemory-policy", "allkeys-lru"), "redis policy", "fail", "delete work", True),
    "leases evicted": (setting("maxmemory-policy", "volatile-ttl"), "redis policy", "fail", "delete leases", True),
    "no memory limit": (setting("maxmemory", "0"), "redis memory", "warn", "maxmemory is not set", True),
    "limit too small": (configured("run.groups_per_step=512"), "redis memory", "warn", "the limit is 64 MiB", False),
    "no persistence": (setting("appendonly", "no"), "redis persistence", "warn", "appendonly is off", True),
    "stopped": (stopped, "redis", "fail", "is stopped (SIGSTOP)", True),
    "not there": (nobody_there, "redis", "fail", "no Redis answers", False),
    "wrong password": (wrong_password, "redis", "fail", "refuses the login", False),
    "replica": (replica, "redis role", "fail", "refuses writes", False),
    "clock": (slow_clock, "clock", "warn", " s ahead of this machine", False),
    "may too little": (user("learner", TOO_LITTLE), "redis user learner", "fail", "FUNCTION LOAD", True),
    "may too much": (user("rollout", "~* +@all"), "redis user rollout", "warn", "FLUSHALL", True),
    "other run's keys": (user("node", EVERY_KEY), "redis user node", "warn", "GET {another-run}", True),
    "port taken": (taken, "ports", "fail", "(python", True),
    "disk too small": (small_disk, "disk", "fail", "+ 1 checkpoints", False),
    "vocabulary": (written("model/config.json", '{"vocab_size": 4}'), "tokenizer", "fail", "largest id is 7", False),
    "no tokenizer": (written("model/tokenizer.json", "[1, 2"), "tokenizer", "fail", "not a valid tokenizer", False),
    "SGLang's tokenizer": (other_for_sglang, "tokenizer", "fail", "--tokenizer-path", False),
    "an engine's tokenizer": (registered(tokenizer="a" * 64), "engine tokenizer", "fail", "e1 has aaaa", False),
    "the learner's tokenizer": (other_learner, "run tokenizer", "fail", "has cccccccccccc", False),
    "another run": (other_run, "run.id", "fail", "lineage dddddddd, host far, run.dir /runs/theirs", False),
    "remote code": (configured(TRUSTING), "remote code", "warn", "runs on every engine", False),
    "code in the model": (written("model/config.json", WITH_CODE), "remote code", "fail", "auto_map", False),
    "open rollout server": (configured("rollout.host=0.0.0.0"), "access", "fail", "rollout.host = 0.0.0.0", False),
    "open retriever": (configured("retriever.host=0.0.0.0"), "access", "fail", "retriever.host", False),
    "open engine": (configured("engine.host=10.0.0.5"), "access", "fail", "engine.host", False),
    "open metrics": (configured(*METRICS), "access", "fail", "learner.metrics_host", False),
    "weak token": (configured(FORAY_NODE_TOKEN="short"), "rollout tokens", "fail", "too weak", False),
    "secrets in the open": (open_secrets, "secrets", "fail", "other users can read", True),
    "password in the file": (password_in_file, "redis password", "warn", "contains a password", False),
}  # fmt: skip


@pytest.mark.fault(25, 44, 47)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_fix_works(world: World, name: str) -> None:
    fault, check, verdict, words, fixable = FAULTS[name]
    before = {f.check for f in world.findings() if f.verdict != "ok"}
    assert not before, "nothing was wrong before"
    with fault(world):
        found = world.of(check)
        assert found.verdict == verdict and words in found.detail + found.why and found.fix, found
        assert "geheim" not in f"{found}"
        if fixable:
            run_mend(world, found.fix)
            deadline = time.monotonic() + 10
            while world.of(check).verdict != "ok":
                assert time.monotonic() < deadline, world.of(check)
                time.sleep(0.05)


@pytest.mark.parametrize(
    ("override", "mib"),
    [
        ("learner.keep_checkpoints=3", 6 + 12 + 256),
        ("learner.model.lora.rank=4", 6 + 256),
        ("launch.learner=false", 0),
    ],
)
def test_the_disk_that_is_needed_is_that_of_what_is_written(world: World, override: str, mib: int) -> None:
    world.overrides.append(override)
    with small_disk(world):
        found = [f for f in world.findings() if f.check == "disk"]
    assert bool(found) == bool(mib)
    assert not found or f"about {mib} MiB needed" in found[0].detail, found


@pytest.mark.parametrize(("dtype", "mib"), [("float32", 6 + 12 + 256), ("bfloat16", 6 + 24 + 256)])
def test_a_checkpoint_has_twelve_bytes_per_parameter(world: World, dtype: str, mib: int) -> None:
    path = world.directory / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": dtype}))
    world.overrides.append("learner.keep_checkpoints=3")
    with small_disk(world):
        (found,) = [f for f in world.findings() if f.check == "disk"]
    assert f"about {mib} MiB needed" in found.detail


@pytest.mark.parametrize(
    ("override", "mib"),
    [
        ("learner.publish.type=disk", 3),
        ("learner.algorithm.type=ppo", 6),
        ("learner.engine={zero_stage: 2, offload_optimizer: true}", 6),
        ("learner.publish={type: distributed}", 4),
        ("learner.async_checkpoints=false", 0),
        ("learner.model.lora.rank=4", 0),
        ("launch.learner=false", 0),
    ],
)
def test_main_memory_is_twelve_bytes_per_parameter_and_copies(world: World, override: str, mib: int) -> None:
    world.overrides.append(override)
    with small_disk(world):  # a model of 1 MiB of float32
        config = world.config
        assert [f.verdict for f in main_memory(config, 64 << 20)] == (["ok"] if mib else [])
        short = list(main_memory(config, 1 << 20))
    assert [f.verdict for f in short] == (["fail"] if mib else [])
    assert not mib or (f"{mib} MiB needed" in short[0].detail and "async_checkpoints: false" in short[0].fix)


def test_a_strong_token_opens_a_service_to_the_network(world: World) -> None:
    import secrets

    world.overrides.append("rollout.host=0.0.0.0")
    world.environ["FORAY_NODE_TOKEN"] = secrets.token_urlsafe(32)
    assert world.of("access").verdict == "ok"


@pytest.mark.parametrize(
    ("info", "verdict", "words"),
    [
        ({"redis_version": "6.2.14"}, "fail", "versions before 7.0"),
        ({"redis_version": "7.4.1"}, "warn", "CVE-2026-23479"),
        ({"redis_version": "7.0.15"}, "ok", "unless the distribution"),
        ({"redis_version": "8.6.3"}, "ok", "Redis 8.6.3"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, "ok", "Valkey 9.1.2"),
    ],
)
def test_old_and_vulnerable_versions_are_named(
    world: World, monkeypatch: pytest.MonkeyPatch, info: dict[str, str], verdict: str, words: str
) -> None:
    """The server is real, its INFO says another version: servers of every age are not at hand."""
    real = redis.Redis.info
    monkeypatch.setattr(redis.Redis, "info", lambda self, *a: _without_valkey(real(self, *a)) | info)
    found = world.of("redis")
    assert found.verdict == verdict and words in found.detail


def _without_valkey(info: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name != "valkey_version"}


@pytest.mark.parametrize(
    ("url", "verdict", "words"),
    [
        ("redis://10.0.0.5:6379/0", "warn", "no TLS"),
        ("rediss://10.0.0.5:6379/0?ssl_cert_reqs=none", "warn", "not verified"),
        ("rediss://redis.example:6379/0", "ok", "certificate verified"),
        ("redis+sentinel://127.0.0.1:1/main", "ok", "loopback"),
        ("unix:///x.sock", "ok", "loopback"),
    ],
)
def test_what_goes_over_a_network_in_the_clear_is_named(url: str, verdict: str, words: str) -> None:
    (found,) = doctor_redis._transport(url)
    assert found.verdict == verdict and words in found.detail and bool(found.fix) == (verdict != "ok")


def test_trying_a_right_does_nothing(world: World) -> None:
    world.admin.set("kept", "1")
    with user("rollout", "~* +@all")(world):
        assert world.of("redis user rollout").verdict == "warn"
    assert world.admin.get("kept") == b"1" and world.admin.config_get("maxmemory")["maxmemory"] == str(64 << 20)
    assert [k for k in world.admin.keys("*") if k != b"kept"] == [], "FLUSHALL, SET and XADD were tried and not done"


def test_the_users_that_init_makes_are_what_the_doctor_wants(world: World) -> None:
    directory = world.directory / "secrets"
    write_secrets(directory, RUN, RedisEndpoint(tls=False), force=False)
    for line in (directory / "users.acl").read_text().splitlines()[1:]:
        world.admin.execute_command("ACL", "SETUSER", *line.split()[1:])
    world.overrides.append(f"launch.secrets={directory}")
    found = {f.check: f for f in world.findings()}
    assert {name: f for name, f in found.items() if f.verdict != "ok"} == {}
    assert {f"redis user {role}" for role in ("learner", "rollout", "node", "viewer", "operator")} <= set(found)


@pytest.mark.fault(47)
def test_the_holder_of_a_port_is_named(healthy: tuple[str, ManagedProcess]) -> None:
    url, child = healthy
    found = port_owner(int(url.rpartition(":")[2].split("/")[0]))
    assert found is not None and found.pid == child.pid and "server" in found.name and not found.stopped
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert port_owner(bound.getsockname()[1]) is None, "bound, but not listening"


def test_the_holder_of_a_port_is_named_though_it_is_in_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        head, *rows = Path("/proc/net/tcp").read_text().splitlines()
        (ours,) = [row for row in rows if int(row.split()[1].rpartition(":")[2], 16) == port]
        (tmp_path / "tcp").write_text(f"{head}\n{ours}\n")
        tables = {"/proc/net/tcp": tmp_path / "tcp", "/proc/net/tcp6": tmp_path / "none"}
        monkeypatch.setattr(net, "Path", lambda path: tables.get(path, Path(path)))
        found = port_owner(port)
    assert found is not None and found.pid == os.getpid()


def test_the_command_says_all_of_it_as_json(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from foray.cli import main

    monkeypatch.delenv("FORAY_REDIS_URL", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(world.config.to_yaml())
    assert main(["doctor", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True
    world.admin.config_set("maxmemory-policy", "allkeys-lru")
    assert main(["doctor", str(path), "--json"]) == 1
    found = {f["check"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["redis policy"]["verdict"] == "fail" and "noeviction" in found["redis policy"]["fix"]
