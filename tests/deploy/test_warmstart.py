"""The warm start: its files, that the model learns, and that the gate can fail."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foray.demo.world import ALIASED, HARD, RELATION_NAMES, Lookup, words

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from foray.demo.demonstrations import Scene, collate  # noqa: E402
from foray.demo.warmstart import (  # noqa: E402  # noqa: E402
    BAND,
    GateReport,
    WarmStartBudget,
    WarmStartFailed,
    gate,
    new_model,
    warm_start,
    weaker,
)


def quiet(line: str) -> None:
    """Log nothing."""


def test_a_new_model_is_the_same_for_the_same_seed_and_small() -> None:
    one, again, other = new_model(3), new_model(3), new_model(4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.model.layers[3].mlp.up_proj.weight, other.model.layers[3].mlp.up_proj.weight)
    assert sum(p.numel() for p in one.parameters()) < 400_000
    assert one.config.vocab_size == len(words())


def test_a_new_model_looks_one_word_back_and_leans_towards_what_followed_the_word_before() -> None:
    model = new_model(0)
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    half = torch.stack([torch.randperm(60)[:20] + 40 for _ in range(16)])
    with torch.no_grad():
        attended = model(input_ids=torch.cat([half, half], dim=1), output_attentions=True).attentions
    places = torch.arange(20, 39)
    assert attended[0][:, 0, places, places - 1].mean() > 0.8
    uniform = (1.0 / (places + 1)).mean()
    for layer in (1, 2):
        assert attended[layer][:, 0, places, places - 19].mean() > 1.5 * uniform
        assert attended[layer][:, 0, places, places - 10].mean() < 1.3 * uniform


def test_an_untrained_model_does_not_pass_the_gate() -> None:
    report = gate(new_model(0), seed=0, asked=4)
    assert not report.passed and report.worst < 0.2


def test_one_unread_relation_closes_the_gate() -> None:
    read = {"mayor": 1.0, "seat": 1.0, "founder": 1.0}
    assert GateReport(read, read).passed
    assert not GateReport(read | {"seat": 0.5}, read).passed
    assert not GateReport(read, read | {"seat": 0.5}).passed


def test_the_gate_of_the_hard_demo_is_a_band() -> None:
    def report(query: float, evidence: float) -> GateReport:
        return GateReport({"mayor": evidence, "seat": evidence}, {"mayor": query, "seat": query}, hard=True)

    low, high = BAND
    assert 0.5 <= low < high <= 0.8
    assert report(low, high).passed and report(high, low).passed
    for one, other in ((low - 0.01, high), (high, low - 0.01), (high + 0.01, low), (low, high + 0.01), (1.0, 1.0)):
        assert not report(one, other).passed


def test_the_hard_gate_examines_all_depths_and_second_names() -> None:
    report = gate(new_model(0), seed=0, asked=4, level=HARD)
    assert report.hard and not report.passed and set(report.evidence) == {*RELATION_NAMES, ALIASED}
    assert set(report.query) == set(RELATION_NAMES)


def test_a_skill_that_is_good_enough_has_no_loss_until_the_other_is() -> None:
    world = HARD.world(5)
    scene, puzzles = Scene(world, Lookup(world), random.Random(0)), HARD.puzzles(world)
    for query, evidence in ((1.0, 0.0), (0.0, 1.0)):
        report = GateReport({"mayor": evidence}, {"mayor": query}, hard=True)
        for _ in range(20):
            shown = weaker(report, scene, puzzles)
            assert all(bool(sum(shown.weights[span])) == (query < 0.5) for span in shown.queries)
            assert all(bool(sum(shown.weights[span])) == (evidence < 0.5) for span in shown.evidence)
            assert sum(shown.weights) > 0


def test_a_budget_that_does_not_suffice_is_an_error_and_writes_no_model(tmp_path: Path) -> None:
    budget = WarmStartBudget(practice=2, chunk=1, most=3, habits=1, batch=2)
    with pytest.raises(WarmStartFailed, match="does not pass the gate after 3 steps"):
        warm_start(tmp_path / "model", 0, quiet, budget)
    assert not (tmp_path / "model").exists()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_warm_start_passes_the_gate_and_writes_a_loadable_model(warm_start_once: Any) -> None:
    directory, report = warm_start_once.directory, warm_start_once.report
    assert GateReport(**report["gate"]).passed and report["steps"] > report["practice_steps"] >= 100
    assert sum("evidence" in line for line in warm_start_once.lines) == report["looks"] + 1, (
        "beside those of the progress"
    )
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    } <= {path.name for path in directory.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert asdict(gate(model, 0)) == report["final"]
    assert all(t.dtype == torch.float32 for t in load_file(directory / "model.safetensors").values())
    assert report["gate"]["evidence"]["mayor"] >= 0.9


def test_collate_pads_on_the_right_with_weight_nothing() -> None:
    from foray.demo.demonstrations import Demonstration

    ids, weights = collate([Demonstration([5, 6], [0.0, 1.0]), Demonstration([7], [1.0])])
    assert ids.tolist() == [[5, 6], [7, 0]] and weights.tolist() == [[0.0, 1.0], [1.0, 0.0]]
