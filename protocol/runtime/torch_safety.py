"""What torch needs around it: gloo and NCCL use one interface, pickled weights are refused, NCCL gets the same settings
in learner and engine, and both report their versions. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.http.auth import is_loopback
from protocol.runtime.net import interface_to

INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


@contextmanager
def gloo_at(address: str) -> Iterator[None]:
    """Make gloo groups in the block use the interface on the route to `address`, unless GLOO_SOCKET_IFNAME is set.

    By default gloo uses the address of the host's name, which may be loopback or the wrong network. If `address` is
    loopback, so is the interface: gloo does not authenticate peers.
    """
    interface = "" if INTERFACE in os.environ else interface_to(address)
    if not interface:
        yield
        return
    os.environ[INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(INTERFACE, None)


def interface_variables(address: str) -> dict[str, str]:
    """Return the variables that make gloo and NCCL of another process use the interface on the route to `address`.

    Those that are set already are left out, and so is loopback: a group may meet elsewhere.
    """
    interface = "" if is_loopback(address) else interface_to(address)
    return {name: interface for name in (INTERFACE, NCCL_INTERFACE) if interface and name not in os.environ}


NCCL_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""SGLang sets these for itself. Ranks of one group that differ in them fail or hang while they connect."""


def set_nccl_defaults(environ: MutableMapping[str, str]) -> None:
    """Set NCCL_DEFAULTS in `environ`, except those that the user has set. Takes effect before the first group only."""
    for name, value in NCCL_DEFAULTS.items():
        environ.setdefault(name, value)


def torch_versions() -> dict[str, str]:
    """Return the versions of "torch" and "nccl" that are installed in this environment; without those that are not.

    From package metadata. NCCL is a separate package (`nvidia-nccl-cu13`) beside torch's wheels for CUDA.
    """
    found: dict[str, str] = {}
    for package in distributions():
        name = (package.metadata["Name"] or "").lower()
        key = "nccl" if name.startswith("nvidia-nccl-cu") else name
        if key in ("torch", "nccl"):
            found.setdefault(key, package.version)  # the first one on the path is imported
    return found


_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; "
    "state = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "save_file({k: v.clone().contiguous() for k, v in state.items()}, sys.argv[2], {'format': 'pt'})"
)


def refuse_pickled(folder: Path) -> None:
    """Raise UserError if the only weights in `folder` are pickles, which can run code. Opens no file."""
    pickled = sorted(path for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if not pickled or any(folder.glob("*.safetensors")):
        return
    raise UserError(
        f"{pickled[0]} contains pickled weights; Foray loads only safetensors",
        why="loading a pickle can run arbitrary code",
        todo=f'if you trust its author, convert it once: python -c "{_CONVERT}" {pickled[0]} '
        f"{pickled[0].with_name('model.safetensors')}",
    )
