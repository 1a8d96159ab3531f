"""What the whole session shares: one Redis, one warm start, and the order of the files."""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.forks import Zygote
from tests.support.private_redis import redis_at
from tests.support.warm_start_cache import WarmStart, cached_warm_start

# One thread for each process of the tests, before torch is imported: there are more processes than cores already, and
# a second thread only spins while it waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts pytest in the background lets it ignore SIGINT, and so all the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run; how fast they are made or run says something about the machine only.
hypothesis.settings.register_profile(
    "foray", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("foray")

# Tests make far more objects than garbage in cycles: looking for it as often as is usual takes a tenth of the suite.
gc.set_threshold(100_000, 20, 50)

HEAVY = (
    *("contracts", "chaos", "e2e", "api", "deploy", "simulation", "learner", "rollout_server", "security"),
    "test_house.py",
)
"""Folders and files of many seconds, in this order: a worker that gets one last would keep the others waiting. The slow
tier begins with the engine's contract, which one worker has to itself, and whole runs."""


SLOW_S = 600.0
"""Seconds until a slow test counts as hung; `timeout` in pyproject.toml is for fast ones. A machine may be five times
slower than another, and whole processes start in these tests."""
END = "FORAY_TESTS_END"
"""Environment variable: slow tests that would start after this time (seconds since 1970) are skipped."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist, heavy files first. The order of a run in one process stays that of the folders."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: next((i for i, name in enumerate(HEAVY) if name in item.path.parts), len(HEAVY)))


@pytest.hookimpl(tryfirst=True)  # before its fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests after END, so that a slow machine reports what it has run."""
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get(END, "inf")):
        pytest.skip(f"{item.nodeid} not run: {END} has passed")  # pytest folds equal reasons into a number


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection needs to look at it."""
    gc.collect()
    gc.freeze()


TOGETHER = {
    "deepspeed": (
        *("contracts/engine", "learner/test_engine", "learner/test_ranks", "learner/test_trainer"),
        *("learner/test_critic", "learner/test_export", "learner/test_lora", "learner/test_reference"),
    ),
    "services": ("security/test_http_",),
}
"""Files that one worker has to itself: its zygote and its DeepSpeed cost ten seconds, its services five."""


@pytest.hookimpl(optionalhook=True)  # without xdist there are no workers to share them out to
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with the files of each of TOGETHER taken for one."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((name for name, starts in TOGETHER.items() if file[6:].startswith(starts)), file)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[str]:
    """The unix socket of one Redis for all folders. Tests empty it, or use a run id that nobody else uses."""
    # not pytest's directory: a socket's path may have 107 characters at most
    with (
        tempfile.TemporaryDirectory(prefix="foray-") as folder,
        redis_at(Path(folder), "--appendonly", "yes", "--maxmemory-policy", "noeviction"),
    ):
        yield str(Path(folder) / "s")


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process that has imported torch, DeepSpeed and the product, and forks into what tests run beside themselves."""
    with Zygote(tmp_path_factory.mktemp("zygote") / "log") as zygote:
        yield zygote


@pytest.fixture(scope="session")
def warm_start_once() -> WarmStart:
    """The demo's warm start: a minute of one core, unless one of the same code is in the cache."""
    return cached_warm_start()


@pytest.fixture(scope="session")
def warm_model(request: pytest.FixtureRequest) -> Path:
    """Its model. FORAY_TEST_MODEL names one that is there already, for those who work on these tests."""
    given = os.environ.get("FORAY_TEST_MODEL")
    if given:
        return Path(given)
    made: WarmStart = request.getfixturevalue("warm_start_once")
    return made.directory


TINY = {
    **{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096},
}
"""config.json of a model that the CPU engine serves."""


@pytest.fixture
def run_files(tmp_path: Path) -> Path:
    """A directory with all files of a run that may start: model (8 words), corpus.jsonl, questions.jsonl."""
    import numpy as np
    from safetensors.numpy import save_file

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 7}}}')
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens": (8, 8),
        "model.norm": (8,),
        "lm_head": (8, 8),
        **{
            f"model.layers.0.{name}": shape
            for names, shape in (
                (("self_attn.q_proj", "self_attn.o_proj"), (8, 8)),
                (("self_attn.k_proj", "self_attn.v_proj"), (4, 8)),
                (("mlp.gate_proj", "mlp.up_proj"), (16, 8)),
                (("mlp.down_proj",), (8, 16)),
                (("input_layernorm", "post_attention_layernorm"), (8,)),
            )
            for name in names
        },
    }
    weights = {f"{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "\\"Paris\\"\\nA city."}\n')
    (tmp_path / "questions.jsonl").write_text('{"id": "q1", "question": "where ?", "answers": ["Paris"]}\n')
    return tmp_path
