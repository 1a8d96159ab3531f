"""Secrets in a configuration: refused where they do not belong, and copied nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.config import load_config
from deploy.launch.plan import plan
from deploy.run.addresses import Addresses, settle
from foray.settings_file import document
from protocol.errors import UserError
from protocol.settings import REDIS_URL_VARIABLE

CANARY = "c4nary-c4nary"


@pytest.mark.parametrize(
    "override",
    [
        f"launch.env.WANDB_API_KEY={CANARY}",
        f"launch.env.{REDIS_URL_VARIABLE}=redis://u:{CANARY}@h/0",
        f"retriever.online={{type: serper, key_env: '{CANARY}!'}}",
        f"learner.api_key={CANARY}",
        f"launch.secrets=[{CANARY}, redis://u:{CANARY}@h]",
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_and_not_repeated(override: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [override])
    shown = caught.value.render()
    assert override.partition("=")[0].rpartition(".")[2] in shown
    assert CANARY not in shown or override.startswith("launch.secrets"), shown
    assert f":{CANARY}@" not in shown


@pytest.mark.parametrize(
    "url", [f"redis://u:{CANARY}@10.0.0.1/0", f"redis+sentinel://a,b/name?sentinel_password={CANARY}"]
)
def test_a_password_in_the_configuration_reaches_the_processes_and_no_file(url: str, tmp_path: Path) -> None:
    config = load_config(None, [f"run.redis_url={url}", f"run.dir={tmp_path / 'run'}"])
    addresses = Addresses(url, None, ("http://127.0.0.1:1",), ("http://127.0.0.1:2",))
    settled = settle(config, addresses)
    assert CANARY not in settled.to_yaml() and CANARY not in document(settled)
    specs = plan(settled, addresses, python="python", resolved=tmp_path / "resolved.yaml")
    assert all(spec.env_secret[REDIS_URL_VARIABLE] == url for spec in specs)
    assert not any(CANARY in str(spec.to_json()) or CANARY in " ".join(spec.argv) for spec in specs)
    plain = load_config(None, ["run.redis_url=redis://10.0.0.1/0"])
    assert settle(plain, addresses).run.redis_url == "redis://10.0.0.1/0", "what is no secret stays"
