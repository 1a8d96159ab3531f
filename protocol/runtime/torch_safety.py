"""Two safety rules: gloo listens on loopback if possible, and pickled weights are refused. Does not import torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.http.auth import is_loopback

INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_at(address: str) -> Iterator[None]:
    """Make gloo groups in the block listen on loopback if `address` is loopback: gloo does not authenticate peers."""
    if not is_loopback(address) or INTERFACE in os.environ or not sys.platform.startswith("linux"):
        yield
        return
    os.environ[INTERFACE] = "lo"
    try:
        yield
    finally:
        os.environ.pop(INTERFACE, None)


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
