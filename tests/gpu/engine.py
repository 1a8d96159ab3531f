"""SGLang as a node starts it: start times, the first request with top_p, log-probs against the learner's, the contract.

`python -m tests.gpu.engine parity|contract FOLDER DEVICE PYTHON` prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.command import stdout_to_stderr
from deploy.hardware.profiles import ADAPTERS
from protocol.errors import ForayError
from protocol.messages import Sampling
from protocol.runtime.http.body import bounded_session
from protocol.runtime.net import free_port
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from rollout_server.engine.client import SglangClient
from rollout_server.node.config import SglangEngine
from rollout_server.node.process import EngineProcess, command, environment

if TYPE_CHECKING:
    import torch

    from learner.model.policy import PolicyModel

LAUNCHER = Path("requirements/sglang_cpu_launch.py")
ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--lora-backend", "torch_native"),
    *("--skip-server-warmup", "--max-total-tokens", "65536"),
)
START_S = 900.0
TURNS, PROMPT, ANSWER = 64, 64, 64
BASE, ADAPTER = "1.0", "1.1"


def engine(device: str, python: str, *args: str) -> SglangEngine:
    """Return the settings of the engine on `device`: cuda or cpu."""
    if device == "cpu":
        return SglangEngine(python=python, launcher=LAUNCHER, args=(*ON_CPU, *args))
    return SglangEngine(python=python, args=("--mem-fraction-static", "0.4", *args))


@asynccontextmanager
async def serving(kind: SglangEngine, model: Path, log: Path) -> AsyncIterator[tuple[str, EngineAdmin, float]]:
    """Start an engine; yield its URL, a client and the seconds to its first token. Raises ForayError."""
    port, begun = free_port("127.0.0.1"), time.monotonic()
    url = f"http://127.0.0.1:{port}"
    child = await EngineProcess.start(
        lambda home: command(kind, model=model, label=BASE, host="127.0.0.1", port=port, home=home),
        environment(kind),
        log,
    )
    try:
        async with bounded_session() as session:
            admin = EngineAdmin(session, url)
            while True:
                try:
                    await admin.health(timeout_s=60)
                    break
                except EngineError as error:
                    if child.returncode is not None or time.monotonic() - begun > START_S:
                        raise ForayError(f"SGLang does not start ({error}):\n{child.tail()}") from None
                await asyncio.sleep(0.2)
            yield url, admin, time.monotonic() - begun
    finally:
        await child.stop()


async def parity(folder: Path, device: str, python: str) -> dict[str, Any]:
    """Start the engine twice; compare its log-probs with the learner's, without and with adapters."""
    import torch

    from learner.model.lora import adapters_off

    policy, model, adapter = _policy(folder, device)
    kind = engine(device, python, *ADAPTERS, *(("--dtype", "float32") if device == "cpu" else ()))
    out: dict[str, Any] = {}
    async with serving(kind, model, folder / "cold.log") as (_, _, out["cold_start_s"]):
        pass
    async with serving(kind, model, folder / "warm.log") as (url, admin, out["warm_start_s"]):
        for name in ("first_top_p_s", "second_top_p_s"):
            begun = time.monotonic()
            await admin.warm_up({"temperature": 1.0, "top_p": 0.95}, timeout_s=300)
            out[name] = time.monotonic() - begun
        await admin.load_adapter(ADAPTER, str(adapter), timeout_s=120)
        for name, label in (("base", ""), ("adapter", ADAPTER)):
            turns = await _turns(url, label, policy.vocabulary)
            with torch.inference_mode():
                if label:
                    ours = _scores(policy, turns, device)
                else:
                    with adapters_off(policy):
                        ours = _scores(policy, turns, device)
            gaps = [abs(a - b) for (_, turn), own in zip(turns, ours, strict=True)
                    for a, b in zip(turn.logprobs, own, strict=True)]  # fmt: skip
            out |= {f"{name}_median": median(gaps), f"{name}_max": max(gaps), f"{name}_tokens": len(gaps)}
    return out


def _policy(folder: Path, device: str) -> tuple[PolicyModel, Path, Path]:
    """Return a policy with a random adapter, and the folders of model and adapter."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.engine import random_model
    from learner.config.model import LoraSettings, ModelSettings
    from learner.model.loading import load_policy
    from learner.weights.adapter import CONFIG, WEIGHTS, in_peft_names, peft_config

    gpu = device == "cuda"
    model, adapter = random_model(folder / "model", "0.5b" if gpu else "tiny"), folder / "adapter"
    dtype = "bfloat16" if gpu else "float32"
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(facts | {"dtype": dtype}))
    settings = ModelSettings.model_validate({"dtype": dtype, "lora": LoraSettings(rank=8, alpha=16)})
    policy = load_policy(model, settings, packed=False).to(device).eval()
    torch.manual_seed(0)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.05)
    tensors = {
        name: tensor.detach().float().cpu().contiguous()
        for name, tensor in in_peft_names((n, p) for n, p in policy.causal.named_parameters() if ".lora_" in n)
    }
    adapter.mkdir(exist_ok=True)
    save_file(tensors, adapter / WEIGHTS)
    (adapter / CONFIG).write_text(peft_config(tensors, 16.0, model))
    return policy, model, adapter


async def _turns(url: str, adapter: str, vocabulary: int) -> list[tuple[list[int], Completion]]:
    chosen = random.Random(0)
    prompts = [[chosen.randrange(2, min(vocabulary, 1000)) for _ in range(PROMPT)] for _ in range(TURNS)]
    async with bounded_session() as session:
        client = SglangClient(session, url, adapter=adapter)
        asked = [GenerateRequest(ids, str(n), str(n), ANSWER, Sampling()) for n, ids in enumerate(prompts)]
        answers = await asyncio.gather(*(client.generate(r, version=adapter or BASE, timeout_s=300) for r in asked))
    return list(zip(prompts, answers, strict=True))


def _scores(policy: PolicyModel, turns: Sequence[tuple[list[int], Completion]], device: str) -> list[list[float]]:
    import torch

    def of(ids: list[int], answer: list[int]) -> torch.Tensor:
        row = torch.tensor([ids + answer], device=device)
        at = torch.arange(len(ids) - 1, row.shape[1] - 1, device=device)
        places = torch.arange(row.shape[1], device=device)[None]
        found: torch.Tensor = policy(row, places, None, at, row[0, len(ids) :], 1.0, False).logprobs
        return found

    return [of(ids, list(turn.ids)).tolist() for ids, turn in turns]


async def contract(folder: Path, device: str, python: str) -> dict[str, Any]:
    """Run the engine contract over HTTP against an engine in float32. On a CPU only its first file."""
    from tests.contracts.engine.contract_models import write_model

    model = write_model(folder / "contract", 0)
    args = ("--dtype", "float32", *(("--attention-backend", "triton") if device == "cuda" else ()), "--enable-lora")
    kind = engine(device, python, *args, *ADAPTERS[1:])
    files = "tests/contracts/engine" + ("/test_engine_generate.py" if device == "cpu" else "")
    async with serving(kind, model, folder / "contract.log") as (url, _, seconds):
        env = os.environ | {"FORAY_SGLANG_URL": url, "FORAY_SGLANG_MODEL": str(model)}
        argv = [sys.executable, "-m", "pytest", "-q", files, "-m", "not architectures", "-k", "sglang"]
        done = await asyncio.to_thread(subprocess.run, argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ForayError(f"the contract fails:\n{done.stdout[-3000:]}")
    return {"start_s": seconds, "tests": done.stdout.splitlines()[-1]}


def main(argv: Sequence[str]) -> None:
    """Run one of the two, and print what it found."""
    what, folder, device, python = argv
    Path(folder).mkdir(parents=True, exist_ok=True)
    with stdout_to_stderr():
        found = asyncio.run({"parity": parity, "contract": contract}[what](Path(folder), device, python))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
