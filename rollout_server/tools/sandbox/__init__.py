"""Sandboxes for programs of the policy: bubblewrap on this machine, or a service over HTTP. See docs/tools.md."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated, cast

from pydantic import Field

from rollout_server.tools.sandbox.base import BubblewrapSettings, Sandbox, SandboxBase, SandboxLimits, ServiceSettings

SandboxSettings = Annotated[BubblewrapSettings | ServiceSettings, Field(discriminator="type")]
REGISTRY: dict[type[SandboxBase], str] = {
    BubblewrapSettings: "rollout_server.tools.sandbox.bubblewrap:Bubblewrap",
    ServiceSettings: "rollout_server.tools.sandbox.service:SandboxService",
}
"""Settings class -> "module:Class". The class takes the settings, the limits and the library directories."""


def build_sandbox(settings: SandboxBase, limits: SandboxLimits, libraries: Sequence[str] = ()) -> Sandbox:
    """Instantiate the sandbox for `settings`.

    libraries  directories with modules that programs may import besides the standard library

    Raises UserError if programs cannot be isolated on this machine.
    """
    return cast("Sandbox", resolve_name(REGISTRY[type(settings)])(settings, limits, libraries))
