"""The processes of a configuration."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from deploy.config import RunConfig, load_config
from deploy.launch.plan import ProcessSpec, Ready, plan
from deploy.run.addresses import Addresses, choose, preview, settle
from deploy.run.redis_server import network_url, redis_argv
from protocol.errors import UserError
from protocol.runtime.net import free_port, is_free

OWN = Addresses("unix:///r/redis.sock", Path("/bin/redis-server"))


def planned(*overrides: str, addresses: Addresses = OWN) -> list[ProcessSpec]:
    return plan(
        load_config(None, ["run.dir=/r", *overrides]), addresses, python="py", resolved=Path("/r/resolved.yaml")
    )


def named(specs: list[ProcessSpec], name: str) -> ProcessSpec:
    return next(spec for spec in specs if spec.name == name)


def test_processes_come_in_start_order() -> None:
    assert [s.name for s in planned()] == ["redis", "retriever-1", "engine-1", "rollout-1", "learner"]


def test_a_takeover_is_the_learners_alone() -> None:
    specs = plan(load_config(None, ["run.dir=/r"]), OWN, python="py", resolved=Path("/r/resolved.yaml"), takeover=True)
    assert [s.name for s in specs if "--takeover" in s.argv] == ["learner"]


def test_counts_are_those_of_the_configuration() -> None:
    kinds = [s.kind for s in planned("launch.engines=3", "launch.learner=false")]
    assert kinds.count("engine") == 3 and "learner" not in kinds
    assert len({s.name for s in planned("launch.engines=3")}) == 7


def test_engines_for_evaluation_come_after_the_others_with_a_role_a_name_and_a_free_port() -> None:
    specs = [s for s in planned("launch.engines=2", "launch.eval_engines=2", "engine.port=30000") if s.kind == "engine"]
    given = {
        s.name: sorted(a for a in s.argv if a.startswith(("engine.id", "engine.role", "engine.port"))) for s in specs
    }
    assert given == {
        "engine-1": ["engine.id=engine-1", "engine.role=rollout"],
        "engine-2": ["engine.id=engine-2", "engine.port=0", "engine.role=rollout"],
        "eval-engine-1": ["engine.id=eval-engine-1", "engine.port=0", "engine.role=eval"],
        "eval-engine-2": ["engine.id=eval-engine-2", "engine.port=0", "engine.role=eval"],
    }
    assert all(s.ready is Ready.ENGINE and s.restarts == 3 for s in specs), "supervised as the others are"
    assert [s.name for s in planned("launch.engines=0", "launch.eval_engines=1") if s.kind == "engine"] == [
        "eval-engine-1"
    ]


def test_an_outer_redis_is_not_started_and_reaches_everybody_by_environment() -> None:
    specs = planned(addresses=Addresses("redis://:secret@db:6379/0", None))
    assert all(spec.kind != "redis" for spec in specs)
    assert named(specs, "learner").env_secret["FORAY_REDIS_URL"] == "redis://:secret@db:6379/0"


def test_a_password_is_not_written_into_the_record() -> None:
    specs = planned(addresses=Addresses("redis://:secret@db:6379/0", None))
    assert "secret" not in str([spec.to_json() for spec in specs])


def test_every_process_reads_the_resolved_file_and_has_its_own_name_and_log() -> None:
    specs = planned("launch.engines=2")
    rest = [s for s in specs if s.kind != "redis"]
    assert all(s.argv[:2] == ("py", "-m") and s.argv[3:5] == ("--config", "/r/resolved.yaml") for s in rest)
    assert "engine.id=engine-2" in named(specs, "engine-2").argv
    assert "rollout.id=rollout-1" in named(specs, "rollout-1").argv
    assert len({s.log for s in specs}) == len(specs)


def test_threads_are_bounded_in_every_process() -> None:
    assert all(s.env["OMP_NUM_THREADS"] == "3" for s in planned("launch.threads=3") if s.kind != "redis")


def test_only_what_may_be_lost_is_restarted() -> None:
    specs = planned("launch.restarts=4")
    assert named(specs, "engine-1").restarts == 4 and named(specs, "learner").restarts == 3
    assert named(planned("launch.restart_learner=2"), "learner").restarts == 2


def test_a_configured_drain_is_kept() -> None:
    assert "rollout.drain_s=2" in named(planned(), "rollout-1").argv
    assert not [a for a in named(planned("rollout.drain_s=9"), "rollout-1").argv if "drain_s" in a]


def test_every_process_draws_its_port_on_its_own_host_but_the_first_of_a_configured_one(tmp_path: Path) -> None:
    config = load_config(
        None, [f"run.dir={tmp_path}", "launch.retrievers=2", "retriever.port=7001", "launch.rollouts=2"]
    )
    addresses = choose(config, environ={"FORAY_REDIS_URL": "redis://db/0"})
    settled = settle(config, addresses)
    assert settled.run.redis_url == "", "a URL from the environment may hold a password: it is not written down"
    assert settled.rollout.search.model_dump()["urls"] == (), "those that register in Redis"
    assert (settled.retriever.port, settled.rollout.port, settled.learner.metrics_port) == (7001, 0, 0)
    specs = plan(settled, addresses, python="python", resolved=tmp_path)
    given = [" ".join(a for a in s.argv if ".port=" in a or "r.id=" in a) for s in specs if s.kind == "retriever"]
    assert given == ["retriever.id=retriever-1", "retriever.id=retriever-2 retriever.port=0"]
    assert settle(load_config(None, [f"run.dir={tmp_path}"]), addresses).retriever.port == 0


def test_urls_of_other_retrievers_stay_unless_up_starts_its_own(tmp_path: Path) -> None:
    other = [f"run.dir={tmp_path}", "rollout.search={type: http, urls: [http://other:8000]}"]
    addresses = choose(load_config(None, other), environ={"FORAY_REDIS_URL": "redis://db/0"})
    assert settle(load_config(None, other), addresses).rollout.search.model_dump()["urls"] == ("http://other:8000",)
    assert (
        settle(load_config(None, [*other, "launch.retrievers=1"]), addresses).rollout.search.model_dump()["urls"] == ()
    )


def test_a_redis_for_other_hosts_has_users_and_a_file_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without users"):
        load_config(None, ["launch.redis_host=node7"])
    config = load_config(None, [f"run.dir={tmp_path}", "launch.redis_host=127.0.0.1"])
    addresses = choose(config, environ={})
    assert addresses.redis_url.startswith("redis://127.0.0.1:"), "no unix socket"
    assert settle(config, addresses).run.redis_url == f"file://{tmp_path}/redis.url", "it may move"
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "redis.crt").touch()
    url = network_url("node7", 7000, secrets)
    assert url == f"rediss://node7:7000/0?ssl_ca_certs={secrets}/ca.pem"
    argv = redis_argv(Path("redis"), tmp_path, url, maxmemory_mb=9, secrets=secrets)
    flags = dict(zip(argv[1::2], argv[2::2], strict=True))
    assert (flags["--bind"], flags["--port"], flags["--tls-port"]) == ("node7", "0", "7000")
    assert flags["--aclfile"] == f"{secrets}/users.acl" and flags["--tls-key-file"] == f"{secrets}/redis.key"


def test_a_resolved_file_starts_the_same_again(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path}"])
    settled = settle(config, choose(config, environ={}))
    path = tmp_path / "again.yaml"
    path.write_text(settled.to_yaml())
    again = choose(load_config(path), environ={})
    assert again.server is not None and again.redis_url == settled.run.redis_url
    assert load_config(path).num_retrievers == 1


def test_insisting_on_a_configured_redis_without_one_is_an_error() -> None:
    with pytest.raises(UserError, match="no Redis URL is set"):
        choose(load_config(None, ["launch.redis=configured"]), environ={})


def test_the_preview_needs_no_redis_and_makes_no_directory(tmp_path: Path) -> None:
    config: RunConfig = load_config(None, [f"run.dir={tmp_path / 'none'}"])
    assert preview(config, environ={}).server == Path("redis-server")
    assert not (tmp_path / "none").exists()


def test_each_rank_of_the_learner_is_a_process_of_one_group() -> None:
    ranks = [s for s in planned("launch.learner_ranks=3") if s.kind == "learner"]
    assert [(s.name, s.group, s.rank, s.log.name) for s in ranks] == [
        ("learner", "learner", 0, "learner.log"),
        ("learner-rank-1", "learner", 1, "learner-rank-1.log"),
        ("learner-rank-2", "learner", 2, "learner-rank-2.log"),
    ]
    assert all(s.argv[:3] == ("py", "-m", "learner") and s.env["WORLD_SIZE"] == "3" for s in ranks)
    assert [s.env["RANK"] for s in ranks] == ["0", "1", "2"] and {s.env["LOCAL_RANK"] for s in ranks} == {"0"}
    (alone,) = [s for s in planned() if s.kind == "learner"]
    assert "RANK" not in alone.env and alone.group == "learner"


def test_the_learner_may_take_the_time_of_its_last_checkpoint_to_stop(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(15 * 10**9)  # 7.5 billion parameters: 90 GB of state, 360 s at 0.25 GB/s, twice
    chosen = (f"run.model={tmp_path}", "launch.learner_ranks=8")
    learner, engine = (named(planned(*chosen), name) for name in ("learner", "engine-1"))
    assert (learner.stop_s, engine.stop_s) == (720.0, 0.0)
    assert named(planned(*chosen, "learner.model.lora.rank=8"), "learner").stop_s == 0.0, "adapters are small"
    assert named(planned(), "learner").stop_s == 0.0, "the model is on another host"


@pytest.mark.fault(47)
@pytest.mark.parametrize("setting", ["rollout.port", "retriever.port"])
def test_a_port_that_is_taken_is_refused_before_anything_starts_and_its_holder_named(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(UserError, match=f"{setting} = {port} is taken by process {os.getpid()}") as caught:
            choose(load_config(None, ["run.dir=/r", f"{setting}={port}", "run.redis_url=redis://db"]), environ={})
    assert f"kill {os.getpid()}" in caught.value.todo


@pytest.mark.parametrize("url", ["http://::1:8000", "127.0.0.1:8000", "http://:8000", "http://a:b", "ftp://a:1"])
def test_a_retriever_url_that_is_none_is_refused_in_the_settings(url: str) -> None:
    with pytest.raises(UserError, match=r"is not a URL: write http://HOST:PORT"):
        load_config(None, [f"rollout.search={{type: http, urls: ['{url}']}}"])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_port_may_be_configured_on_any_kind_of_address(host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert is_free(host, free_port())
