"""What the launcher and the client send and read, against the names in SGLang's source: no start, no GPU, seconds.

The sent half is recorded from the launcher and the client, so it cannot be outdated. The source is that of
FORAY_SGLANG_PYTHON, or a wheel or folder named by FORAY_SGLANG_SOURCE (`make sglang-source SGLANG_VERSION=...`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest
from sglang_source import SERVER, SglangSource

from deploy.hardware.profiles import ADAPTERS, OWN_GPU
from protocol.messages import Sampling, WeightView
from protocol.weights import WeightBucket
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError, GenerateRequest
from rollout_server.engine.client import EngineHttp, SglangClient
from rollout_server.node.config import SglangEngine
from rollout_server.node.process import EngineKeys, command
from rollout_server.node.status import SGLANG_RETRACTIONS

PYTHON, SOURCE = os.environ.get("FORAY_SGLANG_PYTHON", ""), os.environ.get("FORAY_SGLANG_SOURCE", "")
LOCK = Path(__file__).parents[3] / "requirements" / "engine.lock"
MANAGER, BATCH = "srt/managers/tokenizer_manager.py", "srt/managers/schedule_batch.py"
COUNTERS = "srt/observability/metrics_collector.py"
READ: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "chunks of /generate": (
        ("output_ids", "meta_info", "finish_reason", "completion_tokens", "output_token_logprobs", "weight_version"),
        (MANAGER,),
    ),
    "versions of tokens": (("weight_versions", "version", "start", "end"), ("srt/utils/weight_versions.py",)),
    "finish reasons": (("type", "stop", "length", "abort", "matched", "message", "status_code"), (BATCH,)),
    "errors in a stream": (("error", "message"), (SERVER,)),
    "/model_info": (("weight_version",), (SERVER,)),
    "/server_info": (("version",), (SERVER,)),
    "/weights_checker": (("success", "message", "ranks", "per_engine_checksum"), (SERVER,)),
    "answers about weights": (("success", "message", "error_message"), ("srt/managers/io_struct.py",)),
    "/v1/loads": (("loads",), ("srt/entrypoints/v1_loads.py",)),
    "figures of /v1/loads": (
        ("num_running_reqs", "num_waiting_reqs", "gen_throughput", "token_usage", "max_running_requests"),
        ("srt/managers/load_snapshot.py",),
    ),
    "cache of /v1/loads": (("max_total_num_tokens",), ("srt/managers/load_snapshot.py",)),
    "/tokenize": (("tokens",), ("srt/entrypoints/openai/protocol.py",)),
    "/v1/models": (("data", "id"), ("srt/entrypoints/openai/protocol.py",)),
    "a loaded adapter": (("already loaded",), ("srt/lora/lora_manager.py", "srt/lora/lora_registry.py")),
    "/metrics": ((SGLANG_RETRACTIONS,), (COUNTERS,)),
}
"""Answers: names that our code reads, and the files of SGLang that write them."""
REPORTED = (
    *("disable_overlap_schedule", "enable_deterministic_inference", "quantization", "dtype", "enable_lora"),
    *("tp_size", "pp_size", "dp_size", "ep_size", "attn_dp_size", "enable_dp_attention"),
)
"""Fields of ServerArgs in /server_info that `capabilities.py` reads."""
SIZES = ("--tp-size", "--tensor-parallel-size", "--pp-size", "--dp-size", "--enable-dp-attention", "--base-gpu-id")
CPU_ONLY = ("algorithm",)
"""Arguments that a node passes to a CPU engine alone: tests/rollout_server/test_node_distributed.py."""
DEFAULTS = {
    "disable_overlap_schedule": False,
    "enable_deterministic_inference": False,
    "incremental_streaming_output": False,
    "enable_metrics": False,
    "enable_fp32_lm_head": False,
    "enable_dp_attention": False,
    "enable_lora": None,
    "quantization": None,
    "dtype": "auto",
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "random_seed": None,
    "api_key": None,
    "admin_api_key": None,
    "weight_version": "default",
    "UpdateWeightFromDiskReqInput.flush_cache": True,
    "UpdateWeightFromDiskReqInput.keep_pause": False,
    "UpdateWeightsFromDistributedReqInput.selector": "all",
    "UpdateWeightsFromDistributedReqInput.torch_empty_cache": False,
    "PauseGenerationReqInput.mode": "abort",
    "SamplingParams.temperature": 1.0,
    "SamplingParams.top_p": 1.0,
    "SamplingParams.sampling_seed": None,
}
"""Defaults that our code relies on, or overrides because they are what they are."""


class Recorder(EngineHttp):
    """Keeps (method, path, body) of every call."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), "", name="recorded")
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    async def call(self, method: str, path: str, body: dict[str, Any] | None, **_: Any) -> Any:  # type: ignore[override]
        self.calls.append((method, path, body or {}))
        return {"success": True}


async def recorded(tmp_path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Every public method of EngineAdmin, with arguments by their annotations, and one generation."""
    named = {"run": "r", "epoch": 1, "step": 1, "number": 1, "phase": "prepare", "members": (), "rank_offsets": ()}
    view = {"address": "a", "port": 1, "world_size": 2, "group": "g", "backend": "nccl"}
    values: dict[str, Any] = {
        "view": WeightView(**named, **view),
        "bucket": WeightBucket(names=("w",), dtypes=("bfloat16",), shapes=((1,),)),
        "sampling": {"temperature": 1.0, "top_p": 0.9, "top_k": 1},
    }
    plain = {str: "x", int: 1, float: 1.0, bool: True}
    recorder = Recorder()
    admin = EngineAdmin.__new__(EngineAdmin)
    admin._http, admin.name = recorder, recorder.name
    for name, method in inspect.getmembers(EngineAdmin, inspect.iscoroutinefunction):
        if name.startswith("_"):
            continue
        hints = get_type_hints(method)
        given = {
            p: values[p] if p in values else plain.get(hints[p]) or get_args(hints[p])[0]
            for p in list(inspect.signature(method).parameters)[1:]
            if p not in CPU_ONLY
        }
        before = len(recorder.calls)
        try:
            await method(admin, **given)
        except (EngineError, TypeError, AttributeError):
            if len(recorder.calls) == before:  # else the recorder's answer is none of that route
                raise
        assert len(recorder.calls) > before, f"EngineAdmin.{name} calls no route"
    client = SglangClient.__new__(SglangClient)
    client._adapter, client._stream_interval = "1.0", 8
    request = GenerateRequest([1], "s", "g", 1, Sampling(), ("a",), seed=1)
    return [*recorder.calls, ("POST", "/generate", client._body(request, "1.0"))]


def sent_flags(tmp_path: Path) -> set[str]:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    kind = SglangEngine(args=(*OWN_GPU, *ADAPTERS, "--max-total-tokens", "1", "--device", "cuda"), python="/bin/sh")
    keys = EngineKeys("api", "admin")
    words = command(kind, model=tmp_path, label="0.0", host="h", port=1, keys=keys, home=tmp_path, in_place=True)
    in_file = re.findall(r"^([a-z-]+):", (tmp_path / "keys.yaml").read_text(), re.M)
    return {word for word in words if word.startswith("--")} | {f"--{name}" for name in in_file} | set(SIZES)


def compare(source: SglangSource, tmp_path: Path) -> tuple[list[str], dict[str, int]]:
    """Return one line per name that differs, and how many of each kind were compared."""
    calls = asyncio.run(recorded(tmp_path))
    flags, wrong = sent_flags(tmp_path), []
    wrong += [f"no flag {flag}" for flag in sorted(flags - source.flags)]
    wrong += [f"ServerArgs has no {name}" for name in REPORTED if name not in source.arguments]
    fields: set[tuple[str, str]] = set()
    for method, path, body in calls:
        if path == "/metrics":  # mounted, no route
            continue
        if (method, path) not in source.routes:
            wrong.append(f"no route {method} {path}")
            continue
        params = body.get("sampling_params", {})
        fields |= {(source.routes[method, path], name) for name in body} | {("SamplingParams", name) for name in params}
    wrong += [f"{kind or 'no body'} has no {name}" for kind, name in fields if name not in source.classes.get(kind, {})]
    for what, (names, files) in READ.items():
        wrong += [f"{what}: nothing writes {name!r}" for name in names if not source.has(name, *files)]
    for name, default in DEFAULTS.items():
        kind, _, attribute = name.rpartition(".")
        found = (source.classes.get(kind, {}) if kind else source.arguments).get(attribute, "nothing")
        wrong += [] if found == default else [f"the default of {name} is {found!r}, not {default!r}"]
    read = sum(len(names) for names, _ in READ.values())
    counts = {"arguments": len(flags | set(REPORTED)), "routes": len({call[:2] for call in calls})}
    return wrong, counts | {"request fields": len(fields), "answer fields": read, "defaults": len(DEFAULTS)}


def places() -> Iterator[Path]:
    if SOURCE:
        yield Path(SOURCE)
    elif PYTHON:
        yield from (Path(PYTHON).parents[1] / "lib").glob("python3.*/site-packages/sglang")


@pytest.fixture(scope="module")
def place() -> Path:
    if not (SOURCE or PYTHON):
        pytest.skip("neither FORAY_SGLANG_PYTHON nor FORAY_SGLANG_SOURCE names an SGLang: make sglang-source")
    found = next(places(), None)
    assert found and found.exists(), f"no source of SGLang at {SOURCE or PYTHON}"
    return found


def test_names_and_defaults_are_those_of_the_source(place: Path, tmp_path: Path, capsys: Any) -> None:
    wrong, counts = compare(SglangSource(place), tmp_path)
    with capsys.disabled():
        print(f"\n{place.name}: compared " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "renamed",
    [
        ("srt/arg_groups/fields/lora.py", "max_loras_per_batch", "max_adapters_per_batch"),
        ("srt/arg_groups/fields/serving.py", "incremental_streaming_output", "incremental_output"),
        (SERVER, '"/pause_generation"', '"/pause"'),
        ("srt/managers/io_struct.py", "rank_offset", "first_rank"),
        ("srt/sampling/sampling_params.py", "no_stop_trim", "keep_stop"),
        ("srt/utils/weight_versions.py", "weight_versions", "token_versions"),
        ("srt/managers/io_struct.py", "flush_cache: bool = True", "flush_cache: bool = False"),
    ],
    ids=lambda renamed: renamed[2],
)
def test_one_changed_name_is_found(place: Path, tmp_path: Path, renamed: tuple[str, str, str]) -> None:
    wrong, _ = compare(SglangSource(place, renamed), tmp_path)
    name = renamed[1].strip('"').partition(":")[0]
    assert any(name in line or name.replace("_", "-") in line for line in wrong), wrong


def test_the_source_is_of_the_locked_version(place: Path) -> None:
    version = re.search(r"^sglang==(\S+)", LOCK.read_text(), re.M)
    named = re.search(r"sglang-(\d[\d.]*\d)", " ".join([place.name, *(p.name for p in place.parent.glob("sglang-*"))]))
    assert version and named and (SOURCE or named[1] == version[1])
