"""`dtype: auto`: what it stands for on which machine, that a run has one, and what doctor says of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo_lm import command as demo_lm
from deploy.config import RunConfig, load_config
from deploy.doctor import machine
from deploy.doctor import speed as speeds
from deploy.hardware.speed import MEASURE, with_dtypes
from deploy.launch.process import _die_with_parent
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.resume import DTYPE, with_dtype
from protocol.errors import UserError
from protocol.runtime import lifecycle, number_format
from protocol.runtime.number_format import KEEPS_FLOAT32, SMALL, CpuSpeed, resolve
from protocol.versions import PolicyVersion

OLD, NEW = CpuSpeed("AVX2", False, 50.0, 0.95), CpuSpeed("AVX512", True, 110.0, 400.0)
SLOW = CpuSpeed("AVX512", True, 110.0, 115.0)


def folder(where: Path, parameters: int = 20_000_000, **facts: Any) -> Path:
    """Return a model folder whose files are as large as a model of this many parameters."""
    where.mkdir()
    (where / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"} | facts))
    (where / "model.safetensors").touch()
    os.truncate(where / "model.safetensors", 4 * parameters)
    return where


class Torch:
    """A torch on a machine with or without a GPU."""

    def __init__(self, gpu: bool) -> None:
        self.cuda = self
        self.is_available = lambda: gpu
        self.is_bf16_supported = lambda: True


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    def machine(speed: CpuSpeed) -> None:
        monkeypatch.setattr(number_format, "measure", lambda torch: speed)
        monkeypatch.setattr(speeds, "cpu_speed", lambda: speed)
        monkeypatch.setattr(demo_lm, "cpu_speed", lambda: speed)
        monkeypatch.setattr(demo_lm, "cores_at_once", float)
        monkeypatch.setitem(sys.modules, "torch", Torch(gpu=False))  # type: ignore[arg-type]
        monkeypatch.setattr(speeds, "hosts_of", lambda config, environ: ())

    return machine


@pytest.mark.parametrize(
    ("setting", "speed", "gpu", "dtype", "warned"),
    [
        ("auto", OLD, False, "float32", False),
        ("auto", NEW, False, "bfloat16", False),
        ("auto", SLOW, False, "float32", False),
        ("auto", OLD, True, "bfloat16", False),
        ("bfloat16", OLD, False, "bfloat16", True),
        ("bfloat16", NEW, False, "bfloat16", False),
        ("bfloat16", OLD, True, "bfloat16", False),
        ("float32", NEW, True, "float32", False),
    ],
)
def test_auto_is_what_the_machine_is_faster_in_and_a_slow_choice_is_told(
    tmp_path: Path, on: Any, setting: Any, speed: CpuSpeed, gpu: bool, dtype: str, warned: bool
) -> None:
    on(speed)
    said: list[str] = []
    assert resolve(setting, folder(tmp_path / "m"), said.append, lambda: Torch(gpu), gpu=True) == dtype
    assert len(said) == warned and all("50 GFLOP/s in float32, 0.95 in bfloat16" in line for line in said)
    if setting == "auto":
        assert resolve("auto", tmp_path / "m", said.append, lambda: Torch(gpu), gpu=False) == speed.best


def test_small_absent_and_refused_models_are_float32_without_a_look_at_the_machine(tmp_path: Path) -> None:
    refused = [folder(tmp_path / kind, model_type=kind) for kind in sorted(KEEPS_FLOAT32)]
    for model in (folder(tmp_path / "small", SMALL - 1), tmp_path / "absent", *refused):
        assert resolve("auto", model, pytest.fail, lambda: pytest.fail("torch was imported"), gpu=True) == "float32"


def test_the_models_refused_in_bfloat16_are_those_of_the_measured_table() -> None:
    lines = Path("docs/models.md").read_text().splitlines()
    number = next(line.split(".")[0] for line in lines if "would round them to bfloat16" in line)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.count("|") == 11]
    column = next(row for row in rows if "bfloat16" in row).index("bfloat16")
    assert {re.split(r"[ ,]", row[1])[0] for row in rows if row[column] == f"refused ({number})"} == KEEPS_FLOAT32


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    if not (tmp_path / "model").exists():
        folder(tmp_path / "model")
    return load_config(None, [f"run.model={tmp_path}/model", f"run.dir={tmp_path}/run", *overrides])


STAGE, ENGINE = "learner.engine.zero_stage=1", "engine.kind={type: cpu, dtype: bfloat16}"


@pytest.mark.parametrize(
    ("speed", "overrides", "learner", "engine"),
    [
        (OLD, (STAGE,), "float32", "float32"),
        (NEW, (STAGE,), "bfloat16", "bfloat16"),
        (NEW, (), "float32", "float32"),
        (NEW, ("launch.learner=false",), "auto", "bfloat16"),
        (NEW, ("learner.model.dtype=float32", STAGE), "float32", "float32"),
        (OLD, ("learner.model.dtype=bfloat16", STAGE), "bfloat16", "bfloat16"),
        (OLD, (ENGINE, STAGE), "bfloat16", "bfloat16"),
        (OLD, (ENGINE,), "float32", "bfloat16"),
    ],
)
def test_learner_and_engine_of_a_run_have_one_dtype(
    tmp_path: Path, on: Any, speed: CpuSpeed, overrides: tuple[str, ...], learner: str, engine: str
) -> None:
    on(speed)
    found = with_dtypes(config(tmp_path, *overrides), {}, lambda: speed)
    assert (found.learner.model.dtype, found.engine.kind.dtype) == (learner, engine)  # type: ignore[union-attr]
    assert f"dtype: {engine}" in found.to_yaml()


@pytest.mark.parametrize(("saved", "dtype"), [({DTYPE: "bfloat16"}, "bfloat16"), ({}, "float32")])
def test_a_run_resumes_in_the_dtype_that_it_began_with(
    tmp_path: Path, on: Any, saved: dict[str, str], dtype: str
) -> None:
    on(OLD if saved else NEW)
    given = config(tmp_path, STAGE)
    Checkpoints(given.run.checkpoint_dir, 1).write(
        {"defining": saved},
        step=1,
        epoch=1,
        lineage=[PolicyVersion(1, 0)],
        save=lambda path: None,
        confirm=lambda: None,
    )
    assert with_dtypes(given, {}).engine.kind.dtype == dtype  # type: ignore[union-attr]
    assert with_dtype(given.run, given.learner).model.dtype == dtype


def test_doctor_shows_speed_and_time_and_warns_of_a_slow_dtype(tmp_path: Path, on: Any) -> None:
    on(OLD)
    (slow,) = speeds.findings(config(tmp_path, "learner.model.dtype=bfloat16", ENGINE, STAGE))
    (fast,) = speeds.findings(with_dtypes(config(tmp_path, STAGE), {}, lambda: OLD))
    assert (slow.verdict, fast.verdict) == ("warn", "ok") and "auto" in slow.fix
    assert "AVX2" in fast.detail and "0.95 in bfloat16" in slow.detail and "trajectories of 4,096 tokens" in fast.detail
    (alone,) = speeds.machine()
    assert alone.detail.endswith("dtype auto is float32")


def test_the_demo_ends_within_two_hours_on_old_cores_and_says_so(on: Any) -> None:
    on(NEW)
    full = demo_lm.chosen_sizes(135e6, [200, 100])
    on(OLD)
    short = demo_lm.chosen_sizes(135e6, [200, 100])
    assert (full["updates"], full["limit"], full["steps"]) == (72, demo_lm.HELD_OUT, 50)
    assert 2 <= short["steps"] < 50 and short["updates"] < 72 and "in float32" in short["expected"]
    assert demo_lm.chosen_sizes(1e6, [200, 100])["steps"] == 50, "of a small model"


@pytest.mark.slow
def test_a_cpu_limited_to_avx2_is_measured_as_slow_in_bfloat16() -> None:
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, env=limited, timeout=120)
    found = CpuSpeed(**json.loads(done.stdout))
    assert not found.native and found.best == "float32" and 0 < found.bfloat16 < found.float32


def test_another_system_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(machine.system())
    monkeypatch.setattr(sys, "platform", "darwin")
    (refused,) = machine.system()
    assert refused.verdict == "fail" and "needs Linux, this is darwin" in refused.detail and "container" in refused.fix
    with pytest.raises(UserError, match="needs Linux"):
        _die_with_parent(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(lifecycle, "Path", lambda name: tmp_path / "no proc")
    given = config(tmp_path)
    assert lifecycle.memory_available() is None
    assert not list(machine.main_memory(given, None)), "unknown is not too little"
