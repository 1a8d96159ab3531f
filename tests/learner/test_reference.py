"""References: frozen, averaged in float32, or copied now and then, at every ZeRO stage and after a restart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from learner.config.model import DeepSpeedSettings, LoraSettings, ModelSettings, OptimSettings, ReferenceSettings
from learner.engine import DeepSpeedEngine
from learner.engine.ranks import join_ranks
from learner.model.loading import load_policy
from learner.trainer import reference as module_under_test
from learner.trainer.reference import Reference, build_reference, shard, share_frozen
from protocol.errors import UserError


def save(directory: Path, seed: int, vocabulary: int = 61) -> Path:
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"), 0)


class Run:
    """A policy under training with a reference, as the trainer has them."""

    def __init__(self, directory: Path, stage: int = 0, lr: float = 0.02, rank: int = 0, dtype="float32", **reference):
        self.model = ModelSettings(dtype=dtype, lora=LoraSettings(rank=rank))
        self.directory = directory
        self.engine = DeepSpeedEngine(
            load_policy(directory, self.model), optim=OptimSettings(lr=lr), engine=DeepSpeedSettings(zero_stage=stage),
            dtype=dtype, total_updates=99, seed=0,
        )  # fmt: skip
        self.reference: Reference = build_reference(
            ReferenceSettings(**reference), directory, self.model, self.engine, packed=False
        )

    def train(self, updates: int) -> None:
        for _ in range(updates):
            self.engine.backward(-self.engine.forward(*inputs()).logprobs.mean())
            assert self.engine.step().applied
            self.reference.after_update(self.engine.updates)

    def policy(self) -> torch.Tensor:
        with torch.no_grad():
            return self.engine.forward(*inputs()).logprobs

    def master(self) -> dict[str, torch.Tensor]:
        return dict(self.engine.iter_state("master"))

    def with_weights(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Scores of a fresh model with these weights, cast to the dtype of the forward pass."""
        model = load_policy(self.directory, self.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
            return model(*inputs()).logprobs


def inputs() -> tuple:
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(9).repeat(2, 1)
    return ids, positions, None, torch.arange(17), ids.flatten()[1:], 1.0, False


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def seen(run: Run) -> torch.Tensor:
    return run.reference.forward(*inputs()).logprobs


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (4, 3)])
def test_a_frozen_reference_stays_the_initial_model(directory, stage, rank):
    run = Run(directory, stage, rank=rank)
    before = run.policy()
    run.train(3)
    assert_close(seen(run), before)
    assert (run.policy() - before).abs().max() > 0.1
    assert not seen(run).requires_grad


def test_adapters_need_no_second_copy(directory):
    assert Run(directory, rank=4).reference._module is None
    assert Run(directory).reference._module is not None


def test_a_frozen_reference_may_be_another_model(directory, tmp_path):
    other = save(tmp_path, seed=1)
    for rank in (0, 4):
        run = Run(directory, rank=rank, model=other)
        run.train(1)
        assert_close(seen(run), load_policy(other, ModelSettings())(*inputs()).logprobs.detach())


def test_scores_at_given_tokens_and_the_likeliest(directory):
    run = Run(directory)
    at = torch.randint(0, 61, (17, 4), generator=torch.Generator().manual_seed(1))
    found = run.reference.forward(*inputs(), 3, at)
    with torch.no_grad():
        logits = load_policy(directory, ModelSettings()).causal(inputs()[0]).logits.flatten(0, 1)[:17]
    assert_close(found.at, torch.log_softmax(logits, -1).gather(-1, at))
    assert found.top.equal(logits.topk(3).indices)


@pytest.mark.parametrize("head", ["fused", "capped"])
def test_the_likeliest_are_those_of_the_ids_that_the_policy_has(directory, tmp_path, head):
    """As Qwen2.5-7B beside 1.5B: 128 ids more, which no tokenizer gives out."""
    run = Run(directory, model=save(tmp_path, seed=1, vocabulary=75))
    if head == "capped":
        run.reference._module.causal.config.final_logit_softcapping = 1e4
    with torch.no_grad():
        table = torch.log_softmax(run.reference._module.causal(inputs()[0]).logits.flatten(0, 1)[:17], -1)
    assert (table.topk(20).indices >= 61).any(), "the test has something to cut off"
    found = run.reference.forward(*inputs(), 20)
    assert found.top.equal(table[:, :61].topk(20).indices)
    torch.testing.assert_close(found.at, table.gather(-1, found.top), rtol=1e-4, atol=1e-4)
    assert run.reference.forward(*inputs(), 99).top.shape == (17, 61)


def test_a_reference_of_fewer_ids_is_refused_at_load(directory, tmp_path):
    with pytest.raises(UserError, match="has 50 ids, but the policy has 61"):
        Run(directory, model=save(tmp_path, seed=1, vocabulary=50))


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("rank", [0, 4])
def test_the_average_is_that_of_plain_arithmetic(directory, stage, rank):
    run = Run(directory, stage, rank=rank, kind="ema", tau=0.7, every=2)
    average = {name: tensor.double() for name, tensor in run.master().items()}
    start = seen(run)
    for number in range(1, 7):
        run.train(1)
        if number == 1:
            assert seen(run).equal(start), "not at the first update"
        if number % 2 == 0:
            average = {name: 0.7 * average[name] + 0.3 * tensor.double() for name, tensor in run.master().items()}
            assert_close(seen(run), run.with_weights(average))
    assert (seen(run) - run.policy()).abs().max() > 0.05, "it lags behind the policy"
    assert (seen(run) - start).abs().max() > 0.05, "and it moved"


def test_the_average_keeps_what_bfloat16_would_lose(directory):
    run = Run(directory, 1, lr=1e-5, dtype="bfloat16", kind="ema", tau=0.99, every=1)
    exact = {name: tensor.double() for name, tensor in run.master().items()}
    rounded = {name: tensor.bfloat16() for name, tensor in run.master().items()}
    for _ in range(10):
        run.train(1)
        for name, tensor in run.master().items():
            exact[name] = 0.99 * exact[name] + 0.01 * tensor.double()
            rounded[name] = (0.99 * rounded[name].float() + 0.01 * tensor.bfloat16().float()).bfloat16()
    name = "causal.model.layers.0.mlp.up_proj.weight"
    found = dict(run.engine.iter_state("ema"))[name].double()
    moved = (exact[name] - dict(Run(directory, 1, dtype="bfloat16").engine.iter_state("master"))[name]).norm()
    assert (found - exact[name]).norm() < 0.02 * moved
    assert (rounded[name].double() - exact[name]).norm() > 0.9 * moved, "in bfloat16 there would be nothing left of it"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_refreshed_reference_is_the_policy_of_its_last_refresh(directory, stage):
    run = Run(directory, stage, kind="refresh", every=3)
    run.train(3)
    refreshed = run.policy()
    assert_close(seen(run), refreshed)
    run.train(2)
    assert_close(seen(run), refreshed)
    assert (run.policy() - refreshed).abs().max() > 0.05
    run.train(1)
    assert_close(seen(run), run.policy())


@pytest.mark.parametrize("kind", ["ema", "refresh"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_run_has_the_same_reference_and_goes_on_with_it(directory, kind, rank, tmp_path):
    settings = {"kind": kind, "every": 3, "rank": rank}
    run = Run(directory, **settings)
    run.train(4)
    run.engine.save_state(tmp_path)
    resumed = Run(directory, **settings)
    resumed.engine.load_state(tmp_path)
    resumed.reference.reload()
    assert seen(resumed).equal(seen(run))
    for _ in range(3):  # a change is due at the second of these
        before = seen(run)
        run.train(1)
        resumed.train(1)
        assert seen(resumed).equal(seen(run))
        assert seen(run).equal(before) == (run.engine.updates != 6)


def test_several_updates_at_once_do_not_jump_over_a_change(directory):
    run = Run(directory, kind="refresh", every=4)
    for number in range(6):
        run.engine.backward(-run.engine.forward(*inputs()).logprobs.mean())
        run.engine.step()
        if number % 3 == 2:
            run.reference.after_update(run.engine.updates)
    assert_close(seen(run), run.policy())


def test_an_update_is_applied_once_for_repeated_calls(directory):
    run = Run(directory, kind="ema", tau=0.5, every=2)
    run.train(2)
    before = seen(run)
    run.reference.after_update(2)
    assert seen(run).equal(before)


@pytest.mark.parametrize("kind", ["frozen", "ema"])
def test_a_reference_that_rests_in_main_memory_scores_the_same(directory, kind):
    run, resting = (Run(directory, kind=kind, every=1, offload=offload) for offload in (False, True))
    for each in (run, resting):
        each.train(2)
        each.reference.onload()
    assert seen(run).equal(seen(resting))
    resting.reference.offload()
    assert {p.device.type for p in resting.reference._module.parameters()} == {"cpu"}


def test_an_average_of_adapters_shares_the_frozen_weights(directory):
    run = Run(directory, rank=4, kind="ema")
    own = dict(run.reference._module.named_parameters())
    policy = dict(run.engine.module.named_parameters())
    shared = {name for name in own if own[name].data_ptr() == policy[name].data_ptr()}
    assert shared == {name for name in own if ".lora_" not in name}


class Moved(torch.nn.Linear):
    """A module that notes where it is moved."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.moves: list[str] = []

    def to(self, device):
        self.moves.append(str(device))
        return self


class Engine:
    """The parts of a policy's engine that say where a reference lives; its `frozen` weights can be shared."""

    updates, device = 0, "the device"

    def __init__(self, stage: int, world_size: int, frozen: tuple[str, ...] = ()) -> None:
        self.stage, self.world_size, self.averages = stage, world_size, 0
        self.module = torch.nn.Linear(2, 2)
        for name in frozen:
            self.module.get_parameter(name).requires_grad_(False)

    def start_ema(self) -> None:
        self.averages += 1


@pytest.mark.parametrize(
    ("stage", "ranks", "frozen", "offload", "moves"),
    [
        (0, 1, (), False, ["the device", "the device"]),
        (0, 1, (), True, ["the device", "cpu"]),
        (3, 1, (), True, ["the device", "cpu"]),
        (2, 2, (), True, ["the device", "cpu"]),
        (3, 2, (), True, ["sharded", "the device", "the device"]),
        (3, 2, ("weight",), False, ["sharded", "the device", "the device"]),
        (2, 2, ("weight",), True, ["the device", "the device"]),
        (0, 1, ("weight", "bias"), True, ["the device", "the device"]),
    ],
)
def test_only_a_whole_copy_leaves_the_device_between_batches(stage, ranks, frozen, offload, moves, monkeypatch):
    """Not the shares of ranks, which are small, and not the policy's own frozen weights."""
    monkeypatch.setattr(module_under_test, "shard", lambda module, device: module.moves.append("sharded"))
    module, engine = Moved(), Engine(stage, ranks, frozen)
    reference = Reference(ReferenceSettings(kind="ema", offload=offload), module, engine)
    reference.onload()
    reference.offload()
    assert module.moves == moves and engine.averages == 1
    shared = {
        name for name, p in module.named_parameters() if p.data_ptr() == engine.module.get_parameter(name).data_ptr()
    }
    assert shared == (set() if "sharded" in moves else set(frozen))


def test_a_reference_that_is_the_policy_without_adapters_is_never_sharded_or_moved(monkeypatch):
    monkeypatch.setattr(module_under_test, "shard", lambda *_: pytest.fail("there is no module"))
    engine = Engine(3, 2)
    reference = Reference(ReferenceSettings(kind="frozen", offload=True), None, engine)
    reference.onload()
    reference.offload()
    reference.after_update(99)
    reference.reload()
    assert engine.averages == 0


def other_name(own: torch.nn.Module) -> None:
    own.other, own.weight = own.weight, None


@pytest.mark.parametrize(
    "change",
    [
        other_name,
        lambda own: setattr(own, "weight", torch.nn.Parameter(torch.zeros(3, 2))),
        lambda own: own.bfloat16(),
    ],
)
def test_frozen_weights_of_another_name_shape_or_dtype_are_not_shared(change):
    policy, own = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    policy.requires_grad_(False)
    change(own)
    before = {name: p.data_ptr() for name, p in own.named_parameters()}
    assert share_frozen(own, policy) is False
    assert before == {name: p.data_ptr() for name, p in own.named_parameters()}


@torch.no_grad()
def test_a_sharded_reference_is_read_from_its_files_and_stays_sharded_after_use(directory):
    join_ranks()
    whole, parts = (load_policy(directory, ModelSettings(), sharded=sharded).eval() for sharded in (False, True))
    assert parts.stored is not None
    shard(parts, torch.device("cpu"))
    expected = dict(whole.named_parameters())
    assert all(torch.equal(p.full_tensor(), expected[name]) for name, p in parts.named_parameters())
    assert_close(parts(*inputs()).logprobs, whole(*inputs()).logprobs)
    assert all(isinstance(p, DTensor) for p in parts.parameters())


@pytest.mark.slow
def test_over_two_ranks_at_stage_3_each_holds_half_and_scores_as_the_whole(directory, tmp_path, zygote):
    zygote.run_ranks(__file__, [str(directory)], tmp_path, 2)


def be_a_rank(directory: Path) -> None:
    """One of two at stage 3: a moving average of all weights, then one of adapters, then a frozen reference."""
    from learner.engine import leave_ranks

    run = Run(directory, 3, kind="ema", tau=0.7, every=1)
    average = {name: tensor.double() for name, tensor in run.master().items()}
    for _ in range(2):
        run.train(1)
        average = {name: 0.7 * average[name] + 0.3 * tensor.double() for name, tensor in run.master().items()}
        assert_close(seen(run), run.with_weights(average))
    held = sum(p.to_local().numel() for p in run.reference._module.parameters())
    everything = sum(p.numel() for p in load_policy(directory, ModelSettings()).parameters())
    assert 0.4 * everything < held < 0.6 * everything
    adapted = Run(directory, 3, rank=4, kind="refresh", every=2)
    adapted.train(2)
    assert_close(seen(adapted), adapted.policy())
    frozen = Run(directory, 3)
    before = frozen.policy()
    frozen.train(1)
    assert_close(seen(frozen), before)
    assert (frozen.policy() - before).abs().max() > 0.05
    leave_ranks()


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]))
