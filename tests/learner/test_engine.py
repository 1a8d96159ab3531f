"""DeepSpeed does what plain torch does: at every ZeRO stage, however the batch is cut, over ranks, after a restart."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

from learner.config.model import DeepSpeedSettings, OptimSettings
from learner.engine import DeepSpeedEngine
from learner.engine import optimizer as optimizer_module
from learner.engine.optimizer import learning_rate

STAGES = (0, 1, 2, 3)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LINEAR = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.1, "clip_norm": 0.0}
"""With eps 1 a step is nearly proportional to the gradient: a wrong scale shows. With a small eps Adam hides it."""


class Toy(torch.nn.Module):
    """A matrix and vectors, so that there are two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))).squeeze(-1)


def data(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(3))


def start(
    stage: int, dtype: str = "float32", engine: dict | None = None, module: torch.nn.Module | None = None, **optim
) -> DeepSpeedEngine:
    return DeepSpeedEngine(
        module or Toy(),
        optim=OptimSettings(**(LINEAR | optim)),
        engine=DeepSpeedSettings(zero_stage=stage, **(engine or {})),
        dtype=dtype,
        total_updates=10,
        seed=0,
    )


def update(engine: DeepSpeedEngine, x: torch.Tensor, cuts: int):
    """One update with the mean of the squares of all outputs, given in `cuts` micro-batches."""
    for part in x.split(math.ceil(len(x) / cuts)):
        engine.backward(engine.forward(part.to(engine.device)).square().sum() / len(x))
    return engine.step()


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return dict(engine.iter_weights())


def plain(updates: int, **optim) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same in torch alone: all at once, weights and the norms of the gradients."""
    s, model, norms = OptimSettings(**(LINEAR | optim)), Toy(), []
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": s.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=s.lr,
        betas=(optimizer_module.BETA1, s.beta2),
        eps=s.eps,
    )
    for _ in range(updates):
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip_norm or math.inf).item())
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def plain_loss(updates: int) -> float:
    """State after this many updates on all data."""
    model = Toy().requires_grad_(False)
    model.load_state_dict(plain(updates)[0])
    return model(data()).square().mean().item()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cuts", [1, 3])
def test_updates_are_those_of_plain_torch(stage, cuts):
    expected, norms = plain(2)
    engine = start(stage)
    found = [update(engine, data(), cuts) for _ in range(2)]
    assert [u.grad_norm for u in found] == pytest.approx(norms, rel=1e-5)
    assert all(u.applied for u in found)
    assert_same(weights(engine), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_acts(stage):
    expected, norms = plain(2, clip_norm=0.01)
    assert norms[0] > 0.1, "there is something to clip"
    engine = start(stage, clip_norm=0.01)
    found = [update(engine, data(), 2) for _ in range(2)]
    assert [u.grad_norm for u in found] == pytest.approx(norms, rel=1e-5), "the norm is that before clipping"
    assert_same(weights(engine), expected)


@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [
        (0, "float32", False),
        (2, "bfloat16", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(STAGES[1:], ("float32", "bfloat16"), (False, True))
            if case != (2, "bfloat16", False)
        ),
    ],
)
@pytest.mark.fault(39)
@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_forgotten(stage, dtype, offload, spoil):
    engine, untouched = [start(stage, dtype, {"offload_optimizer": offload}) for _ in range(2)]
    for each in (engine, untouched):
        update(each, data().to(DTYPES[dtype]), 2)
    x = data().to(DTYPES[dtype])
    spoiled = x.clone()
    spoiled[3, 1] = spoil
    before = weights(engine)
    skipped = update(engine, spoiled, 3)
    assert not skipped.applied
    assert not math.isfinite(skipped.grad_norm)
    assert_same(weights(engine), before, tolerance=0)
    assert engine.updates == 1
    assert update(engine, x, 2) == update(untouched, x, 2)
    assert_same(weights(engine), weights(untouched), tolerance=0)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_learning_rate_follows_the_schedule(stage, monkeypatch):
    monkeypatch.setattr(optimizer_module, "BETA1", 0.0)
    engine = start(stage, weight_decay=0.0, warmup_steps=2, beta2=0.0, eps=1e-12)
    moves = []
    for _ in range(3):
        before = weights(engine)["last.bias"]
        update(engine, data(), 1)
        moves.append(float((weights(engine)["last.bias"] - before).abs()))
    # without moments a step is lr * sign(gradient)
    assert moves == pytest.approx([0.05, 0.1, 0.1], rel=1e-4)


def test_the_schedule_by_hand():
    s = OptimSettings(lr=1.0, warmup_steps=2, schedule="linear", final_fraction=0.2)
    assert [learning_rate(s, n, 7) for n in (0, 1, 2, 4, 6, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    s = OptimSettings(lr=1.0, schedule="cosine", final_fraction=0.0)
    assert [learning_rate(s, n, 5) for n in range(5)] == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0])
    assert learning_rate(OptimSettings(lr=0.3), 1000, 10) == 0.3


def test_a_warm_up_can_be_a_share_of_the_run():
    s = OptimSettings(lr=1.0, warmup_fraction=0.285)
    assert [learning_rate(s, n, 10) for n in range(4)] == pytest.approx([0.5, 1.0, 1.0, 1.0]), "verl: int(.285 * 10)"
    with pytest.raises(ValueError, match="not both"):
        OptimSettings(warmup_fraction=0.1, warmup_steps=1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_of_the_module_can_have_its_own_learning_rate(stage, monkeypatch):
    monkeypatch.setattr(optimizer_module, "BETA1", 0.0)
    module = Toy()
    module.lr_scales = {"last.": 0.25}
    plain_moves, scaled_moves = ({}, {})
    for built, moves in ((Toy(), plain_moves), (module, scaled_moves)):
        engine = start(stage, module=built, weight_decay=0.0, beta2=0.0, eps=1e-12)
        before = weights(engine)
        update(engine, data(), 1)
        moves.update({name: (t - before[name]).abs().max().item() for name, t in weights(engine).items()})
    for name, moved in scaled_moves.items():
        assert moved == pytest.approx(plain_moves[name] * (0.25 if name.startswith("last.") else 1.0), rel=1e-3)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"offload_optimizer": True}, "needs zero_stage 1, 2 or 3"),
        ({"zero_stage": 2, "offload_params": True}, "needs zero_stage 3"),
        ({"zero_stage": 1, "overlap_comm": True}, "needs zero_stage 2 or 3"),
        ({"deepspeed": {"gradient_clipping": 1.0}}, "gradient_clipping: the learner sets this itself"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "zero_optimization.stage: the learner sets this itself"),
    ],
)
def test_settings_that_cannot_be_are_refused(said, why):
    with pytest.raises(ValueError, match=why):
        DeepSpeedSettings(**said)


def test_bfloat16_is_refused_at_stage_0():
    with pytest.raises(ValueError, match="bfloat16 needs zero_stage"):
        start(0, dtype="bfloat16")


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 6, "allgather_bucket_size": 8}}}),
        (2, {"overlap_comm": True, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 6}}}),
        (3, {"overlap_comm": True, "deepspeed": {"zero_optimization": {"stage3_prefetch_bucket_size": 4}}}),
        (2, {"deepspeed": {"zero_optimization": {"contiguous_gradients": False}, "communication_data_type": "fp32"}}),
    ],
)
def test_how_deepspeed_moves_numbers_changes_none(stage, more):
    expected, norms = plain(2)
    engine = start(stage, engine=more)
    assert [update(engine, data(), 2).grad_norm for _ in range(2)] == pytest.approx(norms, rel=1e-5)
    assert_same(weights(engine), expected)


def test_a_total_is_a_copy_of_its_dtype():
    engine = start(0)
    for dtype in (torch.float64, torch.bfloat16):
        given = torch.ones(2, dtype=dtype)
        total = engine.all_reduce(given)
        assert total.dtype == dtype
        total.zero_()
        assert given.tolist() == [1.0, 1.0]


def test_the_weights_are_copies():
    engine = start(0)
    for tensor in weights(engine).values():
        tensor.zero_()
    assert any(tensor.abs().sum() > 0 for tensor in weights(engine).values())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's heap")
def test_a_step_gives_free_memory_back_once_the_heap_has_grown(monkeypatch):
    """A fragmented heap, as after rows of many lengths: freed blocks below blocks that live."""

    def resident_mib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    engine = start(0)
    real, trims = engine._heap._trim, []
    monkeypatch.setattr(engine._heap, "_trim", lambda pad: (trims.append(pad), real(pad)))
    for _ in range(3):
        update(engine, data(), 1)
    assert not trims, "it needs the same memory in each step"
    torch.ones(7 << 20)  # freed at once: from here on glibc takes blocks of up to 28 MiB from its heap
    blocks = [torch.ones(size) for _ in range(200 + resident_mib() // 2) for size in (250_000, 4_000)]
    kept, blocks = blocks[1::2], []
    fragmented = resident_mib()
    update(engine, data(), 1)
    assert resident_mib() < fragmented - 100 and trims == [0]
    update(engine, data(), 1)
    assert trims == [0] and len(kept) >= 200


def test_nothing_is_written_to_stdout(capfd):
    update(start(1), data(), 2)
    assert capfd.readouterr().out == ""


# Runs in separate processes: this file is started with a role and writes its results as JSON.


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_another_process_goes_on_bit_for_bit(stage, tmp_path, zygote):
    engine = start(stage)
    for _ in range(2):
        update(engine, data(), 2)
    torch.rand(5)
    engine.save_state(tmp_path / "state")
    zygote.run_ranks(__file__, ["resume", str(tmp_path), str(stage)], tmp_path, 1)
    resumed = json.loads((tmp_path / "resume0.json").read_text())
    norm = update(engine, data(), 2).grad_norm
    assert resumed["updates"] == engine.updates == 3
    assert resumed["norm"] == norm.hex()
    assert resumed["random"] == float(torch.rand(1)).hex()
    assert resumed["weights"] == {name: [x.hex() for x in t.flatten().tolist()] for name, t in engine.iter_weights()}


@pytest.mark.parametrize("stages", [(2, 3), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_two_ranks_do_what_one_does(stages, tmp_path, zygote):
    expected, norms = plain(2)
    losses = [plain_loss(updates) for updates in range(2)]
    zygote.run_ranks(__file__, ["ranks", str(tmp_path), *map(str, stages)], tmp_path, 2)
    found = [json.loads((tmp_path / f"ranks{rank}.json").read_text()) for rank in range(2)]
    for stage in stages:
        for rank in range(2):
            of = found[rank][str(stage)]
            assert of["norms"] == pytest.approx(norms, rel=1e-5), (stage, rank)
            assert of["losses"] == pytest.approx(losses, rel=1e-5), (stage, rank)
            assert of["total"] == [3.0, 0.5], "and the ranks' own remain"
            flat = {name: torch.tensor(values) for name, values in of["weights"].items()}
            assert_same(flat, {name: t.flatten() for name, t in expected.items()})
            assert of["skipped"] == [False, False], "a NaN on one rank skips the update on both"
            assert of["sums"] == [3.0, 1.0]
            assert of["maxima"] == [2.0]


def _resume(directory: Path, stage: int) -> dict[str, object]:
    torch.manual_seed(99)
    engine = start(stage)
    update(engine, data(3), 1)  # another state, to be replaced completely
    engine.load_state(directory / "state")
    norm = update(engine, data(), 2).grad_norm
    found = {name: [x.hex() for x in t.flatten().tolist()] for name, t in engine.iter_weights()}
    return {"updates": engine.updates, "norm": norm.hex(), "random": float(torch.rand(1)).hex(), "weights": found}


def _ranks(stages: list[int]) -> dict[str, object]:
    rank, found = int(os.environ["RANK"]), {}
    mine = data()[rank::2]  # the two hold different data
    for stage in stages:
        engine = start(stage)

        losses: list[float] = []

        def one(x: torch.Tensor, engine: DeepSpeedEngine = engine, losses: list[float] = losses) -> tuple[float, bool]:
            loss = torch.zeros((), dtype=torch.float64)
            for part in x.split(2):
                share = engine.forward(part).square().sum() / len(data())
                engine.backward(share)
                loss += share.detach()
            losses.append(float(engine.all_reduce(loss)))
            return engine.step()

        norms = [one(mine)[0] for _ in range(2)]
        flat = {name: t.flatten().tolist() for name, t in engine.iter_weights()}
        sums, maxima = engine.all_reduce_scalars([1.0 + rank, 0.5], [2.0 * rank])
        skipped = [one(mine * (math.nan if rank == 1 else 1.0)).applied for _ in range(2)]
        own = torch.tensor([1.0 + rank, 0.25], dtype=torch.float64)
        total = [*engine.all_reduce(own[:1]).tolist(), engine.all_reduce(own[1:]).item()]
        assert own.tolist() == [1.0 + rank, 0.25]
        found[str(stage)] = {
            "losses": losses[:2],
            "total": total,
            "norms": norms,
            "weights": flat,
            "skipped": skipped,
            "sums": sums,
            "maxima": maxima,
        }
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, where = sys.argv[1], Path(sys.argv[2])
    stages = [int(stage) for stage in sys.argv[3:]]
    result = _resume(where, stages[0]) if role == "resume" else _ranks(stages)
    (where / f"{role}{os.environ['RANK']}.json").write_text(json.dumps(result))
