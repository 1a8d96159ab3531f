"""The walls of docs/architecture.md, executable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["protocol", "rollout_server", "learner", "retriever", "deploy", "benchmarks", "requirements"]

# run by the interpreter of an environment that holds nothing of ours
SGLANG_CPU = "requirements/sglang_cpu_launch.py"
MODELS = ("learner/", "retriever/encoder/", "retriever/rerank/", "deploy/demo/", "benchmarks/", SGLANG_CPU)
# framework -> the only places that may import it (a file or a folder)
ONLY_IN: dict[str, tuple[str, ...]] = {
    "deepspeed": ("learner/engine/",),
    # the benchmark compares with FAISS by itself
    "faiss": ("retriever/index/faiss_", "benchmarks/retriever/raw.py"),
    "bm25s": ("retriever/index/bm25",),
    "torch": ("rollout_server/cpu_engine/", *MODELS),
    "transformers": MODELS,
    "sglang": (SGLANG_CPU,),
    "trl": ("benchmarks/learner/trl_baseline.py",),
    "datasets": ("benchmarks/learner/trl_baseline.py",),
    "peft": ("learner/model/lora.py",),
    "matplotlib": ("deploy/monitor/plot.py",),
    "pyarrow": ("retriever/corpus/formats/",),
    "pickle": (),
}
PURE = (
    "learner/algorithms/advantages/",
    "learner/algorithms/losses/",
    "learner/algorithms/kl/",
    "learner/model/logprobs.py",
    "learner/data/batch.py",
)
"""Math: torch, numpy and facts, nothing else."""
MATH = {"torch", "numpy", "protocol", "learner"}
HEAVY = {
    *("torch", "transformers", "tokenizers", "deepspeed", "peft", "faiss", "bm25s", "aiohttp", "redis"),
    *("matplotlib", "prometheus_client", "pyarrow"),
}


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Top-level names that the file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return frozenset(found)


@pytest.mark.slow  # `make test` runs it as part of lint
def test_layers_hold() -> None:
    done = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("framework", ONLY_IN)
def test_a_framework_is_imported_only_where_it_belongs(framework: str) -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if framework in imports(path) and not str(path.relative_to(ROOT)).startswith(ONLY_IN[framework] or ("-",))
    ]
    assert not wrong


@pytest.mark.parametrize("place", PURE)
def test_math_imports_torch_and_nothing_else(place: str) -> None:
    files = [path for path in sources() if str(path.relative_to(ROOT)).startswith(place)]
    assert files
    foreign = {(path.name, n) for path in files for n in imports(path) if n not in MATH | sys.stdlib_module_names}
    assert not foreign


COMMANDS = ("learner", "rollout_server", "rollout_server.node", "rollout_server.cpu_engine", "retriever", "deploy")


def test_help_answers_without_a_framework() -> None:
    code = (
        f"import sys, runpy\nfor module in {COMMANDS!r}:\n    sys.argv = [module, '--help']\n"
        "    try:\n        runpy.run_module(module, run_name='__main__', alter_sys=True)\n"
        "    except SystemExit as e:\n        assert not e.code, (module, e.code)\n"
        f"    assert not set(sys.modules) & set({sorted(HEAVY)!r}), (module, set(sys.modules) & set({sorted(HEAVY)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.lower().count("usage") >= len(COMMANDS)


def test_configuration_is_parsed_without_a_framework() -> None:
    code = (
        "import sys, deploy.config, rollout_server.config, learner.config, retriever.config\n"
        f"assert not set(sys.modules) & set({sorted(HEAVY)!r}), set(sys.modules) & set({sorted(HEAVY)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
