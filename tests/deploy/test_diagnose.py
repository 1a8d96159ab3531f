"""`foray diagnose`: each finding on synthetic trajectories and steps, what it prints, and runs without a finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foray.api.run import Run
from foray.cli import main
from foray.watch.findings import REGISTRY, corpus_of, findings
from foray.watch.findings.base import Evidence, Found, TrainedTrajectory, _title_of
from foray.watch.transcript import Shown
from protocol.messages import Question, Status, TrajectoryGroup
from protocol.versions import PolicyVersion
from rollout_server.environment.prompts import TEMPLATES
from rollout_server.rewards.base import TurnText
from tests.support.dashboard_run import write_run, write_stuffed
from tests.support.messages import make_trajectory

WELL = {"reward_mean": 0.5, "reward_std": 0.4, "zero_advantage_share": 0.4, "lag_mean": 0.9, "lag_max": 1.0}
WELL |= {"ratio_low": 0.002, "ess": 0.98, "logprob_gap": 0.03, "kl_behaviour": 0.005, "entropy": 0.4}
EMMA = TurnText("", 'Doc 1(Title: "Emma") a novel by Jane Austen', "who wrote emma", ("p1",), ('"Emma"',))
CITY = TurnText("", 'Doc 1(Title: "York") a city in England', "york", ("p7",), ('"York"',))


def steps(count: int = 40, **changed: Any) -> tuple[dict[str, Any], ...]:
    """The first step trains what its own version sampled, as in every run."""
    first = {"step": 1, **WELL, "lag_mean": 0.0, "lag_max": 0.0, "logprob_gap": 1e-6}
    first |= {k: v for k, v in changed.items() if k == "logprob_gap"}
    later = (
        {"step": n, **WELL, **{k: v(n) if callable(v) else v for k, v in changed.items()}} for n in range(2, count + 1)
    )
    return (first, *later)


def trajectories(
    count: int = 40,
    answer: Callable[[int], str] = lambda n: "Jane Austen" if n % 2 else "York",
    *,
    gold: Callable[[int], str] = lambda n: "Jane Austen",
    reward: Callable[[int], float] = lambda n: float(n % 2),
    searches: int = 1,
    turns: tuple[TurnText, ...] = (EMMA,),
    status: Status = Status.ANSWERED,
    cause: str = "",
    supporting: str = "p1",
) -> tuple[TrainedTrajectory, ...]:
    found = []
    for n in range(count):
        question = Question(id=f"q{n}", text="who?", answers=(gold(n),), meta={"supporting_ids": supporting})
        trajectory = make_trajectory(reward(n), version=PolicyVersion(1, 0), status=status)
        changed = {"answer": answer(n), "searches": searches, "cause": cause}
        one = trajectory.model_copy(update=changed)
        group = TrajectoryGroup(run="r", seq=n + 1, question=question, trajectories=(one,), template="search_r1")
        found.append(TrainedTrajectory(Shown(group, 0, step=n // 4 + 1, epoch=1, max_lag=2), turns))
    return tuple(found)


STUFFED = " ".join(f"word{n}" for n in range(12))
NO = {"gold": lambda n: "no" if n % 2 else "yes", "supporting": ""}
BROKEN: dict[str, tuple[str, Evidence]] = {
    "the reward falls": ("collapse", Evidence(steps(reward_mean=lambda n: 0.6 if n < 21 else 0.1 + 0.001 * n))),
    "the reward fell long ago": ("collapse", Evidence(steps(300, reward_mean=lambda n: 0.6 if n < 21 else 0.01))),
    "half-precision engine": ("unequal-logprobs", Evidence(steps(logprob_gap=0.05))),
    "an engine that drifts": ("unequal-logprobs", Evidence(steps(kl_behaviour=lambda n: 0.2 if n > 20 else 0.0))),
    "random passages": ("retriever", Evidence(steps(), trajectories(answer=lambda n: "Bath", turns=(CITY,)))),
    "random passages, and then no search": (
        "retriever",
        Evidence(steps(), trajectories(8, searches=0), first=trajectories(answer=lambda n: "Bath", turns=(CITY,))),
    ),
    "equal rewards": ("no-signal", Evidence(steps(reward_std=0.0, zero_advantage_share=1.0))),
    "no advantage": ("no-signal", Evidence(steps(zero_advantage_share=0.97))),
    "all filtered": ("no-signal", Evidence(settled={"trained": 2, "filtered": 98})),
    "long prompts": (
        "prompts",
        Evidence(steps(), dead=dict.fromkeys(range(9), "prompt_too_long"), settled={"dead": 9}),
    ),
    "cut": ("prompts", Evidence(steps(), trajectories(status=Status.TRUNCATED, cause="context"))),
    "no room": ("prompts", Evidence(steps(), trajectories(), max_turns=3, max_context=14)),
    "no search": ("no-search", Evidence(steps(), trajectories(searches=0, turns=()))),
    "never searches": ("no-search", Evidence(steps(), trajectories(status=Status.OUT_OF_TURNS, searches=0, turns=()))),
    "stuffed": ("keyword-stuffing", Evidence(steps(), trajectories(answer=lambda n: STUFFED, reward=lambda n: 1.0))),
    "yes everywhere": ("yes-no-bias", Evidence(steps(), trajectories(answer=lambda n: "Yes."))),
    "always no": ("yes-no-bias", Evidence(steps(), trajectories(answer=lambda n: "no", **NO))),  # type: ignore[arg-type]
    "titles": ("copied-titles", Evidence(steps(), trajectories(answer=lambda n: "Emma"))),
    "old tokens": ("stale-gradient", Evidence(steps(lag_mean=3.0, lag_max=8.0, ratio_low=0.03))),
    "few effective tokens": ("stale-gradient", Evidence(steps(lag_mean=3.0, lag_max=8.0, ess=0.5))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_found_and_nothing_else(name: str) -> None:
    wanted, run = BROKEN[name]
    found = findings(run)
    assert list(found) == [wanted]
    one = found[wanted]
    assert any(character.isdigit() for character in one.what) and one.rule and len(one.todo) >= 2
    assert one.trajectories or not run.trajectories


HEALTHY = {
    "learns": Evidence(steps(reward_mean=lambda n: 0.3 + 0.01 * n), trajectories()),
    "solved": Evidence(
        steps(reward_mean=0.95, reward_std=0.0, zero_advantage_share=1.0), trajectories(reward=lambda n: 1.0)
    ),
    "few trajectories": Evidence(steps(3), trajectories(8, searches=0, turns=())),
    "wordy answers that earn less": Evidence(
        steps(), trajectories(answer=lambda n: STUFFED if n % 2 else "Jane", reward=lambda n: float(n % 2 == 0))
    ),
    "yes and no, half each": Evidence(steps(), trajectories(answer=lambda n: "yes" if n % 4 < 2 else "no", **NO)),  # type: ignore[arg-type]
    "right answers that are titles": Evidence(steps(), trajectories(answer=lambda n: "Emma", gold=lambda n: "emma")),
    "old tokens, equal ratios": Evidence(steps(lag_mean=3.0, lag_max=8.0)),
    "no search by its settings": Evidence(steps(), trajectories(searches=0, turns=()), searches=False),
    "several updates a step": Evidence(steps(logprob_gap=0.05), updates=4),
    "room for another search": Evidence(steps(), trajectories(), max_turns=3, max_context=15),
    "no room and no turn": Evidence(steps(), trajectories(), max_turns=1, max_context=14),
    "few search, and found something": Evidence(steps(), trajectories(8, turns=()), first=trajectories()),
    "nothing yet": Evidence(),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name: str) -> None:
    assert findings(HEALTHY[name]) == {}


def test_the_advice_says_which_limit_cut_and_which_sign_collapsed() -> None:
    cut = findings(Evidence(steps(), trajectories(status=Status.TRUNCATED, cause="turn")))["prompts"]
    assert "max_new_tokens: it ended 40" in cut.todo[0]
    noisy = steps(60, entropy=lambda n: 0.4 if n < 31 else 2.0, grad_norm=lambda n: 0.3 if n < 31 else 5.0)
    assert "entropy_coefficient" in " ".join(findings(Evidence(noisy))["collapse"].todo)


def test_the_corpus_says_whether_retriever_corpus_or_queries_are_at_fault(tmp_path: Path) -> None:
    from deploy.config import load_config

    def said(contents: str, turn: TurnText) -> str:
        path = tmp_path / "corpus.jsonl"
        lines = [{"id": "p1", "contents": contents}, *({"id": f"x{n}", "contents": f'"X"\nfog {n}'} for n in range(9))]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = load_config(None, [f"retriever.corpus={path}"])
        found = REGISTRY["retriever"](Evidence(steps(), trajectories(turns=(turn,)), ask=corpus_of(config)))
        assert isinstance(found, Found)
        return found.todo[1]

    emma = '"Emma"\nEmma is a novel by Jane Austen, who wrote six'
    assert said(emma, TurnText("", "fog", "who wrote Emma", ("x1",))).startswith("the retriever of the run")
    assert said(emma, TurnText("", "fog", "fog", ("x0", "x1", "x2"))).startswith("the queries")
    assert corpus_of(load_config(None, [f"retriever.corpus={tmp_path / 'none'}"])) is None


@pytest.mark.parametrize(
    ("template", "text", "titles"),
    [
        ("search_r1", '\n<information>Doc 1(Title: "Emma") a b\nDoc 2(Title: York (city)) c\n</information>',
         ['"Emma"', "York (city)"]),
        ("demo", " <information> ( kona vesta ) kona elected x . ( mira ) y </information> ", ["kona vesta", "mira"]),
    ],
)  # fmt: skip
def test_titles_are_read_as_the_template_writes_them(template: str, text: str, titles: list[str]) -> None:
    assert _title_of(TEMPLATES[template]).findall(text) == titles


def test_the_command_names_the_trajectories_and_exits_with_1(tmp_path: Path, capsys: Any) -> None:
    directory = write_run(tmp_path / "run")
    write_stuffed(directory)
    assert main(["diagnose", str(directory)]) == 1
    out = capsys.readouterr().out
    assert "no-search" not in out and "\x1b" not in out
    assert f"foray replay {directory} --seq 32 --all" in out
    assert main(["diagnose", str(directory), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert Run(directory).diagnose() == facts
    assert facts["trajectories"] == 64 and facts["checked"] == list(REGISTRY)
    assert all(one["trajectories"][0]["dashboard"].startswith("#/group/") for one in facts["findings"])
