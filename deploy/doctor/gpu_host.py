"""Check what an NVIDIA machine needs beside Python packages: driver, CUDA toolkit, C++ compiler, a cache on disk.

SGLang compiles CUDA kernels when it starts, and keeps them in a cache. The search for tools is that of SGLang 0.5.23
(`sglang/kernels/jit/utils/compile/toolchain.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.hardware.assign import EngineArgs
from deploy.hardware.gpus import cuda_of_driver, cuda_of_torch
from deploy.hardware.inventory import GIB, gib
from deploy.hardware.run import hosts_of
from rollout_server.node.config import SglangEngine

CUDA = 13
"""Major version of CUDA in requirements/engine.lock and gpu.lock."""
CACHE_BYTES = 2 * GIB
"""Free space for compiled kernels. Assumed, not measured."""
TOOLKIT = (
    f"install the CUDA {CUDA} toolkit (apt-get install cuda-toolkit-{CUDA}-0, or an image whose tag ends in -devel), "
    "and set CUDA_HOME to its folder if that is not /usr/local/cuda"
)
COMPILER = "install a C++ compiler (apt-get install g++), or set CXX to one"


def gpu_host(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check this machine if it has NVIDIA GPUs and the run uses them."""
    if not hosts_of(config, environ):
        return
    yield driver(cuda_of_driver(), cuda_of_torch())
    kind = config.engine.kind
    if config.engine_roles and isinstance(kind, SglangEngine) and EngineArgs.of(kind.args).gpus:
        variables = {**environ, **config.launch.env}
        yield from toolkit(variables)
        yield cache(variables)


def driver(has: tuple[int, int], needed: tuple[int, int]) -> Finding:
    """Check the CUDA version of the driver against that of torch here; (0, 0) if unknown."""
    found, wanted = (f"{major}.{minor}" for major, minor in (has, needed))
    if has[0] < needed[0]:
        detail = f"the NVIDIA driver supports CUDA {found}, torch here is built for {wanted}"
        todo = f"install a driver for CUDA {wanted} (580 or newer for CUDA 13), or a torch for CUDA {found}"
        return Finding("driver", "fail", detail, todo)
    return Finding("driver", "ok", f"CUDA {found}, torch here needs {wanted}")


def toolkit(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that SGLang finds nvcc, the CUDA runtime to link with, and a C++ compiler."""
    path = environ.get("PATH")
    nvcc = shutil.which("nvcc", path=path)
    beside = Path(nvcc).parents[1] if nvcc else Path("/usr/local/cuda")
    home = Path(environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or beside)
    why = "SGLang compiles CUDA kernels when it starts; without the toolkit it exits"
    absent = [str(p) for p in (home / "bin/nvcc", home / "lib64/libcudart.so") if not p.exists()]
    if absent:
        yield Finding("CUDA toolkit", "fail", f"there is no {' and no '.join(absent)}", TOOLKIT, why)
    else:
        release = _release(home / "bin/nvcc")
        if release == CUDA:
            yield Finding("CUDA toolkit", "ok", f"CUDA {release} in {home}")
        else:
            detail = f"{home} has CUDA {release or '(unknown)'}, SGLang's torch is built for {CUDA}"
            yield Finding("CUDA toolkit", "warn", detail, TOOLKIT, why)
    compiler = environ.get("CXX", "c++")
    if shutil.which(compiler, path=path) is None:
        yield Finding("C++ compiler", "fail", f"there is no {compiler}", COMPILER, why)
    else:
        yield Finding("C++ compiler", "ok", compiler)


def _release(nvcc: Path) -> int:
    """Return the major version of CUDA that the compiler is of, 0 if it does not tell."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"release (\d+)", said)
    return int(found[1]) if found else 0


def cache(environ: Mapping[str, str]) -> Finding:
    """Check that the folder of compiled kernels can be written, and has room."""
    place = Path(environ.get("HOME") or Path.home()) / ".cache"
    todo = "set HOME (launch.env) to a folder that can be written; keep its .cache between starts of a container"
    held = next(p for p in (place, *place.parents) if p.exists())
    if not os.access(held, os.W_OK):
        return Finding("kernel cache", "fail", f"{place} cannot be written", todo, "SGLang keeps its kernels there")
    if (free := shutil.disk_usage(held).free) < CACHE_BYTES:
        return Finding("kernel cache", "warn", f"{gib(free)} free in {place}, {gib(CACHE_BYTES)} needed", todo)
    return Finding("kernel cache", "ok", f"{place}, {gib(free)} free; the first start takes minutes longer")
