"""Check that engine and learner can run the model, from its config.json, the installed packages and the devices.

Neither torch nor transformers is imported: `foray up` runs these checks before it starts a process.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.hardware.assign import EngineArgs
from deploy.hardware.gpus import no_device, without_cuda
from deploy.hardware.inventory import HARDWARE
from deploy.hardware.run import planned
from learner.config.learner import DistributedPublishSettings, require_groups
from learner.config.model import ModelSettings
from learner.config.policy import GroupSettings
from learner.model.architecture import refuse_context, refuse_settings
from protocol.errors import UserError
from protocol.runtime.number_format import read_facts
from protocol.settings import RunSettings
from rollout_server.cpu_engine.model.config import read_model_config
from rollout_server.node.config import CpuEngine, SglangEngine

CPU_PARAMETERS = 1_000_000_000
"""Maximum parameters for the CPU engine: its float32 weights take 4 GB, and an answer takes minutes."""
SLOW_PARAMETERS = 50_000_000
"""Parameters from which the CPU engine, made for tests and demos, is slow."""
LARGE_BYTES = 8_000_000_000
"""Size of the weights from which only the first layers are loaded for the check."""
ON_SGLANG = "use SGLang: 'engine.kind={type: sglang}' (without a GPU see examples/sglang_cpu/run.yaml)"
NO_GPU = "start it on a machine with GPUs, or remove launch.hardware; `foray up FILE --dry-run` shows the placement"
HAND = 'docs/operate.md, "Start each process yourself"'
WHOLE_ONLY = frozenset({"olmoe"})
"""`model_type`s that SGLang does not serve with tensor parallelism (docs/design/engine-contract.md)."""
NOT_FACTS = (TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions caused by config.json values of unexpected types."""
PROBE = (
    "import importlib.metadata as m, importlib.util as u\n"
    "print('no' if u.find_spec('sglang') is None else m.version('sglang'))"
)
PROBE_S = 30.0


def engine(config: RunConfig) -> Iterator[Finding]:
    """Check the engine that this run starts: that it is installed and can serve the model and the episodes."""
    kind = config.engine.kind
    if not config.engine_roles:
        return
    if isinstance(kind, SglangEngine):
        yield _sglang(kind)
    facts = read_facts(config.run.model)
    if not facts:
        return  # another check reports a missing model
    if isinstance(kind, CpuEngine):
        yield _cpu(config.run.model)
    elif isinstance(kind, SglangEngine):
        yield from _parallel(kind, facts)
    try:
        yield from _context(config, facts)
    except NOT_FACTS as error:
        yield _unusable(config.run.model, error)


def gpus(config: RunConfig) -> Iterator[Finding]:
    """Check that this machine's GPUs suffice for the processes, in number and memory; read-only."""
    kind, name = config.engine.kind, config.launch.hardware
    if config.launch.backend != "local":
        yield Finding("gpus", "ok", "the cluster assigns them")
        return
    if (number := len(HARDWARE.get(name, ()))) > 1:
        detail = f"launch.hardware is {name}, {number} machines: `foray up` starts one"
        yield Finding("gpus", "fail", detail, "use a profile of one machine, or start each process by itself", HAND)
        return
    try:
        placement, note = planned(config)
    except UserError as error:
        yield Finding.of("gpus", error)
        return
    if note:
        yield Finding("gpus", "fail", f"launch.hardware is {name}, but no NVIDIA GPU was found", NO_GPU, no_device())
    elif placement.gpus:
        of = {a.need.name: ",".join(gpu.id for gpu in a.gpus) for a in placement.assignments}
        used = "; ".join(f"{process} {ids}" for process, ids in of.items()) or "none is used"
        yield Finding("gpus", "ok", f"{used}; {placement.left} left")
    elif config.engine_roles and isinstance(kind, SglangEngine) and EngineArgs.of(kind.args).gpus:
        todo = "start it where there is a GPU; on a CPU SGLang needs --device cpu (examples/sglang_cpu/run.yaml)"
        yield Finding("gpus", "warn", "engine.kind.type is sglang, but no NVIDIA GPU was found", todo, no_device())


def learner(config: RunConfig) -> Iterator[Finding]:
    """Check the learner that this run starts: model, group size, weight transport, trackers."""
    if not config.launch.learner:
        return
    try:
        require_groups(config.run, config.learner)
    except UserError as error:
        yield Finding.of("run.group_size", error)
    if (parts := config.learner.algorithm.minibatches) > (groups := config.run.groups_per_step):
        detail = f"minibatches are made of whole groups: {groups} groups a step make {groups}, not {parts}"
        fix = f"set learner.algorithm.minibatches to at most run.groups_per_step ({groups})"
        yield Finding("learner.algorithm.minibatches", "warn", detail, fix)
    yield from _sampling(config.run)
    yield from _reward_parts(config)
    facts = read_facts(config.run.model)
    if facts:
        yield _trainable(config, facts)
    yield from _output_layers(config)
    publish = config.learner.publish
    if isinstance(publish, DistributedPublishSettings) and publish.backend == "nccl":
        yield _nccl(config)
    for tracker in config.learner.trackers:
        absent = [name for name in tracker.modules if importlib.util.find_spec(name) is None]
        if absent:
            why, todo = (
                f"not installed: {', '.join(absent)}",
                f"pip install {tracker.type}, or remove it from learner.trackers",
            )
            yield Finding("learner.trackers", "fail", f"{tracker.type} cannot be used", todo, why)
        else:
            yield Finding("learner.trackers", "ok", tracker.type)
    if config.run.trace.exporter != "none" and importlib.util.find_spec("opentelemetry") is None:
        todo = 'pip install "foray[otel]", or set run.trace.exporter=none'
        yield Finding("run.trace", "fail", "OpenTelemetry is not installed", todo)


def _reward_parts(config: RunConfig) -> Iterator[Finding]:
    algorithm = config.learner.algorithm
    parts = algorithm.parts if isinstance(algorithm, GroupSettings) else {}
    known = [reward.key for reward in config.rollout.episode.rewards]
    if unknown := sorted(set(parts) - set(known)):
        detail = f"rollout.episode.rewards has no reward named {' or '.join(unknown)}"
        yield Finding(
            "learner.algorithm.parts", "fail", detail, f"use names among {', '.join(known)}, or add the reward"
        )


def _output_layers(config: RunConfig) -> Iterator[Finding]:
    model, kind = config.learner.model, config.engine.kind
    if not config.engine_roles or not isinstance(kind, SglangEngine) or model.dtype != "bfloat16":
        return
    wrapped = {"all", "lm_head"} & set(kind.args) if "--lora-target-modules" in kind.args else ()
    if wrapped and kind.fp32_lm_head:
        detail = f"engine.kind.args has --lora-target-modules {' '.join(wrapped)}, which includes the output layer"
        why = "SGLang then computes its logits in bfloat16 and ignores --enable-fp32-lm-head: log-probs are inexact"
        todo = "name the other layers: q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
        yield Finding("fp32_lm_head", "fail", detail, todo, why)
    if model.fp32_lm_head != kind.fp32_lm_head:
        pair = f"learner.model.fp32_lm_head is {model.fp32_lm_head}, engine.kind.fp32_lm_head {kind.fp32_lm_head}"
        why = "one side rounds its logits to bfloat16: log-probs differ by 0.013 nats on average, even at lag 0"
        yield Finding("fp32_lm_head", "warn", pair.lower(), "set both to true", why)


def _sampling(run: RunSettings) -> Iterator[Finding]:
    if run.top_p == 1 and run.top_k < 0:
        return
    given = [
        f"run.{name} = {value}" for name, value in (("top_p", run.top_p), ("top_k", run.top_k)) if value not in (1, -1)
    ]
    detail = f"{' and '.join(given)}: rollouts sample from a truncated distribution, the loss uses the full one"
    why = "importance ratios stay correct, but the gradient is biased and the policy's entropy falls"
    todo = 'run.top_p=1 run.top_k=-1, unless a recipe needs it (docs/algorithms.md, "Top-p and top-k sampling")'
    yield Finding("sampling", "warn", detail, todo, why)


def _cpu(model: Path) -> Finding:
    try:
        parameters = read_model_config(model).parameters
    except UserError as error:
        detail = f"the CPU engine (engine.kind.type=cpu) cannot serve {model}"
        why = f"{error.what}{': ' if error.why else ''}{error.why}"
        return Finding("engine", "fail", detail, f"{ON_SGLANG}, or {error.todo or 'use another model'}", why)
    size = f"{model} has {parameters / 1e6:,.1f} million parameters"
    if parameters > CPU_PARAMETERS:
        why = f"engine.kind.type is cpu, the engine for tests and demos, up to {CPU_PARAMETERS / 1e6:,.0f} million"
        return Finding("engine", "fail", f"{size}: too large for the CPU engine", ON_SGLANG, why)
    if parameters > SLOW_PARAMETERS:
        why = f"engine.kind.type is cpu, fast up to {SLOW_PARAMETERS / 1e6:.0f} million"
        return Finding("engine", "warn", f"{size}: slow on the CPU engine", ON_SGLANG, why)
    return Finding("engine", "ok", f"the CPU engine can serve it: {size}")


def _sglang(kind: SglangEngine) -> Finding:
    """Check for SGLang in the engine's Python environment, which may differ from this one."""
    from rollout_server.node.process import MAKE_ENVIRONMENT, environment, interpreter, launcher

    try:
        python = interpreter(kind.python)
        if kind.launcher:
            launcher(kind.launcher)
        asked = subprocess.run(
            [python, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env=dict(environment(kind)),
        )
    except UserError as error:
        return Finding.of("engine", error)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("engine", "fail", f"cannot run the interpreter {kind.python}", MAKE_ENVIRONMENT, str(error))
    answer = asked.stdout.strip()
    if asked.returncode or answer == "no":
        last = (
            asked.stderr.strip().rpartition("\n")[2]
            if asked.returncode
            else f"{python} cannot import the package sglang"
        )
        todo = f"{MAKE_ENVIRONMENT}; or install the extra [engine] there"
        return Finding("engine", "fail", "engine.kind.type is sglang, but SGLang is not installed", todo, last)
    return Finding("engine", "ok", f"SGLang {answer} in {python}")


def _parallel(kind: SglangEngine, facts: dict[str, Any]) -> Iterator[Finding]:
    """Check that SGLang can divide the model's type among GPUs."""
    try:
        ranks = EngineArgs.of(kind.args).tp
    except UserError as error:
        yield Finding.of("engine.kind.args", error)
        return
    if ranks > 1 and facts.get("model_type") in WHOLE_ONLY:
        detail = f"SGLang 0.5.23 cannot serve {facts['model_type']} with tensor parallelism (--tp-size {ranks})"
        why = "its norms of queries and keys are as wide as all ranks together: the first token fails"
        yield Finding("engine.kind.args", "fail", detail, "remove --tp-size from engine.kind.args", why)


def _context(config: RunConfig, facts: dict[str, Any]) -> Iterator[Finding]:
    """Check that the longest trajectory fits into the model's maximum context."""
    scaled = not isinstance(config.engine.kind, CpuEngine)
    wanted, limit = config.rollout.episode.max_context, _positions(facts, scaled=scaled)
    if limit and wanted > limit:
        detail = f"rollout.episode.max_context = {wanted} exceeds the {limit} positions of {config.run.model}"
        why = "the engine would reject or truncate longer trajectories"
        yield Finding(
            "max_context",
            "fail",
            detail,
            f"set rollout.episode.max_context={limit}, or use a model with a longer context",
            why,
        )


def _positions(facts: dict[str, Any], *, scaled: bool) -> int:
    """Return the maximum context, `scaled` by the rotary settings as in SGLang; 0 if config.json has none."""
    text = facts["text_config"] if isinstance(facts.get("text_config"), dict) else facts
    limit = text.get("max_position_embeddings")
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(limit, int):
        return 0
    if not scaled or not isinstance(scaling, dict) or "original_max_position_embeddings" in scaling:
        return limit
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor", 1.0)
    return int(limit * factor) if kind != "llama3" and isinstance(factor, int | float) else limit


def _trainable(config: RunConfig, facts: dict[str, Any]) -> Finding:
    """Check whether the learner supports the model, as far as config.json shows."""
    try:
        given = SimpleNamespace(**({"is_encoder_decoder": False, "model_type": "model"} | facts))
        if given.model_type.startswith("qwen") and not facts.get("use_sliding_window"):
            given.sliding_window = None  # set in config.json, but without effect
        packed = config.learner.batch.rows["packed"]
        refuse_settings(config.run.model, given, config.learner.model.attention, packed=packed)
        refuse_context(config.run.model, given, config.rollout.episode.max_context)
    except UserError as error:
        return Finding.of("learner", error)
    except NOT_FACTS as error:
        return _unusable(config.run.model, error)
    return Finding("learner", "ok", f"supports a {given.model_type} model")


def check_model(config: RunConfig) -> Iterator[Finding]:
    """Load run.model and the models of reference and critic, and check them as the learner does at its start. Takes
    seconds: not before each start."""
    learner = config.learner
    if not config.launch.learner or not read_facts(config.run.model):
        return  # another check reports a missing model
    try:
        from learner.model.loading import load_settled
    except ImportError as error:
        yield Finding("learner check", "ok", f"not run, because {error.name} is not installed")
        return
    for check, model, settings in _loaded(config):
        large = sum(path.stat().st_size for path in model.glob("*.safetensors")) > LARGE_BYTES
        try:
            load_settled(model, settings, **learner.batch.rows, sharded=learner.engine.zero_stage == 3 or large)
        except UserError as error:
            yield Finding.of(check, error)
        else:
            yield Finding(check, "ok", "log-probs and gradient in the run's rows are those of transformers")


def _loaded(config: RunConfig) -> Iterator[tuple[str, Path, ModelSettings]]:
    """Yield the models that the learner loads, with their settings; each once."""
    from learner.algorithms import build_algorithm

    learner, needed = config.learner, build_algorithm(config.learner.algorithm).requirements
    yield "learner check", config.run.model, learner.model
    if needed.reference and learner.reference.model:
        yield "reference check", learner.reference.model, learner.model
    if needed.values and learner.critic.backbone == "own" and learner.critic.model:
        yield "critic check", learner.critic.model, learner.model


def _unusable(model: Path, error: Exception) -> Finding:
    detail, why = f"{model / 'config.json'} does not describe a model", f"{type(error).__name__}: {error}"
    return Finding("config.json", "fail", detail, "download the complete model directory again", why)


def _nccl(config: RunConfig) -> Finding:
    todo = "learner.publish.backend=gloo, or 'learner.publish={type: disk}'"
    if config.engine_roles and isinstance(config.engine.kind, CpuEngine):
        why = "the CPU engine supports only gloo for weight transfer"
        return Finding("learner.publish", "fail", "the backend is nccl, but engine.kind.type is cpu", todo, why)
    if config.engine_roles and config.launch.gpus.share:
        why = "NCCL refuses two ranks on one GPU: every version would be read from files, after a timeout"
        return Finding("learner.publish", "fail", "the backend is nccl, and launch.gpus.share is true", todo, why)
    if reason := without_cuda():
        return Finding("learner.publish", "fail", "the backend is nccl, but no CUDA device was found", todo, reason)
    return Finding("learner.publish", "ok", "nccl, a CUDA device was found")
