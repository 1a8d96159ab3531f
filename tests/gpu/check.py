"""Check a machine with one NVIDIA GPU in stages: `make gpu-check`.

    python -m tests.gpu.check [STAGE ..] [--fresh]

Each stage ends in minutes and prints one line. What has passed is kept in .cache/gpu-check.json and not repeated;
--fresh repeats it. FORAY_GPU_CHECK=cpu tries every stage on a CPU, with small sizes. NET=no leaves out what needs
SGLang; a stage whose packages are not installed is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.base import machine_facts
from benchmarks.command import rounded
from benchmarks.figures.__main__ import logged
from benchmarks.figures.table import FOLDER, GPU_LEARNER
from benchmarks.pages.hardware import CHECKED, stage_table
from benchmarks.report import ROOT
from deploy.doctor import gpu_host
from deploy.hardware.gpus import cuda_of_driver, cuda_of_torch, without_cuda
from deploy.hardware.inventory import GIB, gib
from protocol.errors import ForayError
from protocol.runtime.files import atomic_write
from protocol.runtime.lifecycle import terminating
from rollout_server.node.config import GPU_INTERPRETER, SglangEngine
from rollout_server.node.process import installed_versions

Figures = dict[str, Any]
CPU_INTERPRETER = ".venv-sglang/bin/python"
SCAN = "tests/retriever/test_torch_flat.py"
TESTS = ("tests/learner/test_trainer.py", "tests/learner/test_scoring.py", "tests/contracts/test_algorithm.py", SCAN)
"""Tests that compute on the GPU where there is one."""
DISK = 40 * GIB
LARGEST_GAP = 0.01
"""Largest median difference of log-probs of engine and learner. A bfloat16 output layer has about this."""


@dataclass(frozen=True)
class Machine:
    """Where the stages run. `device`: cuda, or cpu for a trial; `sglang`: its interpreter."""

    device: str
    sglang: str
    folder: Path

    @property
    def cpu(self) -> bool:
        """Return whether this is a trial."""
        return self.device == "cpu"

    def python(self, name: str, minutes: float, *argv: str, python: str = sys.executable) -> str:
        """Run Python with `argv`; return its output. Raises ForayError if it fails or takes longer."""
        return logged(name, (python, *argv), ROOT, 60 * minutes, self.folder)


@dataclass(frozen=True)
class Stage:
    """One stage.

    run      returns its figures; raises ForayError
    modules  Python packages that it needs
    engine   whether it needs SGLang
    """

    name: str
    run: Callable[[Machine], Figures]
    modules: tuple[str, ...] = ("torch", "transformers")
    engine: bool = False


def host(on: Machine) -> Figures:
    """Check driver, CUDA toolkit, C++ compiler, kernel cache and disk."""
    free = shutil.disk_usage(ROOT).free
    found = [*gpu_host.toolkit(os.environ), gpu_host.cache(os.environ)]
    found += [] if on.cpu else [gpu_host.driver(cuda_of_driver(), cuda_of_torch())]
    wrong = [f"{f.check}: {f.detail}; {f.fix}" for f in found if f.verdict == "fail"]
    wrong += [f"{gib(free)} of disk free, {gib(DISK)} needed"] if free < DISK else []
    if wrong and not on.cpu:
        raise ForayError("\n".join(wrong))
    return {"disk": gib(free), **{f.check: f.verdict for f in found}}


def environments(on: Machine) -> Figures:
    """Compare torch and NCCL of both environments, and compute with each."""
    ours, theirs = (installed_versions(SglangEngine(python=python)) for python in ("", on.sglang))
    if ours != theirs and not on.cpu:
        raise ForayError(f"NCCL refuses a group of different versions: {ours} here, {theirs} in {on.sglang}")
    for name, python in (("ours", sys.executable), ("sglang", on.sglang)):
        on.python(name, 3, "-c", f"import torch; torch.ones(1, device={on.device!r}).sum().item()", python=python)
    return {"ours": " ".join(ours.values()), "sglang": " ".join(theirs.values())}


def faiss(on: Machine) -> Figures:
    """Use FAISS, of CUDA 12, in one process with torch, of CUDA 13."""
    gpu = "" if on.cpu else "index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index);"
    program = (
        f"import torch, faiss, numpy; torch.ones(1, device={on.device!r}); index = faiss.IndexFlatIP(8); {gpu}"
        "x = numpy.eye(8, dtype='float32'); index.add(x); assert (index.search(x, 1)[1][:, 0] == range(8)).all()"
    )
    on.python("faiss", 3, "-c", program)
    return {"found": "8 of 8"}


def tests(on: Machine) -> Figures:
    """Run the tests that compute on the GPU."""
    files = [file for file in TESTS if not on.cpu or file == SCAN or "scoring" in file]
    return _pytest(on, files)


def _pytest(on: Machine, files: Sequence[str]) -> Figures:
    """Run the files, without those that compare with FAISS where it is not installed."""
    files = [file for file in files if file != SCAN or find_spec("faiss")]
    said = on.python("pytest", 10, "-m", "pytest", "-q", *files).splitlines()[-1] if files else "none without faiss"
    return {"tests": said}


def engine(on: Machine) -> Figures:
    """Start SGLang cold and warm, time the first top_p, and compare log-probs without and with adapters."""
    found = _engine(on, "parity")
    for name in ("base_median", "adapter_median"):
        if found[name] > LARGEST_GAP:
            raise ForayError(f"{name} is {found[name]:.2g}: log-probs of engine and learner differ, {found}")
    return found


def contract(on: Machine) -> Figures:
    """Run the engine contract over HTTP."""
    return _engine(on, "contract")


def _engine(on: Machine, what: str) -> Figures:
    where = (str(on.folder / what), on.device, on.sglang)
    out: Figures = json.loads(on.python(what, 20, "-m", "tests.gpu.engine", what, *where))
    return out


def _bench(name: str, kept: Sequence[str], small: Sequence[str]) -> Callable[[Machine], Figures]:
    """Return a stage: the figure `name`, of whose report the values at `kept` are shown; on a CPU `small`."""

    def run(on: Machine) -> Figures:
        if on.cpu:
            report = json.loads(on.python(name, 15, "-m", "foray", *small, "--json"))
        else:
            on.python(name, 20, "-m", "benchmarks.figures", name)
            report = json.loads((FOLDER / f"{name}.json").read_text())
        return {path: _at(report, path) for path in kept}

    return run


def _at(report: Any, path: str) -> Any:
    for name in path.split("."):
        report = report.get(name) if isinstance(report, Mapping) else None
    return report


def retriever(on: Machine) -> Figures:
    """Scan 32 GB of vectors; on a CPU run the tests of the scan."""
    if on.cpu:
        return _pytest(on, [SCAN])
    return _bench("retriever_gpu", ("value", "ratio"), ())(on)


SURVIVED = ("value", "faults.killed.survived", "faults.hangs.survived")
DEMO = ("demo", "--dir", "runs/gpu-check-demo", "--fresh", "run.steps=2")
STAGES = (
    Stage("host", host, ()),
    Stage("environments", environments, ("torch",), engine=True),
    Stage("faiss", faiss, ("torch", "faiss")),
    Stage("tests", tests, ("torch", "transformers", "deepspeed", "hypothesis")),
    Stage("engine", engine, ("torch", "transformers", "peft"), engine=True),
    Stage("contract", contract, ("torch", "transformers", "hypothesis"), engine=True),
    Stage("transfer", _bench("transfer", SURVIVED, ("bench", "transfer", "--quick", "--backend", "gloo")), ("torch",)),
    Stage(
        "learner",
        _bench("learner-gpu", ("value", "ours.mfu"), ("bench", "learner", "--quick", *GPU_LEARNER[-2:])),
        ("torch", "transformers", "deepspeed"),
    ),
    Stage("retriever", retriever, ("torch", "hypothesis")),
    Stage("demo", _bench("demo-gpu", ("em_before", "em_after", "seconds"), DEMO), ("torch", "faiss", "deepspeed")),
)


def run_stage(stage: Stage, on: Machine, *, online: bool) -> dict[str, Any]:
    """Run one stage; return its record: `result` (passed, failed or skipped), `line`, `seconds` and `figures`."""
    absent = [name for name in stage.modules if find_spec(name) is None]
    if stage.engine and not (online and Path(on.sglang).is_file()):
        absent.append(f"sglang ({'NET=no' if not online else on.sglang})")
    if absent:
        return {"result": "skipped", "line": f"not here: {', '.join(absent)}", "seconds": 0.0, "figures": {}}
    begun = time.monotonic()
    try:
        figures = rounded(stage.run(on))
        result, line = "passed", ", ".join(f"{name} {value}" for name, value in figures.items())
    except (ForayError, OSError, ValueError) as error:
        figures, result, line = {}, "failed", str(error)
    return {"result": result, "line": line, "seconds": round(time.monotonic() - begun, 1), "figures": figures}


def main(argv: Sequence[str]) -> int:
    """Return 0 if no stage failed, 1 if one did, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description="Check a machine with a GPU.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", choices=[[], *(s.name for s in STAGES)], default=[])
    parser.add_argument("--fresh", action="store_true", help="repeat what has passed")
    args = parser.parse_args(argv)
    cpu, online = os.environ.get("FORAY_GPU_CHECK") == "cpu", os.environ.get("NET") != "no"
    if not cpu and (why := without_cuda()):
        print(f"error: no GPU\n  why: {why}\n  to try the stages: FORAY_GPU_CHECK=cpu", file=sys.stderr)
        return 2
    name = "gpu-check-cpu" if cpu else "gpu-check"
    state = ROOT / ".cache" / f"{name}.json"
    sglang = os.environ.get("FORAY_SGLANG_PYTHON") or str(ROOT / (CPU_INTERPRETER if cpu else GPU_INTERPRETER))
    on = Machine("cpu" if cpu else "cuda", sglang, ROOT / "runs" / name)
    kept = json.loads(state.read_text()) if state.is_file() and not args.fresh else {"stages": {}}
    state.parent.mkdir(exist_ok=True)
    with terminating():
        for number, stage in enumerate(STAGES, 1):
            known = kept["stages"].get(stage.name, {})
            if args.stages and stage.name not in args.stages:
                continue
            if known.get("result") != "passed" or stage.name in args.stages:
                kept["stages"][stage.name] = known = run_stage(stage, on, online=online)
                kept["machine"] = machine_facts() | {"gpu": _gpu()}
                atomic_write(state, json.dumps(kept, indent=1) + "\n", durable=False)
            print(f"{number}/{len(STAGES)} {stage.name}: {known['result']}, {known['seconds']:.0f} s: {known['line']}")
    if cpu:
        print("\n".join(stage_table(kept)))
    else:
        atomic_write(ROOT / CHECKED, state.read_text().replace(f"{ROOT}/", ""), durable=False)
    return int(any(one["result"] == "failed" for one in kept["stages"].values()))


def _gpu() -> str:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except OSError:
        return ""
    return found.partition(" (UUID")[0].strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
