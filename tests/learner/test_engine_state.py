"""State and average of an engine: whole tensors by name, whatever the stage, the dtype and the number of ranks.

Two ranks train, save, and resume at every stage, and take up what one saved; then three take it up at other stages,
and then one. All processes are started once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.checkpoint import checkpoint as checkpoint_files
from learner.config.model import DeepSpeedSettings, OptimSettings
from learner.engine import DeepSpeedEngine, leave_ranks
from learner.engine import partition as gather
from learner.engine import state as state_files
from protocol.errors import UserError
from tests.support.forks import Zygote

KINDS = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32")]
KINDS += [(1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")]
name_of = "z{}.{}".format

TAU = 0.75
ROWS = 12
"""Divisible by 1, 2 and 3 ranks."""


class Net(torch.nn.Module):
    """Odd sizes, a tied matrix, a frozen one, buffers of both kinds, and a part with another learning rate."""

    lr_scales = {"head.": 4.0}  # noqa: RUF012  # a plain dict is what the engine looks for

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 7, bias=False)
        self.tied = torch.nn.Linear(7, 7, bias=False)
        self.tied.weight = self.second.weight
        self.fixed = torch.nn.Linear(7, 7).requires_grad_(False)
        self.head = torch.nn.Linear(7, 1)
        self.register_buffer("shift", torch.tensor([0.25, -0.0, 1.0]))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.first.weight.dtype)
        hidden = torch.nn.functional.dropout(torch.tanh(self.first(x)), 0.25, self.training)
        return self.head(torch.tanh(self.fixed(self.tied(torch.tanh(self.second(hidden)))))).squeeze(-1).float()


def start(stage: int, dtype: str, **more: Any) -> DeepSpeedEngine:
    # threshold 0: small parameters are partitioned too, as large ones are in real models
    threshold = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    return DeepSpeedEngine(
        Net(),
        optim=OptimSettings(lr=0.02, weight_decay=0.1, clip_norm=0.5, schedule="cosine", warmup_fraction=0.2),
        engine=DeepSpeedSettings(zero_stage=stage, **({"deepspeed": threshold} | more)),
        dtype=dtype,
        total_updates=10,
        seed=5,
    )


def update(engine: DeepSpeedEngine, number: int, *, dropout: bool = False) -> str:
    """Update `number` with this rank's rows of its data, in two micro-batches."""
    engine.module.train(dropout)
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(number))[engine.rank :: engine.world_size]
    for part in x.split((len(x) + 1) // 2):
        engine.backward((engine.forward(part) - 1.0).square().sum() / ROWS)
    step = engine.step()
    assert step.applied
    return step.grad_norm.hex()


def state(
    engine: DeepSpeedEngine, keys: tuple[str, ...] = ("master", "exp_avg", "exp_avg_sq", "ema")
) -> dict[str, Any]:
    return {f"{key}/{name}": tensor for key in keys for name, tensor in engine.iter_state(key)}


def facts(engine: DeepSpeedEngine, norms: list[str]) -> dict[str, torch.Tensor]:
    """All that a resumed engine must have in common with one that went on."""
    norm = torch.tensor([float.fromhex(n) for n in norms], dtype=torch.float64)
    weights = {f"weights/{name}": t.contiguous() for name, t in engine.iter_weights()}
    return {**state(engine), **weights, "norms": norm, "random": torch.rand(3), "updates": torch.tensor(engine.updates)}


def go_on(engine: DeepSpeedEngine, *, dropout: bool) -> dict[str, torch.Tensor]:
    norms = []
    for number in (4, 5):
        norms.append(update(engine, number, dropout=dropout))
        engine.update_ema(TAU)
    return facts(engine, norms)


@contextmanager
def bytes_read() -> Iterator[dict[str, int]]:
    """Counts bytes of the tensors that are read from files, by key."""
    found: dict[str, int] = defaultdict(int)
    real = state_files.safe_open

    class Slice:
        def __init__(self, saved: Any, key: str) -> None:
            self.saved, self.key = saved, key
            self.get_shape, self.get_dtype = saved.get_shape, saved.get_dtype

        def __getitem__(self, rows: Any) -> torch.Tensor:
            return counted(self.saved[rows], self.key)

    class Opened:
        def __init__(self, path: Path, **how: Any) -> None:
            self.file, self.key = real(path, **how), path.name.split(".")[0]

        def __enter__(self) -> Opened:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.file.keys()

        def get_slice(self, name: str) -> Slice:
            return Slice(self.file.get_slice(name), self.key)

        def get_tensor(self, name: str) -> torch.Tensor:
            return counted(self.file.get_tensor(name), self.key)

    def counted(tensor: torch.Tensor, key: str) -> torch.Tensor:
        found[key] += tensor.numel() * tensor.element_size()
        return tensor

    state_files.safe_open = Opened
    try:
        yield found
    finally:
        state_files.safe_open = real


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """Bytes of the tensors that this rank gives to collectives, but for a flag or two."""
    found: list[int] = []
    real = {name: getattr(torch.distributed, name) for name in ("all_reduce", "all_to_all_single")}

    def counted(name: str) -> Any:
        def call(buffer: torch.Tensor, *rest: Any, **more: Any) -> Any:
            given = rest[0] if name == "all_to_all_single" else buffer
            found.append(given.numel() * given.element_size() if given.numel() > 2 else 0)
            return real[name](buffer, *rest, **more)

        return call

    for name in real:
        setattr(torch.distributed, name, counted(name))
    try:
        yield found
    finally:
        for name, function in real.items():
            setattr(torch.distributed, name, function)


# ---- roles, each run by every rank of a group of processes


def role_two(folder: Path) -> None:
    """At every stage: train, save, go on; and resume in an engine with another state, and go on."""
    for stage, dtype in KINDS:
        engine, here = start(stage, dtype), folder / name_of(stage, dtype)
        for number in (1, 2):
            update(engine, number, dropout=True)
        engine.start_ema()
        plain = dict(engine.iter_state("master"))
        update(engine, 3, dropout=True)
        engine.update_ema(TAU)
        plain = {name: TAU * plain[name] + (1 - TAU) * now for name, now in engine.iter_state("master")}
        for name, average in engine.iter_state("ema"):
            torch.testing.assert_close(average, plain[name], rtol=1e-6, atol=0)
            assert average.ne(dict(engine.iter_state("master"))[name]).any()
        engine.save_state(here / "state")
        torch.distributed.barrier()
        save_file(go_on(engine, dropout=True), here / f"went_on.{engine.rank}")
        if (stage, dtype) == (1, "bfloat16"):
            engine.close()  # what DeepSpeed saves of the class it takes here, its own tool cannot read
            engine = start(stage, dtype, deepspeed={"data_types": {"grad_accum_dtype": "bf16"}})
            update(engine, 1)
        if stage:
            same_as_deepspeed(engine, here / "theirs")
        engine.close()
        resume(stage, dtype, here, dropout=True)
    resume(3, "bfloat16", folder / "one", dropout=False)


def role_read(folder: Path) -> None:
    """What each rank sends to save a state, and reads of it, at stages 2 and 3."""
    for stage in (2, 3):
        engine = start(stage, "bfloat16")
        with bytes_sent() as sent:
            engine.save_state(folder / f"z{stage}")
        torch.distributed.barrier()
        with bytes_read() as found:
            engine.load_state(folder / f"z{stage}")
        found["sent"] = sum(sent)
        (folder / f"read.{stage}.{engine.world_size}.{engine.rank}").write_text(json.dumps(found))
        engine.close()


def role_three(folder: Path) -> None:
    """Takes up every state at another stage."""
    for stage, dtype in KINDS:
        source = (stage + 1) % 4 if dtype == "float32" else stage % 3 + 1
        resume(stage, dtype, folder / name_of(source, dtype), dropout=False)


def resume(stage: int, dtype: str, here: Path, *, dropout: bool) -> None:
    engine = start(stage, dtype)
    update(engine, 9, dropout=True)  # another state, to be replaced completely
    engine.load_state(here / "state")
    if engine.rank == 0:
        save_file(state(engine), here / f"loaded.{engine.world_size}")
    else:
        state(engine)
    save_file(go_on(engine, dropout=dropout), here / f"resumed.{engine.world_size}.{engine.rank}")
    engine.close()


def same_as_deepspeed(engine: DeepSpeedEngine, folder: Path) -> None:
    """Published weights are DeepSpeed's own consolidation, byte for byte: in memory, and from its checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed = engine._engine
    published = dict(engine.iter_weights())
    if engine.stage == 3:
        whole = deepspeed._zero3_consolidated_16bit_state_dict()
        if engine.rank == 0:
            same_bytes(published, {name: whole[name] for name in published})
    deepspeed.save_checkpoint(str(folder), tag="x", save_latest=True)
    if engine.rank == 0:
        consolidated = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        # at some stages their tool leaves frozen parameters out
        names = [name for name in published if not name.startswith("fixed.") or name in consolidated]
        of = {name: consolidated[name].to(published[name].dtype) for name in names}
        same_bytes({name: published[name] for name in names}, of)
    torch.distributed.barrier()


def same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor.cpu())]
        assert torch.equal(*raw), name


# ---- tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """What one and two ranks trained and saved, and what two and three made of it."""
    where = tmp_path_factory.mktemp("state")
    for name in ("one", *(name_of(stage, dtype) for stage, dtype in KINDS)):
        (where / name).mkdir()
    engine = start(2, "bfloat16")
    for number in (1, 2):
        update(engine, number)
    engine.start_ema()
    engine.save_state(where / "one" / "state")
    engine.close()
    zygote.run_ranks(__file__, ["two", str(where)], where, 2)
    zygote.run_ranks(__file__, ["three", str(where)], where, 3)
    return where


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_the_same_ranks_at_the_same_stage_go_on_bit_for_bit(folder: Path, stage: int, dtype: str) -> None:
    here = folder / name_of(stage, dtype)
    for rank in range(2):
        same_bytes(load_file(here / f"resumed.2.{rank}"), load_file(here / f"went_on.{rank}"))
    drawn = [load_file(here / f"went_on.{rank}")["random"] for rank in range(2)]
    assert not torch.equal(*drawn), "each rank draws for itself"


def saved_values(here: Path) -> dict[str, torch.Tensor]:
    """What the files say, read by themselves."""
    index = json.loads((here / "state" / "state.json").read_text())
    return {
        f"{key}/{name}": load_file(here / "state" / file)[name]
        for key, files in index["files"].items()
        for name, file in files.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_any_ranks_at_any_stage_take_up_the_same_values(folder: Path, stage: int, dtype: str) -> None:
    here = folder / name_of(stage, dtype)
    expected = saved_values(here)
    assert {key.split("/")[1] for key in expected} == {
        "first.weight",
        "first.bias",
        "second.weight",
        "head.weight",
        "head.bias",
    }
    for ranks in (2, 3):
        same_bytes(load_file(here / f"loaded.{ranks}"), expected)
    engine = start(stage, dtype)
    engine.load_state(here / "state")
    same_bytes(state(engine), expected)
    for name, weight in engine.iter_weights():
        if f"master/{name}" in expected:
            same_bytes({name: weight}, {name: expected[f"master/{name}"].to(weight.dtype)})
    assert_close(load_file(here / "resumed.3.0"), go_on(engine, dropout=False), dtype)


@pytest.mark.slow
def test_two_ranks_take_up_what_one_saved_at_another_stage(folder: Path) -> None:
    here = folder / "one"
    same_bytes(load_file(here / "loaded.2"), saved_values(here))
    engine = start(3, "bfloat16")
    engine.load_state(here / "state")
    assert_close(load_file(here / "resumed.2.0"), go_on(engine, dropout=False), "bfloat16")


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: str) -> None:
    """The same data on other ranks: only the order of additions differs."""
    assert found.keys() == expected.keys()
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    for key in found.keys() - {"random"}:
        torch.testing.assert_close(found[key], expected[key], **close, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_sends_what_it_keeps_and_reads_it_at_resume(tmp_path: Path, zygote: Zygote, ranks: int) -> None:
    zygote.run_ranks(__file__, ["read", str(tmp_path)], tmp_path, ranks)
    whole = sum(p.numel() * 4 for p in Net().parameters() if p.requires_grad)
    rows = 7 * 7 * 4
    """A rank's first and last row, of at most 7 numbers each, in each of at most 7 parameters."""
    for stage in (2, 3):
        found = [json.loads((tmp_path / f"read.{stage}.{ranks}.{rank}").read_text()) for rank in range(ranks)]
        assert max(read["sent"] for read in found) <= 3 * (whole / ranks + rows), "master weights and two moments"
        for key in ("exp_avg", "exp_avg_sq", "master"):
            if (key, stage) == ("master", 2):
                assert {read[key] for read in found} == {whole}, "each rank has the whole model in its forward pass"
                continue
            assert max(read[key] for read in found) <= whole / ranks + rows
            assert sum(read[key] for read in found) >= whole


def test_saved_buffers_return_and_others_stay(tmp_path: Path) -> None:
    engine = start(0, "float32")
    engine.module.shift.fill_(3.0)
    engine.module.passing.fill_(3.0)
    engine.save_state(tmp_path)
    other = start(0, "float32")
    other.load_state(tmp_path)
    assert other.module.shift.tolist() == [3.0] * 3
    assert other.module.passing.tolist() == [1.0] * 2


def test_a_state_before_the_first_update_can_be_saved(tmp_path: Path) -> None:
    engine = start(2, "bfloat16")
    engine.save_state(tmp_path)
    other = start(2, "bfloat16")
    update(other, 1)
    other.load_state(tmp_path)
    assert other.updates == 0
    assert update(other, 1) == update(engine, 1)
    same_bytes(dict(other.iter_weights()), dict(engine.iter_weights()))


def test_a_state_without_the_files_of_the_other_rank_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "VISIBLE_S", 0.1)
    engine, made = start(1, "float32"), state_files.StateFiles.__init__
    checkpoints = checkpoint_files.Checkpoints(tmp_path, keep=2)

    def write(step: int) -> None:
        checkpoints.write({}, step=step, epoch=1, lineage=(), save=engine.save_state, confirm=lambda: None)

    def of_two(self: Any, *parts: Any) -> None:
        made(self, *parts)
        self.ranks = 2  # the other one writes elsewhere

    write(1)
    monkeypatch.setattr(state_files.StateFiles, "__init__", of_two)
    with pytest.raises(checkpoint_files.CheckpointFailed, match="a rank's file is not here"):
        write(2)
    found = checkpoints.load()
    assert found is not None and found.facts["step"] == 1
    assert not [name for name in found.facts["files"] if "planned" in name or "written" in name]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_large_models_are_gathered_in_chunks_and_written_in_files(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(stage, "float32")
    update(engine, 1)
    whole = state(engine, ("master", "exp_avg"))
    monkeypatch.setattr(gather, "CHUNK_BYTES", 100)
    monkeypatch.setattr(state_files, "FILE_BYTES", 100)
    same_bytes(state(engine, ("master", "exp_avg")), whole)
    engine.save_state(tmp_path)
    assert len(list(tmp_path.glob("master.00000.*"))) > 2
    other = start(stage, "float32")
    other.load_state(tmp_path)
    same_bytes(state(other, ("master", "exp_avg")), whole)


def test_files_that_cannot_be_written_are_an_os_error(tmp_path: Path) -> None:
    engine = start(1, "float32")
    (tmp_path / "exp_avg.00000.000.safetensors").mkdir()
    with pytest.raises(OSError, match=r"exp_avg\.00000"):
        engine.save_state(tmp_path)
    assert not (tmp_path / "state.json").exists()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        engine.save_state(tmp_path / "file")
    engine.save_state(tmp_path / "folder")


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16")])
def test_a_snapshot_is_written_bit_for_bit_as_save_state_would_although_training_goes_on(
    stage: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_files, "FILE_BYTES", 100)
    engine = start(stage, dtype)
    engine.start_ema()
    for number in (1, 2):  # the second in the memory of the first
        update(engine, number)
        engine.save_state(tmp_path / f"saved{number}")
        write = engine.snapshot_state(tmp_path / f"written{number}")
        update(engine, number + 2)
        engine.update_ema(0.5)
        engine.module.shift.add_(1.0)
        torch.rand(3)
        write()
        content = {p.name: p.read_bytes() for p in (tmp_path / f"written{number}").iterdir()}
        assert content == {p.name: p.read_bytes() for p in (tmp_path / f"saved{number}").iterdir()}
        assert len(content) > 10
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        engine.snapshot_state(tmp_path / "file")()


def test_an_average_begins_on_request(tmp_path: Path) -> None:
    engine = start(2, "float32")
    update(engine, 1)
    engine.save_state(tmp_path)
    other = start(2, "float32")
    other.start_ema()
    other.load_state(tmp_path)
    average = state(other, ("ema",))
    same_bytes(average, {f"ema/{name}": t for name, t in engine.iter_state("master")})


def test_damage_is_named(tmp_path: Path) -> None:
    engine = start(1, "float32")
    engine.save_state(tmp_path / "good")
    shard = "exp_avg.00000.000.safetensors"

    def refusal(name: str, content: bytes | None) -> UserError:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        (tmp_path / "bad" / name).unlink()
        if content is not None:
            (tmp_path / "bad" / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            engine.load_state(tmp_path / "bad")
        assert name in caught.value.render()
        return caught.value

    for file in (shard, "state.json", "buffers.safetensors", "random.00000.safetensors"):
        refusal(file, None)
        refusal(file, b"\x07nonsense")
    whole = load_file(tmp_path / "good" / shard)
    save_file(whole | {"first.bias": torch.zeros(8)}, tmp_path / "wrong")
    assert "first.bias is [8]" in refusal(shard, (tmp_path / "wrong").read_bytes()).why
    index = json.loads((tmp_path / "good" / "state.json").read_text())
    index["shapes"]["first.bias"] = [8]
    (tmp_path / "good" / "state.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="belongs to another model") as caught:
        engine.load_state(tmp_path / "good")
    assert "first.bias is [8] in the checkpoint and [7] in this model" in caught.value.why


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_changes_nothing(stage: int, dtype: str, tmp_path: Path) -> None:
    more = {"offload_optimizer": True, **({"offload_params": True} if stage == 3 else {})}
    engines = [start(stage, dtype), start(stage, dtype, **more)]
    for engine in engines:
        engine.start_ema()
    for number in range(3):
        norms = [float.fromhex(update(engine, number)) for engine in engines]
        assert norms[0] == pytest.approx(norms[1], rel=1e-2 if dtype == "bfloat16" else 1e-5)
        for engine in engines:
            engine.update_ema(TAU)
    rough = {"rtol": 1e-2, "atol": 1e-3} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
    for (name, plain), (_, offloaded) in zip(state(engines[0]).items(), state(engines[1]).items(), strict=True):
        torch.testing.assert_close(offloaded, plain, **rough, msg=lambda m, n=name: f"{n}: {m}")
    engines[1].save_state(tmp_path)
    engines[0].load_state(tmp_path)
    same_bytes(state(engines[0]), state(engines[1]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(os.environ["FORAY_STORE"], int(os.environ["WORLD_SIZE"])),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    {"two": role_two, "three": role_three, "read": role_read}[sys.argv[1]](Path(sys.argv[2]))
    leave_ranks()
