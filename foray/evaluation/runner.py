"""Ask, score and store: every episode of every method once.

The policy of a run or model is asked through its rollout server, all questions in one request at one version. The other
methods run here, over the engines or the endpoint.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foray.evaluation.methods import POLICY, build_method
from foray.evaluation.methods.base import Episode, Method, MethodSettingsBase
from foray.evaluation.methods.prompts import ENGLISH, Prompts, prompts_for
from foray.evaluation.models import EndpointModel, EngineModel, EpisodeFailed, LanguageModel
from foray.evaluation.scoring import failure_of, has_evidence, is_correct
from foray.evaluation.store import ResultStore, Row
from foray.evaluation.suites import DataSet
from foray.evaluation.targets import Served
from protocol.errors import ForayError, UserError
from protocol.messages import Question, Sampling, Status
from protocol.runtime.episodes import evaluate, is_failed
from protocol.runtime.http.body import bounded_session
from protocol.runtime.progress import TaskProgress
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.rewards.base import RewardError, RewardInput
from rollout_server.rewards.judge import Judge, JudgeSettings
from rollout_server.rewards.resources import RewardResources
from rollout_server.rewards.text_match import score
from rollout_server.search import build_search
from rollout_server.search.base import NoSearchSettings

GIVE_UP = 20
"""Consecutive failed episodes that end the evaluation: a service is down or wrong."""
JUDGED_AT_ONCE = 16
SILENCE_S = 600.0
"""Timeout of the rollout server, which sends something every few seconds while episodes run."""


@dataclass(frozen=True)
class AskOptions:
    """How each question is asked. `n`: episodes per question; temperature 0 is greedy; search False: empty results.
    timeout_s: of an episode of the methods; None: only its turns have limits."""

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    search: bool = True
    concurrency: int = 64
    timeout_s: float | None = None

    @property
    def sampling(self) -> Sampling:
        """Return the parameters for engines."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k or -1)


@dataclass(frozen=True)
class EvalJob:
    """What is evaluated: `methods` on `sets`, asked as `sampler` says, and graded by `judge` if there is one."""

    served: Served
    methods: Sequence[MethodSettingsBase]
    sets: Sequence[DataSet]
    sampler: AskOptions
    judge: JudgeSettings | None = None


def prompts_of(served: Served) -> Prompts:
    """Return the prompts of the methods for the model that is served."""
    return prompts_for(served.environment.template) if served.environment else ENGLISH


def ask_all(job: EvalJob, store: ResultStore, task: TaskProgress) -> None:
    """Ask every question by every method, except those that `store` has complete. Raises ForayError or UserError."""
    prompts = prompts_of(job.served)
    own = [settings for settings in job.methods if not (settings.type == POLICY and job.served.rollout_url)]
    built = {settings.type: build_method(settings, prompts) for settings in own}  # all, before the first question
    for settings in job.methods:
        task.note = settings.type
        remaining = open_questions(job, store, settings.type)
        if not remaining:
            continue
        if settings.type in built:
            asyncio.run(_ask_method(job, settings, built[settings.type], remaining, store, task))
        else:
            _ask_policy(job, remaining, store, task)


def open_questions(job: EvalJob, store: ResultStore, method: str) -> list[tuple[str, Question]]:
    """Return (data set, question) without `n` stored episodes of `method` that did not fail."""
    have = Counter((r["data_set"], r["question_id"]) for r in store.rows if r["method"] == method and not is_failed(r))
    return [(s.name, q) for s in job.sets for q in s.questions if have[s.name, q.id] < job.sampler.n]


def row_of(data_set: str, question: Question, method: str, index: int, found: dict[str, Any]) -> Row:
    """Return the stored form of an episode. `found`: answer, status, cause, segments and costs."""
    metrics = score(found["answer"], question.answers)
    evidence = has_evidence(question, found["segments"])
    failure = failure_of(
        correct=is_correct(metrics), answer=found["answer"], searches=found["searches"], evidence=evidence
    )
    return {
        "method": method,
        "data_set": data_set,
        "question_id": question.id,
        "index": index,
        "question": question.text,
        "answers": list(question.answers),
        **found,
        "metrics": metrics,
        "evidence": evidence,
        "failure": failure,
    }


def _ask_policy(
    job: EvalJob, remaining: Sequence[tuple[str, Question]], store: ResultStore, task: TaskProgress
) -> None:
    served, sampler = job.served, job.sampler
    # ids are unique within one data set only
    by_id = {str(number): pair for number, pair in enumerate(remaining)}
    failures = _Failures()

    def each(episode: dict[str, Any]) -> None:
        for name in ("run", "lineage_id"):
            wanted, found = served.subject.get(name), episode.get(name)
            if wanted and found and wanted != found:
                raise UserError(
                    f"{served.rollout_url} serves another run than {served.subject['where']}",
                    why=f"its {name} is {found}, that of the run {wanted}",
                    todo="restart the run, or evaluate one of its checkpoints",
                )
        data_set, question = by_id[episode["question_id"]]
        store.add(row_of(data_set, question, POLICY, int(episode["index"]), _policy_episode(episode)))
        task.update(task.done + 1)
        failures.note(episode | {"detail": episode.get("cause", "")})

    evaluate(
        served.rollout_url,
        [question.model_copy(update={"id": number}) for number, (_, question) in by_id.items()],
        n=sampler.n,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        search=sampler.search,
        concurrency=sampler.concurrency,
        timeout_s=sampler.timeout_s or SILENCE_S,
        each=each,
    )


def _policy_episode(episode: dict[str, Any]) -> dict[str, Any]:
    """Return an episode of `POST /v1/episodes` with the names of a row."""
    generated = int(episode.get("tokens_generated", 0))
    return {
        "answer": episode.get("answer") or None,
        "status": episode["status"],
        "cause": episode.get("cause", ""),
        "version": episode.get("version", ""),
        **{name: episode[name] for name in ("run", "lineage_id", "model") if name in episode},
        "rewards": episode.get("rewards", {}),
        "searches": int(episode.get("searches", 0)),
        "turns": int(episode.get("turns", 0)),
        "tokens_generated": generated,
        "tokens_read": int(episode.get("tokens", 0)) - generated,
        "seconds": float(episode.get("seconds", 0.0)),
        "segments": episode.get("segments", []),
    }


async def _ask_method(
    job: EvalJob,
    settings: MethodSettingsBase,
    method: Method,
    remaining: Sequence[tuple[str, Question]],
    store: ResultStore,
    task: TaskProgress,
) -> None:
    served, sampler, resources = job.served, job.sampler, RewardResources()
    search = build_search(served.search if served.search and sampler.search else NoSearchSettings())
    places = iter([(name, question, index) for name, question in remaining for index in range(sampler.n)])
    failures, refused = _Failures(), list[BaseException]()
    try:
        async with bounded_session() as session:
            model = _model(served, session, resources)
            if settings.logprobs and not model.has_logprobs:
                raise UserError(
                    f"the method {settings.type} needs token log-probs, which a chat endpoint does not report",
                    todo="use --api completions, or leave the method out",
                )

            async def worker() -> None:
                for name, question, index in places:
                    episode = Episode(model, search, sampler.sampling)
                    found = await _play(method, question, episode, sampler.timeout_s)
                    store.add(row_of(name, question, settings.type, index, found))
                    task.update(task.done + 1)
                    failures.note(found)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(sampler.concurrency, sampler.n * len(remaining))):
                    tasks.create_task(worker())
    except* (ForayError, UserError) as group:
        refused = list(_leaves(group))
    finally:
        await search.close()
        await resources.close()
    if refused:  # not raised above: until Python 3.11.3 that would make it an ExceptionGroup
        raise refused[0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


class _Failures:
    """Counts consecutive failures. Raises ForayError after GIVE_UP of them."""

    def __init__(self) -> None:
        self._row = 0

    def note(self, found: dict[str, Any]) -> None:
        self._row = self._row + 1 if is_failed(found) else 0
        if self._row >= GIVE_UP:
            raise ForayError(f"{GIVE_UP} episodes failed one after the other, the last with: {found['detail']}")


def _model(served: Served, session: Any, resources: RewardResources) -> LanguageModel:
    if served.endpoint is not None:
        return EndpointModel(served.endpoint, resources)
    assert served.model_dir is not None and served.config is not None
    tokenizer = load_tokenizer(served.model_dir, served.config.run.date)
    return EngineModel(session, served.engines, tokenizer, served.config.rollout.episode.max_context)


async def _play(method: Method, question: Question, episode: Episode, timeout_s: float | None) -> dict[str, Any]:
    status, cause, detail, answer = Status.ANSWERED, "", "", None
    try:
        async with asyncio.timeout(timeout_s):
            answer = await method(question.text, episode)
        status = Status.ANSWERED if answer is not None else Status.OUT_OF_TURNS
    except EpisodeFailed as error:
        status, cause, detail = Status.FAILED, error.cause, str(error)[:500]
    except TimeoutError:
        status, cause, detail = Status.FAILED, "timeout", f"it took more than {timeout_s:g} s (--timeout)"
    return {
        "answer": answer,
        "status": str(status),
        "cause": cause,
        "detail": detail,
        "version": "+".join(episode.versions),
        "searches": episode.searches,
        "turns": episode.turns,
        "tokens_generated": episode.tokens_generated,
        "tokens_read": episode.tokens_read,
        "seconds": round(episode.seconds, 3),
        "segments": episode.segments,
    }


def unjudged(store: ResultStore) -> list[Row]:
    """Return the episodes without a judge's score."""
    return [row for row in store.rows if "judge" not in row["metrics"] and not is_failed(row)]


def judge_all(job: EvalJob, store: ResultStore, task: TaskProgress) -> None:
    """Add the judge's score to the episodes that have none. Each is stored at once.

    Raises UserError without an API key, ForayError if the judge fails.
    """
    asyncio.run(_judge(job, store, unjudged(store), task))


async def _judge(job: EvalJob, store: ResultStore, rows: Sequence[Row], task: TaskProgress) -> None:
    assert job.judge is not None
    questions = {(s.name, q.id): q for s in job.sets for q in s.questions}
    resources, places = RewardResources(), iter(rows)
    judge, failed = Judge(job.judge, resources), list[BaseException]()

    async def worker() -> None:
        for row in places:
            question = questions[row["data_set"], row["question_id"]]
            given = RewardInput(question, Status(row["status"]), row["answer"], (), row["searches"])
            store.add({**row, "metrics": {**row["metrics"], "judge": await judge(given)}})
            task.update(task.done + 1)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(JUDGED_AT_ONCE, len(rows))):
                tasks.create_task(worker())
    except* RewardError as group:
        failed = list(_leaves(group))
    finally:
        await resources.close()
    if failed:
        raise ForayError(f"the judge failed: {failed[0]}")
