"""Check for services that would listen beyond loopback without a token, and for invalid tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.secrets.env import read_env
from protocol.errors import UserError
from protocol.runtime.http.auth import LOOPBACK, is_loopback, read_access


def binds(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield one finding per service that would refuse to start; one for all if none would."""
    hosts = {"rollout": ("rollout.host", config.rollout.host)}
    if config.num_retrievers:
        hosts["retriever"] = ("retriever.host", config.retriever.host)
    if config.engine_roles:
        hosts["node"] = ("engine.host", config.engine.host)
    if config.launch.learner and config.learner.metrics_port is not None:
        hosts["learner"] = ("learner.metrics_host", config.learner.metrics_host)
    found: list[Finding] = []
    hosts = {role: (setting, host or LOOPBACK) for role, (setting, host) in hosts.items()}
    for role, (setting, host) in hosts.items():
        try:
            access = read_access(read_env(config.launch.secrets, role) if config.launch.secrets else environ)
        except UserError as error:
            found.append(Finding(f"{role} tokens", "fail", f"{error.what}: {error.why}", error.todo))
            continue
        if access.open and not is_loopback(host):
            detail = f"{setting} = {host} exposes the service to the network without a token: it would refuse to start"
            todo = f"foray init run.yaml --secure (then launch.secrets), or {setting}=127.0.0.1"
            todo += ", or disable it: learner.metrics_port=null" if role == "learner" else ""
            found.append(Finding("access", "fail", detail, todo))
    if found:
        yield from found
        return
    far = [setting for setting, host in hosts.values() if not is_loopback(host)]
    yield Finding(
        "access", "ok", f"tokens protect: {', '.join(far)}" if far else "no setting opens a service beyond loopback"
    )
