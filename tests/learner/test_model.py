"""Packing is exact: a trajectory scores the same alone and beside others, gradients included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from learner.attention import block_mask
from learner.batch import build_batch
from learner.config_algorithm import GrpoSettings
from learner.config_batch import BatchSettings
from learner.config_model import ModelSettings
from learner.model import PolicyModel, load_policy
from protocol.errors import UserError
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.testing import make_question, observation_segment, policy_segment, prompt_segment
from protocol.versions import PolicyVersion

VOCABULARY = 61
KINDS = ("qwen2", "qwen3", "llama")


def tiny(kind: str, **extra) -> transformers.PreTrainedModel:
    """Two layers, grouped-query attention, weights large enough that attention is not flat."""
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=kind != "llama",
        initializer_range=0.3,
        pad_token_id=None,
        **extra,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def policy(kind: str, **settings) -> PolicyModel:
    return PolicyModel(tiny(kind), ModelSettings(**settings)).double()


def some_groups(count: int = 3) -> list[TrajectoryGroup]:
    rng = np.random.default_rng(0)

    def trajectory() -> Trajectory:
        a, b, c, d = (rng.integers(1, VOCABULARY, rng.integers(1, 9)) for _ in range(4))
        segments = (prompt_segment(a), policy_segment(b), observation_segment(c), policy_segment(d))
        return Trajectory(status=Status.ANSWERED, segments=segments, reward=float(rng.random()))

    return [
        TrajectoryGroup(run="t", seq=s, question=make_question(s), trajectories=(trajectory(), trajectory()))
        for s in range(1, count + 1)
    ]


def batch_of(groups, row_tokens: int, budget: int = 4096):
    return build_batch(
        groups,
        GrpoSettings().build(),
        now_step=0,
        lineage=(PolicyVersion(1, 0),),
        max_lag=0,
        settings=BatchSettings(row_tokens=row_tokens, micro_batch_tokens=budget),
        temperature=0.8,
    )


def score(model: PolicyModel, batch) -> tuple[dict[tuple[int, int], float], dict[str, torch.Tensor]]:
    """Log-prob of each trained token by (trajectory, position), and the gradient of their weighted sum."""
    model.zero_grad()
    found: dict[tuple[int, int], float] = {}
    for m in batch.micro_batches:
        t = {name: torch.from_numpy(getattr(m, name)) for name in m.__dataclass_fields__}
        documents = t["documents"] if int(m.documents.max()) > 0 else None
        scores = model(t["ids"], t["positions"], documents, t["index"], t["targets"], batch.temperature, False)
        (scores.logprobs * t["advantages"]).sum().backward()
        keys = zip(m.trajectory.tolist(), m.positions.flat[m.index].tolist(), strict=True)
        found.update(zip(keys, scores.logprobs.tolist(), strict=True))
    return found, {name: p.grad.clone() for name, p in model.named_parameters()}


def one_by_one(model: PolicyModel, groups, batch) -> tuple[dict[tuple[int, int], float], dict[str, torch.Tensor]]:
    """The same with nothing of ours: transformers' own forward pass over each trajectory alone."""
    model.zero_grad()
    advantage = {int(i): float(a) for m in batch.micro_batches for i, a in zip(m.trajectory, m.advantages, strict=True)}
    found: dict[tuple[int, int], float] = {}
    for number, t in enumerate(t for g in groups for t in g.trajectories):
        logits = (
            model.causal(torch.tensor(t.ids.tolist())[None], use_cache=False).logits[0].double() / batch.temperature
        )
        table = torch.log_softmax(logits, -1)
        for at in np.flatnonzero(t.mask).tolist():
            value = table[at - 1, int(t.ids[at])]
            found[number, at - 1] = value.item()
            (value * advantage[number]).backward(retain_graph=True)
    return found, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_tokens", [0, 40, 200])
def test_packed_equals_one_by_one(kind, row_tokens):
    model, groups = policy(kind), some_groups()
    batch = batch_of(groups, row_tokens)
    assert (max(int(m.documents.max()) for m in batch.micro_batches) > 0) == (row_tokens > 0)
    (packed, packed_gradient), (alone, alone_gradient) = score(model, batch), one_by_one(model, groups, batch)
    assert packed.keys() == alone.keys()
    assert max(abs(packed[k] - alone[k]) for k in alone) < 1e-5
    for name, gradient in alone_gradient.items():
        # transformers computes norms and rotations in float32, whatever the model's dtype
        torch.testing.assert_close(packed_gradient[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trajectory_cannot_see_its_neighbour_in_the_row(kind):
    model, groups = policy(kind), some_groups(1)
    before, _ = score(model, batch_of(groups, 200))
    first, second = groups[0].trajectories
    segments = (prompt_segment([7] * len(second.segments[0].ids)), *second.segments[1:])
    other = Trajectory(status=second.status, segments=segments, reward=second.reward)
    changed = groups[0].model_copy(update={"trajectories": (first, other)})
    after, _ = score(model, batch_of([changed], 200))
    assert {k: v for k, v in before.items() if k[0] == 0} == pytest.approx(
        {k: v for k, v in after.items() if k[0] == 0}, abs=1e-6
    )
    # and the comparison can fail: the second trajectory did change
    assert [v for k, v in before.items() if k[0] == 1] != pytest.approx([v for k, v in after.items() if k[0] == 1])


def test_the_mask_is_causal_within_blocks_and_padding_sees_itself():
    mask = block_mask(torch.tensor([[0, 0, 1, -1]]))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"logit_chunk_bytes": 1024}])
def test_saving_memory_changes_nothing(settings, tmp_path):
    tiny("qwen2").save_pretrained(tmp_path)
    batch = batch_of(some_groups(), 60)
    plain = load_policy(tmp_path, ModelSettings()).double()
    thrifty = load_policy(tmp_path, ModelSettings(**settings)).double().train()
    (a, a_gradient), (b, b_gradient) = score(plain, batch), score(thrifty, batch)
    assert a == pytest.approx(b, abs=1e-12)
    for name, gradient in a_gradient.items():
        torch.testing.assert_close(b_gradient[name], gradient, rtol=1e-10, atol=1e-10)


def test_a_model_loads_in_the_dtype_of_the_settings(tmp_path):
    tiny("qwen2").save_pretrained(tmp_path)
    assert {p.dtype for p in load_policy(tmp_path, ModelSettings(dtype="bfloat16")).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load_policy(tmp_path, ModelSettings()).parameters()} == {torch.float32}


def test_a_missing_model_is_a_persons_error(tmp_path):
    with pytest.raises(UserError, match="no model in"):
        load_policy(tmp_path / "nothing", ModelSettings())
