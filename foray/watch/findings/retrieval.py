"""Searches that do not show what the questions ask for: seen in the trajectories, explained by the run's corpus."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from deploy.config import RunConfig
from foray.data.coverage import DEPTHS, coverage, report
from foray.data.demonstrate import opened_searcher, search_with
from foray.watch.findings.base import ENOUGH, AskCorpus, Evidence, Found, TrainedTrajectory
from protocol.errors import UserError
from rollout_server.rewards.retrieval import found, targets

SHOWN = 0.3
SAMPLE = 64
"""Questions for which the corpus is asked."""
CORPUS_BYTES = 512 << 20
"""Largest corpus that is opened by itself."""
SAME_RESULTS, IN_CORPUS = 0.5, 0.7


def retriever(run: Evidence) -> Found | None:
    """Find searches that show neither a supporting passage nor the answer: of the groups trained last, or first, if the
    policy has given up searching since."""
    searched, when = _searched(run.trajectories), ""
    if len(searched) < ENOUGH:
        searched, when = _searched(run.first), " in the first groups, before the policy gave up searching,"
    missed = [sample for sample in searched if not any(found(sample.question, turn, "either") for turn in sample.turns)]
    if len(searched) < ENOUGH or (share := 1 - len(missed) / len(searched)) >= SHOWN:
        return None
    todo = run.ask(missed) if run.ask is not None else ()
    return Found(
        f"the searches do not find: {share:.0%} of {len(searched)} trajectories that searched{when} were shown a "
        "supporting passage or the answer",
        f"less than {SHOWN:.0%} of the trajectories that searched",
        (
            *todo,
            "search the index with queries of the trajectories below: `foray index search INDEX QUERY`; "
            "`foray index info INDEX` shows its encoder",
            "`foray data coverage QUESTIONS --config run.yaml`: is it in the corpus, and does the question find it",
            'docs/troubleshooting.md, "Searches fail or return nothing"',
        ),
        tuple(missed),
    )


def _searched(trajectories: Sequence[TrainedTrajectory]) -> list[TrainedTrajectory]:
    return [sample for sample in trajectories if sample.turns and targets(sample.question, "either")]


def corpus_of(config: RunConfig | None) -> AskCorpus | None:
    """Return how to ask the run's corpus; None if it is not on this machine, is large, or is the web."""
    if config is None or config.retriever.online is not None:
        return None
    corpus = config.retriever.corpus
    return partial(_ask, config) if corpus.is_file() and corpus.stat().st_size <= CORPUS_BYTES else None


def _ask(config: RunConfig, trajectories: Sequence[TrainedTrajectory]) -> tuple[str, ...]:
    """Return what is wrong: the retriever, the corpus, or the queries."""
    asked = {sample.question.id: sample for sample in trajectories}
    some = list(asked.values())[:SAMPLE]
    try:
        with opened_searcher(config.retriever) as searcher:
            facts = report(coverage([sample.question for sample in some], searcher), searcher.num_passages)
            search = search_with(searcher, max(len(turn.passage_ids) for sample in some for turn in sample.turns) or 1)
            pairs = [({p.id for p in search(turn.query)}, set(turn.passage_ids)) for p in some for turn in p.turns[:1]]
    except UserError as error:
        return (f"the run's corpus cannot be asked: {error.what}",)
    kind = "supporting" if facts["supporting"]["questions"] else "answer"
    there, first = facts[kind]["in_corpus"] or 0.0, facts[kind]["found"][str(DEPTHS[0])] or 0.0
    same = sum(ours == theirs or len(ours & theirs) * 2 >= len(theirs) > 0 for ours, theirs in pairs) / len(pairs)
    said = (
        f"of {len(some)} such questions {there:.0%} are covered by the corpus of {facts['passages']:,} passages, "
        f"{first:.0%} find that within {DEPTHS[0]} results; the index answers {same:.0%} of the recorded queries alike"
    )
    if same < SAME_RESULTS:
        return (said, "the retriever of the run is at fault: another index, another corpus, or a broken encoder")
    if there < IN_CORPUS:
        return (said, "the corpus is at fault: add the passages, or leave out the questions (`--out` of coverage)")
    return (said, "the queries are at fault: demonstrations (`foray sft`), a higher topk, turn_retrieval as a reward")
