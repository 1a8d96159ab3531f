"""What is evaluated: a run, a checkpoint, a model folder, a Hugging Face model or an endpoint.

    with serving(target, needs, options, directory, say) as served:
        served.during(work, "evaluating")       # the processes are monitored meanwhile

A run in progress is asked as it is. For a checkpoint or a model, the processes of a run without a learner are started
with the launcher (`launch.learner=false`) and stopped at the end, on an error and on Ctrl-C.
"""

from __future__ import annotations

import copy
import hashlib
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from deploy.config import RunConfig, from_tree
from deploy.run import run_dir
from deploy.run.snapshot import take_snapshot
from foray.evaluation.models import ModelEndpoint, endpoint_settings, only_model
from protocol.errors import ForayError, UserError
from protocol.messages import EngineInfo, NodeState
from protocol.runtime.config import SettingsTree, expand, read_tree, with_overrides
from protocol.runtime.files import lineage_of, model_digest
from protocol.runtime.progress import Progress, Say, TaskProgress
from protocol.settings import REDIS_URL_VARIABLE, RunSettings
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.search.client import HttpSearchSettings

T = TypeVar("T")
Kind = Literal["run", "server", "checkpoint", "model", "endpoint"]
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
STATE = Path("state", "policy", "state.json")
"""The policy in a checkpoint (`learner.model.export`)."""


@dataclass(frozen=True)
class Target:
    """What the user named. `where` is a URL for a server or an endpoint."""

    kind: Kind
    where: str

    @property
    def path(self) -> Path:
        """Return the directory of a run, checkpoint or model."""
        return Path(self.where)

    @property
    def name(self) -> str:
        """Return a short name for directories of results."""
        return re.sub(r"[^\w.-]+", "-", self.where.partition("://")[2] or self.path.absolute().name).strip("-")[:60]


@dataclass(frozen=True)
class Needs:
    """What the methods need. policy: the rollout server; methods: the engines themselves; search: a retriever."""

    policy: bool
    methods: bool
    search: bool


@dataclass(frozen=True)
class ServingOptions:
    """Options of `foray eval` about what is started.

    config, overrides  configuration of a model or checkpoint: engine, retriever, limits
    retriever          URL of a retriever to use, instead of starting one
    model, api         of an endpoint
    """

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    retriever: str = ""
    model: str = ""
    api: Literal["chat", "completions"] = "chat"
    concurrency: int = 64


class During(Protocol):
    """Run `work` in a thread and monitor processes meanwhile: `Progress.beside`."""

    def __call__(
        self, work: Callable[[TaskProgress], T], name: str, total: float | None = None, unit: str = ""
    ) -> T: ...


def monitoring(
    look: Callable[[], object], say: Say, explained: Callable[[ForayError], ForayError] = lambda error: error
) -> During:
    """Return what runs a function while `look` is called, and shows its progress. Raises `explained` of its errors."""

    def during(work: Callable[[TaskProgress], T], name: str, total: float | None = None, unit: str = "") -> T:
        try:
            return Progress.of(say).beside(work, look, name, total, unit)
        except ForayError as error:
            raise explained(error) from None

    return during


@dataclass(frozen=True)
class Served:
    """A target that answers.

    subject      what it is, for the recipe: kind, where, model digest
    rollout_url  rollout server for the policy's own rollouts
    engines      READY engines for the other methods, and `model_dir` with their tokenizer
    episode      template and limits; None if unknown
    search       settings of the retriever's client; None if there is none
    run          of the processes, with their Redis; None if they are unknown
    during       runs a function while the processes are monitored
    """

    subject: dict[str, Any]
    during: During
    rollout_url: str = ""
    engines: tuple[EngineInfo, ...] = ()
    model_dir: Path | None = None
    config: RunConfig | None = None
    search: HttpSearchSettings | None = None
    endpoint: ModelEndpoint | None = None
    run: RunSettings | None = None

    @property
    def environment(self) -> EnvironmentSettings | None:
        """Return template and limits; None if unknown."""
        return self.config.rollout.episode if self.config else None


def find_target(where: str, what: str = "evaluate") -> Target:
    """Return what `where` names: a directory, a URL, or a Hugging Face model. Raises UserError if it names nothing.

    what  the verb of the error
    """
    if "://" in where:
        url = where.rstrip("/")
        return Target("endpoint" if url.endswith("/v1") else "server", url)
    path = Path(where)
    if (path / STATE).is_file():
        return Target("checkpoint", where)
    if (path / "config.json").is_file():
        return Target("model", where)
    if path.is_dir() and (run_dir.read_record(path) or run_dir.configuration_of(path)):
        return Target("run" if run_dir.is_held(path) else "checkpoint", where)
    if not path.exists() and _HUB.fullmatch(where):
        return Target("model", _downloaded(where))
    raise UserError(
        f"cannot {what} {where}",
        why="it is no run directory, checkpoint or model folder" if path.exists() else "it does not exist",
        todo="give a run directory, a checkpoint, a Hugging Face folder or name, or the URL of a rollout server or of "
        "an OpenAI-compatible endpoint (ending in /v1)",
    )


@contextmanager
def serving(target: Target, needs: Needs, options: ServingOptions, directory: Path, say: Say) -> Iterator[Served]:
    """Serve `target` inside the block; processes write below `directory`. Raises UserError or ForayError."""
    match target.kind:
        case "server":
            if needs.methods:
                raise _policy_only("a rollout server that is given by its URL")
            alone = monitoring(lambda: None, say)
            yield Served({"kind": "server", "where": target.where}, alone, rollout_url=target.where)
        case "run":
            yield _running(target, needs, options, say)
        case "endpoint":
            with _endpoint(target, needs, options, directory, say) as served:
                yield served
        case _:
            with _started(target, needs, options, directory, say) as served:
                yield served


def _downloaded(name: str) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{name} does not exist here", todo="pip install huggingface_hub, to download it") from None
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return str(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # of requests, of the hub, of the file system
        raise UserError(
            f"{name} is no directory here, and cannot be downloaded as a Hugging Face model",
            why=str(error).partition("\n")[0][:300],
            todo="correct the name, or give the path of a folder",
        ) from None


def _policy_only(what: str) -> UserError:
    return UserError(
        f"only --methods policy can be evaluated on {what}",
        why="the other methods ask its engines, whose addresses or weights are not fixed",
        todo="evaluate one of its checkpoints: foray eval RUN_DIR/checkpoints/STEP --methods ...",
    )


def _running(target: Target, needs: Needs, options: ServingOptions, say: Say) -> Served:
    from deploy.launch.supervisor import EngineLosses

    directory = target.path
    record = run_dir.live_record(directory)
    run = run_dir.locate(Namespace(given=[str(directory)], config=None))
    seen = take_snapshot(run.redis_url, run.run.id, directory)
    urls = run.urls(seen, "rollout")
    if not urls and needs.policy:
        raise UserError(
            f"the run in {directory} has no registered rollout server",
            why=seen.error
            or ("" if seen.urls("rollout") == urls else f"{run.redis_url} is the word of that directory"),
            todo="wait until it runs, or give the URL of a server, which is in its log, or a checkpoint"
            + (f", or export {REDIS_URL_VARIABLE}" if not run.is_own else ""),
        )
    if needs.methods and record.get("trains", True):
        raise _policy_only("a run that trains")
    found = run_dir.configuration_of(directory)
    config = from_tree(expand(run_dir.read_configuration(found, directory), {})) if found else None
    losses = EngineLosses(run.redis_url, run.run.id)
    during = monitoring(losses.read, say, lambda error: losses.explained(error, directory))
    engines = _ready(run.redis_url, run.run.id, directory) if needs.methods else ()
    search = _search(config, run.urls(seen, "retriever")) if config else None
    if options.retriever:
        raise UserError("--retriever cannot be used with a run in progress", todo="leave it out: the run has its own")
    return Served(
        {"kind": "run", "where": target.where, "run": record.get("id"), "lineage_id": lineage_of(directory)},
        during,
        str(urls[0]) if urls else "",
        engines,
        config.run.model if config else None,
        config,
        search,
        # engines and retrievers get keys: not those that a Redis names which the directory alone names
        run=run.run.model_copy(update={"redis_url": run.redis_url}) if run.is_own else None,
    )


def _search(config: RunConfig, registered: Sequence[str]) -> HttpSearchSettings | None:
    """Return the search with its addresses, None if there is no retriever."""
    search = config.rollout.search
    if search.type != "http" or not (search.urls or registered):
        return None
    return search if search.urls else search.model_copy(update={"urls": tuple(registered)})


def _ready(redis_url: str, run: str, directory: Path) -> tuple[EngineInfo, ...]:
    engines = take_snapshot(redis_url, run, directory).engines
    ready = tuple(engine for engine in engines if engine.state is NodeState.READY)
    if not ready:
        raise ForayError(f"no engine of run {run} is ready")
    return ready


@contextmanager
def _started(target: Target, needs: Needs, options: ServingOptions, directory: Path, say: Say) -> Iterator[Served]:
    from deploy.launch.launcher import Launcher

    tree = tree_of(target, options, say)
    if target.kind == "checkpoint":
        state, model = _exported(target.path, options, directory, say)
        lineage = lineage_of(state.parents[3])
        subject = {
            "kind": target.kind,
            "where": target.where,
            "checkpoint": state.parents[1].name,
            "lineage_id": lineage,
        }
    else:
        model = target.path
        subject = {"kind": target.kind, "where": target.where}
    config = serving_config(tree, model, directory / "serve", needs, options)
    with Launcher(config, say=say) as launcher:
        launcher.start()
        engines = _ready(launcher.redis_url, config.run.id, launcher.directory)
        yield Served(
            subject | {"model": model_digest(model)[:16]},
            launcher.during,
            launcher.rollout_urls[0] if needs.policy else "",
            engines,
            model,
            launcher.config,
            _search(launcher.config, take_snapshot(launcher.redis_url, config.run.id).urls("retriever")),
            run=launcher.config.run.model_copy(update={"redis_url": launcher.redis_url}),
        )


def tree_of(target: Target, options: ServingOptions, say: Say) -> SettingsTree:
    """Return the configuration: the given one, else that of the run that the target belongs to, else the defaults."""
    if options.config is not None:
        return read_tree(options.config, options.overrides)
    path = target.path.resolve()
    for place in (path, path.parent, path.parent.parent):
        if place.is_dir() and (found := run_dir.configuration_of(place)) is not None:
            say(f"configuration: {found}")
            return with_overrides(run_dir.read_configuration(found, place), options.overrides)
    return read_tree(None, options.overrides)


def _exported(where: Path, options: ServingOptions, directory: Path, say: Say) -> tuple[Path, Path]:
    """Return (state, folder): the checkpoint in `where` as a model folder below `directory`, written once."""
    from learner.model.export import export_model, find_state

    initial, settings = run_dir.model_settings(where, options.config)
    if initial is None or not (initial / "config.json").is_file():
        raise UserError(
            f"cannot find the model that the run of {where} started from",
            why="frozen weights, configuration and tokenizer are copied from it",
            todo="give the run's configuration with --config FILE, and in it its present directory as run.model",
        )
    state = find_state(where, say)
    # a step is a number within one run: `directory` may hold the model of another one
    made_from = hashlib.sha256(f"{model_digest(state)} {model_digest(initial)}".encode()).hexdigest()
    model = directory / f"model-{state.parents[1].name}-{made_from[:8]}"
    if not model.exists():
        say(f"exporting {state.parents[1]} to {model}")
        model.parent.mkdir(parents=True, exist_ok=True)
        export_model(state, initial, settings, model, progress=say)
    return state, model


def serving_config(
    tree: SettingsTree, model: Path, directory: Path, needs: Needs, options: ServingOptions
) -> RunConfig:
    """Return the configuration of a run that serves `model` and has no learner: on loopback, with its own Redis."""
    tree = copy.deepcopy(tree)

    def section(name: str) -> dict[str, Any]:
        value: dict[str, Any] = tree.setdefault(name, None) or {}
        tree[name] = value
        return value

    # the same id each time: episodes of two runs are not mixed
    name = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:8]
    section("run").update(id=f"eval-{name}", dir=str(directory), model=str(model), redis_url="")
    launch = section("launch")
    gpus = dict(launch.get("gpus") or {}) | {"learner": []}
    launch |= {"learner": False, "redis": "own", "secrets": None, "hardware": "", "prepare": [], "gpus": gpus}
    launch |= {"rollouts": 1 if needs.policy else 0, "engines": launch.get("engines", 1) or 1, "eval_engines": 0}
    for name in ("rollout", "engine", "retriever"):
        section(name).update(host="127.0.0.1")
    section("rollout").update(port=0)
    section("engine").update(port=0, id="", role="rollout", advertise="")
    section("retriever").pop("port", None)
    section("learner").pop("metrics_port", None)
    search = dict(section("rollout").get("search") or {})
    if options.retriever:
        section("rollout")["search"] = search | {"type": "http", "urls": [options.retriever]}
        launch["retrievers"] = 0
    elif not needs.search:
        section("rollout")["search"] = {"type": "none"}
        launch["retrievers"] = 0
    return from_tree(expand(tree, {}))


@contextmanager
def _endpoint(target: Target, needs: Needs, options: ServingOptions, directory: Path, say: Say) -> Iterator[Served]:
    name = options.model or only_model(target.where)
    endpoint = endpoint_settings(target.where, name, options.api, options.concurrency)
    subject = {"kind": "endpoint", "where": target.where, "model": name, "api": options.api}
    tree = read_tree(options.config, options.overrides)
    config = from_tree(expand(tree, {})) if options.config else None
    settings = config.rollout.search if config else HttpSearchSettings()
    if not isinstance(settings, HttpSearchSettings):
        settings = HttpSearchSettings()
    if not needs.search:
        yield Served(subject, monitoring(lambda: None, say), endpoint=endpoint)
        return
    if options.retriever:
        search = settings.model_copy(update={"urls": (options.retriever,)})
        yield Served(subject, monitoring(lambda: None, say), search=search, endpoint=endpoint)
        return
    if config is None or not config.num_retrievers:
        raise UserError(
            "the methods need a retriever",
            todo="give --retriever URL (start one with `foray retriever --config run.yaml`), or --config run.yaml",
        )
    with _retriever(tree, directory / "serve", say) as (url, during):
        yield Served(subject, during, search=settings.model_copy(update={"urls": (url,)}), endpoint=endpoint)


@contextmanager
def _retriever(tree: SettingsTree, directory: Path, say: Say) -> Iterator[tuple[str, During]]:
    """Run the retriever of a configuration inside the block. Yields its URL, and what runs a function beside it."""
    from deploy.launch.launcher import Launcher

    model = from_tree(expand(tree, {})).run.model  # not read: no process that is started needs it
    config = serving_config(tree, model, directory, Needs(False, False, search=True), ServingOptions())
    launch = config.launch.model_copy(update={"engines": 0, "retrievers": 1})
    with Launcher(config.model_copy(update={"launch": launch}), say=say) as launcher:
        launcher.start()
        (url,) = take_snapshot(launcher.redis_url, config.run.id).urls("retriever")
        yield url, launcher.during
