"""`foray init --secure`: its files and their readers; `launch.secrets`: each process gets only its own secrets."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from deploy.config import load_config
from deploy.launch.launcher import Launcher
from deploy.launch.plan import plan
from deploy.run.addresses import Addresses, choose, preview, settle
from deploy.run.redis_server import ping
from deploy.run.run_dir import locate
from deploy.run.snapshot import take_snapshot
from deploy.secrets.env import read_env
from deploy.secrets.tls import make_certificates
from foray.cli import main
from protocol.errors import UserError
from protocol.runtime.http.auth import read_access
from protocol.runtime.redis.url import parse_redis_url

SECRETS = re.compile(r"[A-Za-z0-9_-]{43}|[0-9a-f]{64}")


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "run.yaml"
    assert main(["init", str(path), "run.id=mine", "--secure", "--hosts", "redis.example,10.0.0.5"]) == 0
    capsys.readouterr()
    return tmp_path / "secrets"


def test_only_the_owner_may_read_and_each_file_says_what_to_do_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = os.umask(0)
    try:
        assert main(["init", str(tmp_path / "run.yaml"), "run.id=mine", "--secure"]) == 0
    finally:
        os.umask(old)
    directory, said = tmp_path / "secrets", capsys.readouterr().out
    files = {path.name: path for path in directory.iterdir()}
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    assert files.pop(".gitignore").read_text() == "*\n", "secrets are not committed by accident"
    assert all(name in said for name in files), "each is explained"
    for path in files.values():
        for secret in SECRETS.findall(path.read_text()):
            assert secret not in said
    assert load_config(tmp_path / "run.yaml").launch.secrets == directory


def test_every_secret_is_fresh_and_each_role_has_its_own(written: Path) -> None:
    envs = {path.stem: read_env(written, path.stem) for path in written.glob("*.env")}
    assert set(envs) == {"learner", "rollout", "node", "retriever", "viewer", "operator", "admin"}
    urls = [parse_redis_url(env["FORAY_REDIS_URL"]) for env in envs.values() if "FORAY_REDIS_URL" in env]
    assert len({url.password for url in urls}) == len(urls) == 7 and all(url.verifies for url in urls)
    assert [url.hosts for url in urls] == [(("redis.example", 6379),)] * 7
    assert set(envs["viewer"]) == {"FORAY_VIEWER_TOKEN", "FORAY_REDIS_URL"}
    assert set(envs["operator"]) == {"FORAY_OPERATOR_TOKEN", "FORAY_REDIS_URL"}
    assert "FORAY_RUN_KEY" in envs["learner"] and not any("FORAY_RUN_KEY" in envs[r] for r in envs if r != "learner")
    assert "FORAY_OPERATOR_TOKEN" not in envs["node"]
    for env in envs.values():
        read_access(env)  # strong, and no two the same
    acl = (written / "users.acl").read_text()
    assert not any(url.password in acl for url in urls if url.password), "the server's file holds hashes"
    assert acl.splitlines()[0] == "user default off resetkeys resetchannels -@all"


def test_a_shell_reads_an_env_file_as_it_is(written: Path) -> None:
    script = (
        f"set -a; . {written}/learner.env; {sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    )
    shown = json.loads(
        subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=20).stdout
    )
    assert {name: shown[name] for name in read_env(written, "learner")} == read_env(written, "learner")


def test_the_certificate_is_of_the_hosts_and_of_its_authority(written: Path) -> None:
    from cryptography import x509

    authority = x509.load_pem_x509_certificate((written / "ca.pem").read_bytes())
    server = x509.load_pem_x509_certificate((written / "redis.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["redis.example"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(written / "redis.crt", written / "redis.key")
    assert not list(written.glob("*ca*key*")), "the authority's key is not kept"
    assert make_certificates("x", ["h"]).ca != make_certificates("x", ["h"]).ca


def test_the_configuration_of_the_server_is_safe(written: Path, tmp_path: Path) -> None:
    text = (written / "redis.conf").read_text()
    for line in ("maxmemory-policy noeviction", "appendonly yes", "appendfsync everysec", "port 0", "tls-port 6379"):
        assert f"\n{line}\n" in text
    assert f"aclfile {written}/users.acl" in text and "bind * -::*" in text
    assert main(["init", str(tmp_path / "b" / "r.yaml"), "--secure", "--no-tls"]) == 0
    local = (tmp_path / "b" / "secrets" / "redis.conf").read_text()
    assert "\nbind 127.0.0.1 -::1\n" in local and "\nport 6379\n" in local and "tls" not in local


def test_nothing_is_overwritten_without_force(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, config = (written / "learner.env").read_text(), written.parent / "run.yaml"
    mine = config.read_text() + "# mine\n"
    config.write_text(mine)
    assert main(["init", str(config), "--secure"]) == 2
    assert "lock out processes" in capsys.readouterr().err
    assert (written / "learner.env").read_text() == before
    assert main(["init", str(config), "--secure", "--force"]) == 0
    assert (written / "learner.env").read_text() != before and config.read_text() == mine, "the run's file stays"
    assert "{mine}:tasks" in (written / "users.acl").read_text(), "its run id is that of the file"


def test_a_place_that_shells_and_redis_read_differently_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "with blank" / "r.yaml"), "--secure"]) == 2
    assert "cannot be used for secrets" in capsys.readouterr().err and not (tmp_path / "with blank").exists()


def test_each_process_gets_its_own_and_nothing_is_written_down(written: Path) -> None:
    config = load_config(None, ["run.dir=/r", f"launch.secrets={written}"])
    place = Addresses("unix:///r/redis.sock", Path("/bin/redis"))
    specs = {spec.kind: spec for spec in plan(config, place, python="py", resolved=Path("/r/resolved.yaml"))}
    assert f"--aclfile {written}/users.acl" in " ".join(specs["redis"].argv) and not specs["redis"].env
    for kind, role in (("learner", "learner"), ("rollout", "rollout"), ("engine", "node"), ("retriever", "retriever")):
        own = parse_redis_url(specs[kind].env_secret["FORAY_REDIS_URL"])
        assert (own.path, own.username) == ("/r/redis.sock", role)
        assert own.password == parse_redis_url(read_env(written, role)["FORAY_REDIS_URL"]).password
    assert "FORAY_NODE_TOKEN" in specs["retriever"].env_secret
    shown = json.dumps([spec.to_json() for spec in specs.values()]) + repr(list(specs.values()))
    for path in written.glob("*.env"):
        for secret in SECRETS.findall(path.read_text()):
            assert secret not in shown
    assert settle(config, place).run.redis_url == ""
    assert preview(config, environ={}).server is not None


def test_a_configured_redis_is_where_the_files_say(written: Path) -> None:
    config = load_config(None, ["run.dir=/r", f"launch.secrets={written}", "launch.redis=configured"])
    chosen = choose(config, environ={})
    assert chosen.server is None and chosen.redis_url == f"rediss://redis.example:6379/0?ssl_ca_certs={written}/ca.pem"


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot read"), ("export A=1\n", "line 1"), ("A='x y'\n", "line 1"), ("A=1\nB\n", "line 2")],
)
def test_a_file_of_secrets_that_is_none_is_refused(written: Path, text: str | None, words: str) -> None:
    path = written / "learner.env"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_env(written, "learner")
    assert "x y" not in caught.value.render()


CHILD = """#!{python}
import json, os, sys, time
from pathlib import Path
module = sys.argv[2]
Path("{out}", module).write_text(json.dumps({{k: v for k, v in os.environ.items() if k.startswith("FORAY_")}}))
if module == "learner":
    import redis
    from protocol.keys import Keys
    from learner.delivery.store import RunStore
    store = RunStore(os.environ["FORAY_REDIS_URL"], "mine")
    store.prepare()
    store.close()
    while not Path("{out}", "rollout_server").exists():
        time.sleep(0.02)
    sys.exit(0)
if module == "rollout_server":
    import redis
    from protocol.codec import encode
    from protocol.keys import Keys
    from protocol.messages import MetricsSnapshot
    from protocol.runtime.redis.client import connect
    text = dict(url="http://127.0.0.1:1", state="ready", incarnation="1")
    mine = encode(MetricsSnapshot(process="rollout", id="rollout-1", text=text))
    connect(os.environ["FORAY_REDIS_URL"]).set(Keys("mine").metrics("rollout", "rollout-1"), mine)
    time.sleep(60)
"""


@pytest.mark.slow
def test_up_starts_a_redis_with_users_and_gives_each_child_its_secrets_only(
    written: Path, run_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher's own environment holds the operator's token: no child may inherit it."""
    for name in [name for name in os.environ if name.startswith("FORAY_")]:  # variables of the test run itself
        monkeypatch.delenv(name)
    monkeypatch.setenv("FORAY_OPERATOR_TOKEN", "not-for-children-" + "x" * 20)
    monkeypatch.setenv("FORAY_RUN_KEY_FILE", "/somewhere")
    out, script = run_files / "out", run_files / "python"
    out.mkdir()
    script.write_text(CHILD.format(python=sys.executable, out=out))
    script.chmod(0o755)
    given = [
        f"run.dir={run_files / 'run'}",
        f"run.model={run_files / 'model'}",
        "run.id=mine",
        f"launch.secrets={written}",
    ]
    given += ["launch.engines=0", "launch.retrievers=0", f"learner.questions={run_files / 'questions.jsonl'}"]
    with Launcher(load_config(None, given), python=str(script)) as launcher:
        launcher.start("redis")
        seen = take_snapshot(launcher.redis_url, "mine")
        assert not seen.error and parse_redis_url(launcher.redis_url).username == "viewer"
        assert "AuthenticationError" in ping(launcher.addresses.redis_url), "the default user is off"
        launcher.start()
        launcher.wait()
        assert main(["status", str(run_files / "run")]) in (0, 1), "status finds the viewer's login by itself"
        monkeypatch.setenv("FORAY_REDIS_URL", read_env(written, "operator")["FORAY_REDIS_URL"])
        found = locate(Namespace(config=None, given=[str(run_files / "run")])).redis_url
        assert parse_redis_url(found).username == "operator" and not ping(found), (
            "an operator's login, where this Redis is"
        )
        monkeypatch.delenv("FORAY_REDIS_URL")
    assert "redis " in capsys.readouterr().out
    learner = json.loads((out / "learner").read_text())
    assert (
        set(learner) == set(read_env(written, "learner"))
        and parse_redis_url(learner["FORAY_REDIS_URL"]).username == "learner"
    )
    rollout = json.loads((out / "rollout_server").read_text())
    assert set(rollout) == set(read_env(written, "rollout")) and "not-for-children" not in str(rollout)
    for path in (run_files / "run").rglob("*"):
        if path.is_file() and path.suffix in (".json", ".yaml", ".log"):
            text = path.read_text()
            assert not any(value in text for value in learner.values() if SECRETS.search(value)), path
