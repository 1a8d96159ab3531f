"""What a machine with NVIDIA GPUs needs beside Python packages, on stand-ins: no GPU or toolkit is needed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.config import load_config
from deploy.doctor import gpu_host as module
from deploy.doctor.gpu_host import cache, driver, gpu_host, toolkit
from deploy.hardware.inventory import Gpu, Host


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A CUDA toolkit, with a C++ compiler in bin."""
    for name, text in {"nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.88'", "c++": "true"}.items():
        path = tmp_path / "cuda" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (tmp_path / "cuda" / "lib64").mkdir()
    (tmp_path / "cuda" / "lib64" / "libcudart.so").touch()
    return tmp_path / "cuda"


def verdicts(environ: dict[str, str]) -> dict[str, str]:
    return {f.check: f.verdict for f in toolkit(environ)}


def test_nvcc_is_found_where_sglang_looks_for_it(home: Path) -> None:
    both = {"CUDA toolkit": "ok", "C++ compiler": "ok"}
    assert verdicts({"PATH": f"{home}/bin"}) == both
    assert verdicts({"CUDA_HOME": str(home), "PATH": "", "CXX": f"{home}/bin/c++"}) == both
    assert verdicts({"CUDA_PATH": str(home), "PATH": "", "CXX": "no-such-g++"})["C++ compiler"] == "fail"
    (home / "lib64" / "libcudart.so").unlink()  # the wheels of nvcc have lib, and no libcudart.so
    (found, _) = toolkit({"PATH": f"{home}/bin"})
    assert found.verdict == "fail" and "lib64/libcudart.so" in found.detail and "cuda-toolkit-13" in found.fix


def test_a_driver_without_a_toolkit_fails_before_the_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hosts_of", lambda *_: (Host((Gpu("0", 1 << 36),)),))
    monkeypatch.setattr(module, "cuda_of_driver", lambda: (13, 0))
    monkeypatch.setattr(module, "cuda_of_torch", lambda: (13, 0))
    environ = {"PATH": "", "CUDA_HOME": "/nowhere", "HOME": str(home)}
    on_gpu = load_config(None, ["engine.kind.type=sglang"])
    found = {f.check: f for f in gpu_host(on_gpu, environ)}
    assert [f.verdict for f in found.values()] == ["ok", "fail", "fail", "ok"]
    assert "there is no /nowhere/bin/nvcc" in found["CUDA toolkit"].detail and found["C++ compiler"].fix
    given = load_config(None, ["engine.kind.type=sglang", f"launch.env={{CUDA_HOME: {home}, CXX: {home}/bin/c++}}"])
    assert {f.verdict for f in gpu_host(given, environ)} == {"ok"}
    for other in (["engine.kind={type: sglang, args: [--device, cpu]}"], []):
        assert [f.check for f in gpu_host(load_config(None, other), environ)] == ["driver"]
    monkeypatch.setattr(module, "hosts_of", lambda *_: ())
    assert list(gpu_host(on_gpu, environ)) == []


def test_another_release_is_a_warning_and_an_old_driver_an_error(home: Path) -> None:
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho release 12.8\n")
    assert verdicts({"PATH": f"{home}/bin"})["CUDA toolkit"] == "warn"
    assert driver((12, 8), (13, 0)).verdict == "fail" and "580" in driver((12, 8), (13, 0)).fix
    assert driver((13, 2), (13, 0)).verdict == driver((12, 4), (12, 8)).verdict == "ok", "minor versions are compatible"


def test_the_cache_of_kernels_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache({"HOME": str(tmp_path / "new")}).verdict == "ok"
    monkeypatch.setattr(module, "CACHE_BYTES", 1 << 62)
    assert cache({"HOME": str(tmp_path)}).verdict == "warn"
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    assert cache({"HOME": str(tmp_path)}).verdict == "fail"
