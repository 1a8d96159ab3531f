"""The structure of the repository, as checks: docs/architecture.md and CONTRIBUTING.md say it in words.

An exception stands in a table with its reason, and goes as soon as nothing needs it. Each check is shown to fail on a
small made-up package.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

from tests import house_measures
from tests.support import house

ROOT = Path(__file__).parent.parent
SERVICES = ("rollout_server", "learner", "retriever")
PACKAGES = ("protocol", *SERVICES, "deploy", "foray")
OURS = (*PACKAGES, "benchmarks")

PURE_IMPORTS = {
    *("__future__", "base64", "collections", "contextlib", "dataclasses", "datetime", "enum", "functools", "hashlib"),
    *("itertools", "json", "math", "operator", "pathlib", "re", "typing", "urllib", "zlib"),
    *("isal", "msgpack", "msgspec", "numpy", "pydantic", "pydantic_core", "xxhash"),
}
"""What `protocol` may import: no sockets, files, clock, threads or environment."""

MOST_CODE_LINES = 56_500
"""Of the wheel."""

SGLANG_CPU = "requirements/sglang_cpu_launch.py"
"""Run by the interpreter of an environment that holds nothing of ours."""
MODELS = ("learner/", "retriever/encoder/", "retriever/rerank/", "foray/demo/", "foray/api/", "benchmarks/", SGLANG_CPU)
ONLY_IN: dict[str, tuple[str, ...]] = {
    "deepspeed": ("learner/engine/",),
    # the benchmark compares with FAISS by itself
    "faiss": ("retriever/index/faiss_", "benchmarks/retriever/raw.py"),
    "bm25s": ("retriever/index/bm25",),
    "torch": ("rollout_server/cpu_engine/", "retriever/index/torch_flat.py", *MODELS),
    "transformers": MODELS,
    "sglang": (SGLANG_CPU,),
    "ray": ("deploy/launch/ray_cluster.py",),
    "trl": ("benchmarks/learner/trl_baseline.py",),
    "datasets": ("benchmarks/learner/trl_baseline.py",),
    "peft": ("learner/model/lora.py",),
    "matplotlib": ("foray/watch/plot.py", "benchmarks/pages/plots.py"),
    "pyarrow": ("protocol/runtime/records.py", "foray/api/run.py"),
    "pickle": (),
}
"""Framework -> the only places that may import it (files or folders)."""
MATH = (
    *("learner/algorithms/advantages/", "learner/algorithms/losses/", "learner/algorithms/kl/"),
    *("learner/model/logprobs.py", "learner/data/batch.py"),
)
"""Places that import torch, numpy and data types, and nothing else."""
HEAVY = {
    *("torch", "transformers", "tokenizers", "deepspeed", "peft", "faiss", "bm25s", "aiohttp", "redis"),
    *("matplotlib", "prometheus_client", "pyarrow"),
}
COMMANDS = ("learner", "rollout_server", "rollout_server.node", "rollout_server.cpu_engine", "retriever", "foray")

DOUBLE_CLASSES: set[str] = set()
"""Class names that stand in two modules for two things. May only shrink."""

LONELY = {
    "deploy.doctor.access": "the doctor has one file a kind of check",
    "deploy.doctor.speed": "the doctor has one file a kind of check",
    "protocol.runtime.http.connector": "a subclass of aiohttp's: commands that open no session do not import aiohttp",
}
"""Modules under 60 lines with one importer, beside them, that stay apart -> why."""

UNUSED = {
    "set on an object of a library, which reads it": {
        *("distance_compute_blas_threshold", "epilog", "pre_tokenizer", "__compatible_ops__", "see_memory_usage"),
        *("_global_grad_norm", "_disable_adapters", "__class__", "excepthook", "exc_text", "maxother"),
        *("maxstring", "use_cache", "useFloat16", "efConstruction", "min_points_per_centroid", "own_fields"),
        *("max_points_per_centroid", "niter", "allow_fp16_reduced_precision_reduction"),
        *("num_key_value_groups", "row_factory", "_is_hf_initialized"),
    },
    "called by Python": {"__getattr__", "__dir__"},
    "called by a library": {
        *("_zero_init_param", "_generate_and_score_completions", "on_step_begin", "on_step_end", "on_log", "kwargs"),
        *("handle_starttag", "handle_startendtag", "handle_endtag", "attrs"),
        *("pipe_data_received", "process_exited", "connection_lost", "exc"),
    },
    "a field that leaves the process: in a message, a report or a table": {
        *("escape_version", "question_id", "practice_steps", "world_cpu_s", "inert"),
        *("tool_calls", "tool_call_id"),
        *("redelivered", "reissued", "poisoned", "state_lost", "lease_lapsed", "tokens_sampled"),
    },
}
"""Why a name that vulture takes for unused is needed -> the names."""


@cache
def everything() -> dict[str, house.Module]:
    return house.read_modules(ROOT, (*OURS, "examples", "requirements"))


def modules(*packages: str) -> dict[str, house.Module]:
    return {name: module for name, module in everything().items() if name.partition(".")[0] in packages}


def test_no_module_imports_itself_by_way_of_others() -> None:
    wrong = house.circles(house.import_graph(modules(*OURS)))
    assert not wrong


def test_a_folder_has_three_to_seventeen_modules() -> None:
    wrong = house.folder_sizes(modules(*OURS))
    assert not wrong


def test_protocol_is_pure_outside_its_runtime() -> None:
    found = house.impurities(modules("protocol"), "protocol", apart="protocol.runtime", allowed=PURE_IMPORTS)
    assert not found


@pytest.mark.parametrize("package", PACKAGES)
def test_services_import_only_protocol(package: str) -> None:
    allowed = {"protocol": (), "deploy": ("protocol", *SERVICES), "foray": ("protocol", *SERVICES, "deploy")}.get(
        package, ("protocol",)
    )
    wrong = house.foreign_imports(modules(*OURS), package, ours=OURS, allowed=allowed)
    assert not wrong


@pytest.mark.slow  # `make test` runs it as part of lint
def test_layers_hold() -> None:
    done = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("framework", ONLY_IN)
def test_a_framework_is_imported_only_where_it_belongs(framework: str) -> None:
    wrong = house.misplaced(everything(), framework, ONLY_IN[framework])
    assert not wrong


@pytest.mark.parametrize("place", MATH)
def test_math_imports_torch_and_data_types_only(place: str) -> None:
    files = [m for m in modules("learner").values() if m.path.as_posix().startswith(place)]
    allowed = {"torch", "numpy", "protocol", "learner"} | sys.stdlib_module_names
    assert files and not {(m.name, n) for m in files for n in m.frameworks - allowed}


def test_the_house_is_no_larger_than_its_ceilings() -> None:
    """tests/house_measures.py explains the measures, and how a ceiling is raised."""
    ceilings, found = json.loads(house_measures.FILE.read_text()), house_measures.measures(everything())
    assert sum(found["code_lines"][package] for package in PACKAGES) <= MOST_CODE_LINES
    wrong = house_measures.beyond(ceilings, found)
    assert not wrong, "fewer or new: python tests/house_measures.py --write; more: see its docstring"


def test_a_measure_has_a_ceiling_that_is_near() -> None:
    ceilings = {"knobs": 10, "code_lines": {"learner": 2000, "learner/model": 500, "learner/sft": 9}}
    found = {"knobs": 11, "code_lines": {"learner": 1399, "learner/model": 561, "learner/data": 1}, "circles": 0}
    assert house_measures.beyond(ceilings, ceilings) == []
    assert house_measures.beyond(ceilings, found) == [
        "circles: 0, ceiling None",
        "code_lines learner: 1399, ceiling 2000",
        "code_lines learner/data: 1, ceiling None",
        "code_lines learner/model: 561, ceiling 500",
        "code_lines learner/sft: None, ceiling 9",
        "knobs: 11, ceiling 10",
    ]
    within = {"knobs": 9, "code_lines": {"learner": 1400, "learner/model": 560, "learner/sft": 1}}
    assert house_measures.beyond(ceilings, within) == []


def test_a_package_of_the_wheel_is_measured_with_its_subfolders() -> None:
    files = ("learner/a.py", "learner/model/b.py", "learner/model/deep/c.py", "benchmarks/learner/d.py")
    found = house_measures.code_lines({path: house.Module(path, Path(path), "x = 1\n") for path in files})
    assert {folder: lines for folder, lines in found.items() if lines} == {
        **{"learner": 3, "learner/model": 2},
        "benchmarks": 1,
    }


def test_a_class_name_is_used_once() -> None:
    found = house.double_classes(modules(*PACKAGES))
    assert found.keys() == DOUBLE_CLASSES and len(DOUBLE_CLASSES) <= 10


def test_files_and_functions_keep_their_caps() -> None:
    wrong = house.long_files(modules(*OURS)) + house.long_functions(modules(*OURS))
    assert not wrong


def test_nothing_new_is_raised_within_except_star() -> None:
    assert not house.raises_in_except_star(modules(*OURS))


def test_a_small_module_is_part_of_its_only_importer() -> None:
    found = house.lonely_modules(modules(*OURS))
    assert found.keys() == LONELY.keys()


def test_every_folder_says_what_it_is_for() -> None:
    wrong = house.silent_inits(modules(*OURS))
    assert not wrong


def test_nothing_is_unused() -> None:
    found = house.unused_code(modules(*OURS))
    known = set().union(*UNUSED.values())
    assert not {name: where for name, where in found.items() if name not in known}
    assert known <= found.keys(), "an exception that nothing needs"


def test_every_module_is_imported_or_named() -> None:
    wrong = house.unreferenced_modules(modules(*OURS))
    assert not wrong


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


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("deploy.config, rollout_server.config, learner.config.learner, retriever.config", HEAVY),
        ("foray.watch.report, deploy.launch.launcher", HEAVY - {"aiohttp", "redis"}),
    ],
)
def test_settings_report_and_launcher_need_no_framework(modules: str, heavy: set[str]) -> None:
    code = f"import sys, {modules}\nfound = set(sys.modules) & {heavy!r}\nassert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_repository_names_no_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    foreign = re.compile(r"(^|[^A-Za-z0-9_.])/(work|farm|root)/")
    wrong = []
    for path in (ROOT / name for name in tracked if ROOT / name != Path(__file__)):
        if path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".txt", ".json", ""} and path.is_file():
            lines = enumerate(path.read_text().splitlines(), 1)
            wrong += [f"{path}:{number}" for number, line in lines if foreign.search(line)]
    assert not wrong


# Each check fails on a package that breaks its rule.


def made(root: Path, **files: str) -> dict[str, house.Module]:
    """Write a package `p`, with `__init__` and files by name (`__` is a slash), and read it."""
    for name, text in {"__init__": '"""P."""', **files}.items():
        folder, _, file = name.removesuffix("__init__").rpartition("__")
        path = root / "p" / folder / f"{file or '__init__'}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return house.read_modules(root, ["p"])


@pytest.mark.parametrize(
    "arrow",
    [
        "import p.a",
        "from p import a",
        "from . import a",
        "def f():\n    from p.a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import x",
    ],
)
def test_a_circle_of_any_imports_is_found(tmp_path: Path, arrow: str) -> None:
    found = house.circles(
        house.import_graph(made(tmp_path, a="import p.b\nx = 1", b="import p.c", c=arrow, d="import p.a"))
    )
    assert found == ["p.a <-> p.b <-> p.c"]
    assert not house.circles(house.import_graph(made(tmp_path, c="x = 1")))


def test_a_package_on_the_way_to_a_member_is_no_circle(tmp_path: Path) -> None:
    assert not house.circles(
        house.import_graph(made(tmp_path, __init__="from p.a import x", a="from p.b import x", b="x = 1"))
    )


def test_a_folder_with_two_or_eighteen_modules_is_found(tmp_path: Path) -> None:
    found = house.folder_sizes(made(tmp_path, sub____init__="", sub__a="", **{f"m{n}": "" for n in range(17)}))
    assert found == ["p: 18 modules", "p/sub: 2 modules"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import socket", "p.a imports socket"),
        ("def f():\n    import time", "p.a imports time"),
        ("from p.runtime.b import x", "p.a imports p.runtime.b"),
        ("open('x')", "p.a:1 calls open"),
        ("from pathlib import Path\nPath('x').read_text()", "p.a:2 calls read_text"),
        ("from datetime import datetime\ndatetime.now()", "p.a:2 calls now"),
    ],
)
def test_an_impure_module_is_found(tmp_path: Path, source: str, said: str) -> None:
    found = made(tmp_path, a=source, runtime____init__="import socket", runtime__b="open('x')")
    assert said in house.impurities(found, "p", apart="p.runtime", allowed={"pathlib", "datetime"})


def test_imports_of_other_services_and_misplaced_frameworks_are_found(tmp_path: Path) -> None:
    found = made(tmp_path, a="def f():\n    import torch.nn\n    from q.x import y", b="import protocol.keys")
    assert house.foreign_imports(found, "p", ours=("p", "q", "protocol"), allowed=("protocol",)) == ["p.a imports q"]
    assert house.misplaced(found, "torch", ("p/b",)) == ["p/a.py imports torch"] == house.misplaced(found, "torch", ())
    assert not house.misplaced(found, "torch", ("p/a.py",))


def test_a_class_name_of_two_modules_is_found(tmp_path: Path) -> None:
    found = made(tmp_path, a="class Window: ...\nclass _Own: ...", b="class Window: ...\nclass _Own: ...")
    assert house.double_classes(found) == {"Window": ["p.a", "p.b"]}


def test_a_long_file_and_a_long_function_are_found(tmp_path: Path) -> None:
    found = made(tmp_path, a="x = 1\n" * 501, b="def f():\n" + "    x = 1\n" * 60, c="x = 1\n" * 500)
    assert house.long_files(found) == ["p/a.py: 501 lines"]
    assert house.long_functions(found) == ["p/b.py:f: 61 lines"]


def test_a_raise_within_except_star_is_found(tmp_path: Path) -> None:
    text = "try:\n    f()\nexcept* OSError as group:\n    raise{}\n"
    found = made(tmp_path, a=text.format(" ValueError"), b=text.format(""))
    assert house.raises_in_except_star(found) == ["p/a.py:4"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("# a comment\n\nx = 1  # another\n", 1),
        ('"""A docstring\n\nof three lines."""\nx = 1\n"""About x."""\n', 1),
        ('def f():\n    """Docstring."""\n    return (\n        1,\n        # why\n        2,\n    )\n', 5),
        ("x = 1 + \\\n    2\n", 2),
        ('TEXT = """\n# counted\n\nup to the end"""\n', 4),
    ],
)
def test_code_lines_are_neither_blank_comment_nor_docstring(source: str, lines: int) -> None:
    assert house.code_lines(house.Module("a", Path("a.py"), source)) == lines


def test_own_knobs_are_counted_once(tmp_path: Path) -> None:
    source = """
        class Settings: ...
        class Group(Settings):
            size: int = 1
        class Base(Settings):
            type: str = ""
            rate: float = 1.0
            group: Group = Group()
            kept: ClassVar[int] = 3
        class Sub(Base):
            rate: float = 2.0
            own: Group | None = None
        class Other:
            field: int = 1
    """
    assert house.own_knobs(made(tmp_path, a=source)) == 3, "size, rate, own"


def test_arrows_up_and_mutual_folders_are_found(tmp_path: Path) -> None:
    files = {"low__a": "def f():\n    import p.high.b", "high__b": "import p.low.a, p.side.c", "side__c": "x = 1"}
    found = made(tmp_path, low____init__="", high____init__="", side____init__="", **files)
    assert house.arrows_up(found, ["high", "low | side"], "p") == ["p.low.a -> p.high.b"]
    assert house.mutual_folders(found, "p") == ["p: high <-> low"]


def test_a_small_module_of_one_neighbour_is_found(tmp_path: Path) -> None:
    neighbours = {"a": "import p.small, p.shared, p.large, p.sub.x", "b": "import p.shared", "sub__x": ""}
    found = made(tmp_path, small="", shared="", large="x = 1\n" * 60, **neighbours)
    assert house.lonely_modules(found) == {"p.small": "p.a"}


def test_an_unused_name_and_an_unreferenced_module_are_found(tmp_path: Path) -> None:
    source = "def used(): ...\ndef unused(): ...\nclass Registered: ...\n"
    found = made(tmp_path, a=source, b="from p.a import used\nREGISTRY = 'p.a:Registered'\nused(REGISTRY)")
    assert house.unused_code(found) == {"unused": ["p/a.py:2 function"]}
    assert house.unused_code(found, "unused") == {}
    assert house.unreferenced_modules(found) == ["p.b"]


def test_an_init_without_a_docstring_is_found(tmp_path: Path) -> None:
    assert house.silent_inits(made(tmp_path, sub____init__="")) == ["p/sub/__init__.py"]
