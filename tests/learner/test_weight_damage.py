"""Whatever happens to a version between policy and engine, the engine does not say that it holds the policy's tensors.

Here the packed buckets of the learner go straight into the set of tensors that an engine fills.
`test_publish_distributed.py` has the same over gloo, with what follows: no commit, files instead, and the run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from learner.weights.base import PackingError
from learner.weights.buckets import PackedBucket, layout, pack, plan
from learner.weights.checks import WeightCheck
from learner.weights.checksums import SourceChecksums
from protocol.weights import DIGESTS, refusal, sum_of
from rollout_server.cpu_engine.model.config import ModelConfig, read_model_config
from rollout_server.cpu_engine.model.loader import Weights, WeightsError
from rollout_server.cpu_engine.weight_sync.session import StagedWeights

CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": 1,
}  # fmt: skip
Buckets = list[PackedBucket]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return read_model_config(folder)


def version(config: ModelConfig, seed: int, sums: SourceChecksums | None = None) -> Buckets:
    """The buckets of one version; its checksums are added to `sums`."""
    torch.manual_seed(seed)
    named = [(n, torch.randn(slot.view.shape)) for n, slot in Weights(config, torch.float32).places.items()]
    return list(pack(plan(layout(named), 3000), iter(named), WeightCheck({}, 0.0), sums.add if sums else None))


def flipped(now: Buckets, old: Buckets) -> Buckets:
    now[1].flat[7] ^= 1
    return now


def swapped(now: Buckets, old: Buckets) -> Buckets:
    tensors = dict(t for one in now for t in one.tensors())
    first, second = (tensors[f"model.layers.{n}.self_attn.o_proj.weight"] for n in (0, 1))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    return now


def old_bytes(now: Buckets, old: Buckets) -> Buckets:
    return [*old[:1], *now[1:]]


def lost(now: Buckets, old: Buckets) -> Buckets:
    return now[1:]


def reordered(now: Buckets, old: Buckets) -> Buckets:
    """The bytes of two buckets of one size, each received as the other."""
    sizes = [one.flat.numel() for one in now]
    first, second = next((a, b) for a in range(len(now)) for b in range(a) if sizes[a] == sizes[b])
    now[first], now[second] = (
        PackedBucket(now[first].bucket, now[second].flat),
        PackedBucket(now[second].bucket, now[first].flat),
    )
    return now


def truncated(now: Buckets, old: Buckets) -> Buckets:
    now[-1].flat[-64:] = 0
    return now


@pytest.mark.parametrize("algorithm", DIGESTS)
@pytest.mark.parametrize("damage", [None, flipped, swapped, old_bytes, lost, reordered, truncated])
def test_damage_on_the_way_is_found(
    config: ModelConfig, algorithm: str, damage: Callable[[Buckets, Buckets], Buckets] | None
) -> None:
    with ThreadPoolExecutor(1) as pool:
        sums = SourceChecksums(pool, ["float32"], algorithm)
        now, old = version(config, 1, sums), version(config, 0)
    assert len(now) > 3
    staged = StagedWeights(config, torch.float32, algorithm)
    for bucket in damage(now, old) if damage else now:
        for name, tensor in bucket.tensors():
            staged.put(name, tensor)
    try:
        held = sum_of(staged.finished().checksums(algorithm))
    except WeightsError as error:
        assert damage is lost and "not sent" in str(error)
    else:
        assert (held == sums.total("float32", ())) == (damage is None)


@pytest.mark.parametrize("algorithm", DIGESTS)
def test_a_tensor_that_cannot_be_read_back_from_its_bucket_is_not_sent(config: ModelConfig, algorithm: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        sums = SourceChecksums(pool, (), algorithm)
        now = version(config, 1, sums)
    for one in now:
        sums.check(one)
    flipped(now, now)
    with pytest.raises(PackingError, match="in its bucket differs from the policy"):
        sums.check(now[1])


def test_an_unknown_checksum_is_refused_with_what_to_do() -> None:
    assert [refusal(algorithm) for algorithm in DIGESTS] == ["", ""]
    said = refusal("blake3")
    assert "install the learner's version" in said and "learner.publish.checksum=sha256" in said


READS = {"cpu", "item", "tolist", "numpy", "__float__", "__bool__", "__int__", "to", "pin_memory"}


class Calls(TorchFunctionMode):
    """Records the values that are read from a tensor, and new tensors of more than a few elements, no views."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[str, int]] = []
        self.made: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, torch.Tensor)]
        if func.__name__ in READS:
            self.read.append((func.__name__, given[0].numel()))
        known = {one.untyped_storage().data_ptr() for one in given}
        for one in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(one, torch.Tensor) and one.numel() > 16 and one.untyped_storage().data_ptr() not in known:
                self.made.append(func.__name__)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_on_a_gpu_are_checked_there_and_only_sums_are_read(dtype: torch.dtype) -> None:
    """The calls are the same on every device; here it is main memory."""
    named = [(name, torch.randn(64, 33).to(dtype)) for name in "abc"]
    (packed,) = pack(plan(layout(named), 1 << 20), iter(named), WeightCheck({}, 0.0))
    check = WeightCheck({}, 0.0, deferred=True)
    with Calls() as calls:
        for name, tensor in named:
            check.add(name, tensor)
        check.compare(packed.tensors())
        check.finish()
    assert (calls.read, calls.made, len(check.norms)) == ([("tolist", 2 * len(named))], [], 3)
    with Calls() as calls:
        named[0][1].clone().cpu()
    assert (calls.read, calls.made) == ([("cpu", 64 * 33)], ["clone"]), "a copy is seen"
