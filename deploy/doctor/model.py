"""Check that all processes use one tokenizer, that it matches the model, and that no remote code would run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.doctor.redis import ANSWER_S
from deploy.run.redis_server import connect
from protocol.codec import decode_as
from protocol.errors import ForayError, ProtocolError, UserError
from protocol.keys import Keys
from protocol.messages import EngineInfo
from protocol.run_meta import parse_run_meta, tokenizer_digest
from protocol.runtime.number_format import read_facts
from rollout_server.agents.config import OwnAgentSettings
from rollout_server.node.config import SglangEngine

RUN_TOKENIZER, ENGINE_TOKENIZER = "run tokenizer", "engine tokenizer"
MODEL_FLAGS = ("--tokenizer-path", "--model-path", "--model")


def tokenizer(config: RunConfig) -> Iterator[Finding]:
    """Compare the tokenizer of run.model with the model's config and the directory in SGLang's arguments."""
    model = config.run.model
    if not (model / "config.json").is_file():
        return  # another check reports a missing model
    try:
        spec = json.loads((model / "tokenizer.json").read_bytes())
        largest = _largest_id(spec)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        cause = getattr(error, "strerror", None) or f"not a valid tokenizer: {type(error).__name__}"
        todo = "copy the complete model directory: config.json, model.safetensors, tokenizer.json"
        yield Finding("tokenizer", "fail", f"{model / 'tokenizer.json'}: {cause}", todo)
        return
    size = _vocabulary(model)
    if size is not None and largest >= size:
        detail = f"its largest id is {largest}, but the model in {model} has {size} rows: engines would refuse or crash"
        yield Finding("tokenizer", "fail", detail, "use tokenizer.json and config.json of the same model")
        return
    ours = tokenizer_digest((model / "tokenizer.json").read_bytes())
    for flag, other in _told(config):
        theirs = tokenizer_digest(_bytes(other / "tokenizer.json"))
        if theirs != ours:
            detail = f"SGLang has {flag} {other} ({theirs[:12] or 'none'}), run.model has {ours[:12]}"
            todo = f"remove {flag} from engine.kind.args: nodes pass run.model to SGLang"
            yield Finding("tokenizer", "fail", detail, todo)
            return
    yield Finding("tokenizer", "ok", f"{ours[:12]}, ids to {largest}" + (f" of {size}" if size is not None else ""))


def agent(config: RunConfig) -> Iterator[Finding]:
    """Tell how agents' messages become tokens, and whether the model's chat template allows it."""
    settings, check = config.rollout.agent, "rollout.agent"
    if not isinstance(settings, OwnAgentSettings):
        return
    try:
        from rollout_server.agents.native import build_renderer
        from rollout_server.environment.environment import build_environment

        environment = build_environment(config.rollout.episode, config.run.model, day=config.run.date)
        verdict = build_renderer(settings, environment).verdict()
    except (UserError, ImportError) as error:
        if isinstance(error, UserError):
            yield Finding.of(check, error)
        return
    fix = "use a model whose chat template renders tools" if verdict.sequences == "no_tools" else ""
    yield Finding(check, "warn" if fix else "ok", str(verdict), fix)


def auto_tokenizer(config: RunConfig) -> Iterator[Finding]:
    """Compare transformers' AutoTokenizer with tokenizer.json of run.model. Takes seconds: not before each start."""
    try:
        from learner.model.tokenizer_check import TEXTS, different_texts

        differ = different_texts(config.run.model)
    except ImportError as error:
        yield Finding("AutoTokenizer", "ok", f"not compared, because {error.name} is not installed")
        return
    if differ:
        detail = f"transformers' AutoTokenizer gives other ids than tokenizer.json for {differ} of {TEXTS} texts"
        why = "Foray uses tokenizer.json; programs that use AutoTokenizer would feed this model other tokens"
        todo = "use exports of `foray export`, which AutoTokenizer loads as they are; for run.model nothing"
        yield Finding("AutoTokenizer", "warn", detail, todo, why)
    elif differ is not None:
        yield Finding("AutoTokenizer", "ok", f"the ids of tokenizer.json for {TEXTS} texts")


def fleet(url: str, config: RunConfig) -> Iterator[Finding]:
    """Compare the tokenizers of the registered engines and of the run's learner with that of run.model."""
    import redis

    keys = Keys(config.run.id)
    with connect(url, timeout_s=ANSWER_S) as client:
        try:
            names: Any = client.zrange(keys.engines, 0, -1)
            raws: list[Any] = [client.hget(keys.engine(name.decode()), "b") for name in names]
            meta: Any = client.hgetall(keys.meta)
        except (redis.RedisError, OSError):
            return  # other checks report whether Redis answers this user
    engines, todo = list(_engines(raws)), "set the same run.model for all processes of a run"
    ours = _fingerprint(config.run.model) if engines else ""
    for engine in engines:
        if ours and engine.tokenizer and engine.tokenizer != ours:
            detail = f"engine {engine.id} has {engine.tokenizer[:12]}, run.model {ours[:12]}: it gets no traffic"
            yield Finding(ENGINE_TOKENIZER, "fail", detail, todo)
    theirs, digest = parse_run_meta(meta), tokenizer_digest(_bytes(config.run.model / "tokenizer.json"))
    if theirs is not None and theirs.tokenizer and digest and theirs.tokenizer != digest:
        detail = f"the learner of run {config.run.id} has {theirs.tokenizer[:12]}, run.model {digest[:12]}"
        yield Finding(RUN_TOKENIZER, "fail", detail, todo)


def teacher(config: RunConfig) -> Iterator[Finding]:
    """Check that the token ids of a separate reference model match the policy's. It may have more ids, not fewer."""
    other, model = config.learner.reference.model, config.run.model
    if not config.launch.learner or not config.learner.algorithm.kl.coefficient or other is None:
        return
    theirs, ours = _vocabulary(other), _vocabulary(model)
    todo = "set learner.reference.model to a model of the policy's family with at least as many token ids"
    if theirs is not None and ours is not None and theirs < ours:
        detail = f"{other} has {theirs} ids, {model} has {ours}: the learner would refuse it"
        yield Finding("learner.reference.model", "fail", detail, todo)
    elif (words := _words(other)) and (known := _words(model)):
        differ = [word for word, number in known.items() if words.get(word) != number]
        if differ:
            detail = f"{len(differ)} tokens of {model} have another id in {other}, for example {differ[0]!r}"
            why = "the KL divergence would compare probabilities of different tokens"
            yield Finding("learner.reference.model", "fail", detail, todo, why)


def _words(model: Path) -> dict[str, int]:
    """Return token -> id from tokenizer.json, {} if it is missing or invalid."""
    try:
        spec = json.loads((model / "tokenizer.json").read_bytes())
        words = spec["model"]["vocab"]
        pairs = words.items() if isinstance(words, dict) else ((word, i) for i, (word, _) in enumerate(words))
        return dict(pairs) | {added["content"]: added["id"] for added in spec.get("added_tokens") or ()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def family(config: RunConfig) -> Iterator[Finding]:
    """Print what docs/models.md says of the model's type, and which of its other tested configurations differ."""
    kind = read_facts(config.run.model).get("model_type")
    table = _families()
    verdicts = {
        name: {title: row["cells"][column][0] for column, title in table["columns"].items()}
        for name, row in table["families"].items()
        if row["type"] == kind
    }
    if not verdicts:
        return
    usual = verdicts.get(str(kind)) or next(iter(verdicts.values()))
    titles = {verdict: [title for title in usual if usual[title] == verdict] for verdict in usual.values()}
    said = "; ".join(f"{verdict}: {', '.join(named)}" for verdict, named in titles.items())
    differ = [name for name, row in verdicts.items() if row != usual]
    other = f"; otherwise with {', '.join(differ)}" if differ else ""
    yield Finding("model family", "ok", f"{kind}, tested at tiny size: {said}{other} (docs/models.md)")


def _families() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((resources.files("learner.model") / "families.json").read_text())
    return found


def remote_code(config: RunConfig) -> Iterator[Finding]:
    """Check for models that contain code, and for engines configured to run it."""
    kind = config.engine.kind
    if isinstance(kind, SglangEngine) and any(word.startswith("--trust-remote-code") for word in kind.args):
        detail = "engine.kind.args has --trust-remote-code: code in the model's directory runs on every engine"
        todo = "remove it, unless you trust that code; Foray itself never runs any"
        yield Finding("remote code", "warn", detail, todo)
        return
    facts = read_facts(config.run.model)
    known = {row["type"] for row in _families()["families"].values()}  # transformers' own code is used for these
    if facts.get("auto_map") and facts.get("model_type") not in known:
        detail = f"{config.run.model} needs its own code (auto_map), which Foray does not run: it cannot be loaded"
        yield Finding("remote code", "fail", detail, "use a model that transformers supports directly")
    else:
        yield Finding("remote code", "ok", "not used")


def _told(config: RunConfig) -> Iterator[tuple[str, Path]]:
    args = config.engine.kind.args if isinstance(config.engine.kind, SglangEngine) else ()
    for index, word in enumerate(args):
        flag, _, value = word.partition("=")
        if flag in MODEL_FLAGS:
            yield flag, Path(value or (args[index + 1] if index + 1 < len(args) else ""))


def _largest_id(spec: Mapping[str, Any]) -> int:
    words = spec["model"]["vocab"] if "model" in spec else {}
    ids = [*words.values()] if isinstance(words, dict) else [len(words) - 1]
    return max([*ids, *(added["id"] for added in spec.get("added_tokens") or ())], default=-1)


def _vocabulary(model: Path) -> int | None:
    facts = read_facts(model)
    size = facts.get("vocab_size", (facts.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _fingerprint(model: Path) -> str:
    """Return the digest as nodes compute it, "" if this environment cannot."""
    try:
        from rollout_server.environment.tokenizer import load_tokenizer

        return load_tokenizer(model).fingerprint
    except (ImportError, ForayError):
        return ""


def _engines(raws: list[Any]) -> Iterator[EngineInfo]:
    for raw in raws:
        try:
            if raw is not None:
                yield decode_as(EngineInfo, raw)
        except ProtocolError:
            continue  # written by another version of Foray: `foray status` reports it
