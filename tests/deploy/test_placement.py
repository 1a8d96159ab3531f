"""GPUs of the processes: assignment, refusals, the environment of each process, and what doctor and `up` say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.pages.hardware import SHAPES
from deploy.config import Hardware, RunConfig, load_config
from deploy.doctor import engine as doctor_engine
from deploy.doctor.engine import gpus
from deploy.hardware import run as placed
from deploy.hardware.assign import EngineArgs, Placement, needs, place
from deploy.hardware.inventory import HARDWARE, Gpu, Host, this_machine, visible
from deploy.hardware.memory import USABLE
from deploy.launch.plan import plan
from deploy.run.addresses import Addresses
from foray.cli import main
from foray.commands.init import PRESETS
from protocol.errors import UserError

EIGHT = HARDWARE["8xh100"]
SEVEN_B, THREE_B = SHAPES["Qwen2.5-7B"], SHAPES["Qwen2.5-3B"]
ADDRESSES = Addresses("redis://db:6379/0", None)


def recipe(*overrides: str) -> RunConfig:
    return load_config(PRESETS / "search_r1_grpo.yaml", ["run.dir=/r", *overrides])


def assigned(config: RunConfig, hosts: Sequence[Host] = EIGHT) -> Placement:
    return place(config, hosts, needs(config, SEVEN_B))


def devices(placement: Placement) -> dict[str, str]:
    return {
        a.need.name: f"{a.host}{':' if a.host else ''}{','.join(gpu.id for gpu in a.gpus)}"
        for a in placement.assignments
    }


def refusal(config: RunConfig, hosts: Sequence[Host] = EIGHT) -> str:
    with pytest.raises(UserError) as caught:
        assigned(config, hosts)
    assert caught.value.todo
    return caught.value.render()


def test_engines_come_first_and_then_the_ranks() -> None:
    found = assigned(recipe("launch.engines=4", "launch.learner_ranks=4"))
    assert devices(found) == {"engine-1": "0", "engine-2": "1", "engine-3": "2", "engine-4": "3", "learner": "4,5,6,7"}
    assert found.left == 0


def test_engines_for_evaluation_get_gpus_after_the_other_engines() -> None:
    config = recipe("launch.engines=2", "launch.eval_engines=1", "launch.learner_ranks=4")
    found = assigned(config)
    assert devices(found) == {"engine-1": "0", "engine-2": "1", "eval-engine-1": "2", "learner": "3,4,5,6"}
    memory = {a.need.name: a.need.memory for a in found.assignments}
    assert memory["eval-engine-1"] == memory["engine-1"] > 0
    listed = recipe("launch.engines=1", "launch.eval_engines=1", "launch.learner_ranks=4", "launch.gpus.engines=[6,7]")
    assert devices(assigned(listed)) == {"engine-1": "6", "eval-engine-1": "7", "learner": "0,1,2,3"}
    text = refusal(recipe("launch.engines=4", "launch.eval_engines=1", "launch.learner_ranks=4"))
    assert "the run needs 9 GPUs, 8 are there" in text and "eval-engine-1 1" in text and "launch.eval_engines" in text
    text = refusal(recipe("launch.engines=0", "launch.eval_engines=1", "engine.kind.args=[--base-gpu-id, '1']"))
    assert "--base-gpu-id" in text


def test_an_engine_is_as_wide_as_its_arguments_say() -> None:
    args = "[--tp-size, '2', --mem-fraction-static, '0.8']"
    config = recipe("launch.engines=2", "launch.learner_ranks=3", f"engine.kind.args={args}")
    assert devices(assigned(config)) == {"engine-1": "0,1", "engine-2": "2,3", "learner": "4,5,6"}
    widths = {
        "--tp 4": 4,
        "--tp-size=2 --pp-size 2": 4,
        "--dp-size 2 --tp-size 2": 4,
        "--dp-size 2 --tp-size 2 --enable-dp-attention": 2,
        "--device cpu": 0,
        "--attention-backend triton": 1,
    }
    assert {text: EngineArgs.of(text.split()).gpus for text in widths} == widths
    with pytest.raises(UserError, match="not a valid command line"):
        EngineArgs.of(["--tp-size", "two"])


def test_every_process_sees_its_own_gpus_and_no_others() -> None:
    config = recipe("launch.engines=2", "launch.learner_ranks=4", "launch.env={CUDA_VISIBLE_DEVICES: '0', A: b}")
    specs = plan(config, ADDRESSES, python="py", resolved=Path("/r/x"), placement=assigned(config))
    shown = {spec.name: spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs}
    ranks = {"learner": "2", "learner-rank-1": "3", "learner-rank-2": "4", "learner-rank-3": "5"}
    assert shown == {"retriever-1": "", "engine-1": "0", "engine-2": "1", "rollout-1": "", **ranks}
    assert all(spec.env["A"] == "b" for spec in specs)


def test_without_gpus_no_environment_changes() -> None:
    config = recipe("launch.engines=4", "launch.learner_ranks=4")
    found = place(config, [Host(())], needs(config, SEVEN_B))
    assert not found.gpus and found.of("learner", "learner").environment == {}
    specs = plan(config, ADDRESSES, python="py", resolved=Path("/r/x"), placement=found)
    assert not any("CUDA_VISIBLE_DEVICES" in spec.env for spec in specs)


def test_only_the_gpus_that_the_caller_sees_are_used() -> None:
    gib = 1 << 30
    assert visible([gib, 2 * gib], None) == (Gpu("0", gib), Gpu("1", 2 * gib))
    assert visible([gib, 2 * gib], "5, GPU-8a") == (Gpu("5", gib), Gpu("GPU-8a", 2 * gib))
    assert visible([gib], "3,-1,4") == (Gpu("3", gib),), "CUDA ignores what follows an invalid entry"
    assert visible([], "") == ()
    some = [Host(tuple(Gpu(name, 80 * gib) for name in ("2", "GPU-8a")))]
    config = recipe("learner.engine.offload_optimizer=true")
    assert devices(place(config, some, needs(config, THREE_B))) == {"engine-1": "2", "learner": "GPU-8a"}


def test_a_driver_that_is_missing_is_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.hardware.inventory.DRIVER", "libnothing.so.1")
    assert this_machine({"CUDA_VISIBLE_DEVICES": "0,1"}) == ()


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    text = refusal(recipe("launch.engines=6", "launch.learner_ranks=4"))
    assert "the run needs 10 GPUs, 8 are there" in text and "engine-6 1, learner 4" in text


def test_too_little_memory_is_refused_with_the_bytes() -> None:
    text = refusal(recipe("launch.learner_ranks=1"))
    assert (
        "GPU 1: 153.5 GiB needed" in text
        and f"{USABLE * 79.2:.1f} GiB of 79.2 GiB usable" in text
        and "learner" in text
    )


def test_an_overlap_is_refused_unless_sharing_is_set() -> None:
    both = ("launch.gpus.engines=[0]", "launch.gpus.learner=[0,1,2,3]", "launch.learner_ranks=4")
    assert "GPU 0 is in launch.gpus.engines and in launch.gpus.learner" in refusal(recipe(*both))
    assert devices(assigned(recipe(*both, "launch.gpus.share=true")))["learner"] == "0,1,2,3"
    taken = ("launch.gpus.engines=[7]", "launch.gpus.others=[7]", "launch.gpus.share=true")
    assert "GPU 7 is in launch.gpus.others and in launch.gpus.engines" in refusal(recipe(*taken))
    assert "names GPU 8, 8 are there" in refusal(recipe("launch.gpus.learner=[8]"))


def test_gpus_of_other_services_stay_free() -> None:
    config = recipe("launch.engines=2", "launch.learner_ranks=4", "launch.gpus.others=[0,7]")
    found = assigned(config)
    assert devices(found) == {"engine-1": "1", "engine-2": "2", "learner": "3,4,5,6"} and found.left == 0
    assert "needs 8 GPUs, 6 are there" in refusal(
        recipe("launch.engines=4", "launch.learner_ranks=4", "launch.gpus.others=[0,7]")
    )


def test_the_launcher_chooses_the_gpus_not_sglang() -> None:
    assert "--base-gpu-id" in refusal(recipe("launch.learner_ranks=4", "engine.kind.args=[--base-gpu-id, '2']"))


def test_sharing_adds_up_the_memory_of_both() -> None:
    args = "engine.kind.args=[--max-total-tokens, '65536']"
    one = HARDWARE["1xh200"]
    config = recipe(
        "launch.gpus.share=true", args, "learner.engine.offload_optimizer=true", "learner.engine.zero_stage=2"
    )
    assert devices(assigned(config, one)) == {"engine-1": "0", "learner": "0"}
    text = refusal(recipe("launch.gpus.share=true", args, "learner.engine.zero_stage=2"), one)
    assert "engine-1 " in text and "and learner" in text
    assert "needs 2 GPUs, 1 are there" in refusal(recipe(args), one)


def test_a_retriever_gets_a_gpu_if_it_needs_one_or_one_is_left() -> None:
    transformer = "{type: faiss_flat, encoder: {type: transformer}}"
    base = ("launch.engines=2", "launch.learner_ranks=4")
    assert devices(assigned(recipe(*base, f"retriever.index={transformer}")))["retriever-1"] == "6"
    full = recipe("launch.engines=4", "launch.learner_ranks=4", f"retriever.index={transformer}")
    assert "retriever-1" not in devices(assigned(full)) and assigned(full).of(
        "retriever-1", "retriever"
    ).environment == {"CUDA_VISIBLE_DEVICES": ""}
    gpu = "retriever.index={type: faiss_gpu, devices: [0, 1]}"
    assert devices(assigned(recipe(*base, gpu)))["retriever-1"] == "6,7"
    assert "the run needs 9 GPUs" in refusal(recipe("launch.engines=3", "launch.learner_ranks=4", gpu))
    either = recipe(*base, "retriever.index={type: torch_flat}")
    assert devices(assigned(either))["retriever-1"] == "6", "a GPU if one is left, otherwise it searches on the CPU"
    hybrid = "retriever.index={type: hybrid, members: [{type: bm25}, {type: faiss_gpu}]}"
    assert devices(assigned(recipe(*base, hybrid)))["retriever-1"] == "6"


def test_an_engine_does_not_span_machines_and_the_learner_may() -> None:
    two = HARDWARE["2x8xh100"]
    wide = recipe("launch.engines=2", "launch.learner_ranks=6", "engine.kind.args=[--tp-size, '5']")
    found = devices(assigned(wide, two))
    assert (found["engine-1"], found["engine-2"]) == ("host-1:0,1,2,3,4", "host-2:0,1,2,3,4")
    ranks = [a for a in assigned(wide, two).assignments if a.need.name == "learner"]
    assert Counter(a.host for a in ranks for _ in a.gpus) == {"host-1": 3, "host-2": 3}
    text = refusal(recipe("launch.engines=3", "launch.learner_ranks=1", "engine.kind.args=[--tp-size, '5']"), two)
    assert "engine-3 needs 5 GPUs on one machine" in text


def test_an_offloaded_optimizer_gets_the_cores_of_its_rank() -> None:
    def threads(*overrides: str, cores: int = 96) -> tuple[str, str]:
        config = recipe("launch.learner_ranks=4", "launch.threads=2", *overrides)
        specs = {s.name: s for s in plan(config, ADDRESSES, python="py", resolved=Path("/r/x"), cores=cores)}
        return specs["learner"].env["OMP_NUM_THREADS"], specs["engine-1"].env["OMP_NUM_THREADS"]

    assert threads() == ("2", "2")
    assert threads("learner.engine.offload_optimizer=true") == ("24", "2")
    assert threads("learner.engine.offload_optimizer=true", cores=4) == ("2", "2")


def test_a_configured_engine_port_belongs_to_the_first_engine() -> None:
    config = recipe("launch.engines=3", "engine.port=30000")
    specs = [s for s in plan(config, ADDRESSES, python="py", resolved=Path("/r/x")) if s.kind == "engine"]
    assert ["engine.port=0" in spec.argv for spec in specs] == [False, True, True]


def on(monkeypatch: pytest.MonkeyPatch, *hosts: Host) -> None:
    monkeypatch.setattr(placed, "this_machine", lambda environ: hosts[0].gpus if hosts else ())
    monkeypatch.setattr(placed, "built_for_cuda", lambda: True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SEVEN_B))
    return tmp_path / "model"


def test_the_doctor_says_who_gets_what(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, *EIGHT)
    config = recipe(f"run.model={model}", "launch.engines=2", "launch.learner_ranks=4")
    (found,) = gpus(config)
    assert (found.verdict, found.detail) == ("ok", "engine-1 0; engine-2 1; learner 2,3,4,5; 2 left")
    (found,) = gpus(recipe(f"run.model={model}", "launch.engines=9"))
    assert found.verdict == "fail" and "10 GPUs, 8 are there" in found.detail and found.fix
    limited = recipe(f"run.model={model}", "launch.env={CUDA_VISIBLE_DEVICES: '4,5'}", "launch.learner_ranks=4")
    (found,) = gpus(limited)
    assert "5 GPUs, 2 are there" in found.detail


def test_the_doctor_refuses_a_profile_without_gpus_and_one_of_several_machines(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch)
    (found,) = gpus(recipe(f"run.model={model}", "launch.hardware=8xh100", "launch.learner_ranks=4"))
    assert found.verdict == "fail" and "no NVIDIA GPU was found" in found.detail
    (found,) = gpus(recipe(f"run.model={model}", "launch.hardware=2x8xh100"))
    assert found.verdict == "fail" and "`foray up` starts one" in found.detail
    (found,) = gpus(recipe(f"run.model={model}"))
    assert found.verdict == "warn"
    assert list(gpus(load_config(None, [f"run.model={model}"]))) == [], (
        "the CPU engine and a CPU learner go on as before"
    )
    assert {"", *HARDWARE} == set(get_args(Hardware))
    with pytest.raises(UserError, match="8xh100"):
        recipe("launch.hardware=9xh100")


def test_a_learner_whose_torch_has_no_cuda_needs_no_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, *HARDWARE["1xh200"])
    monkeypatch.setattr(placed, "built_for_cuda", lambda: False)
    (found,) = gpus(recipe(f"run.model={model}"))
    assert found.detail == "engine-1 0; 0 left"


def test_the_dry_run_shows_the_table(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    on(monkeypatch)
    path = tmp_path / "run.yaml"
    given = ["launch.hardware=8xh100", "launch.engines=2", "launch.learner_ranks=4", f"run.model={model}"]
    assert main(["init", str(path), "--preset", "search_r1_grpo", f"run.dir={tmp_path}/run", *given]) == 0
    assert main(["up", str(path), "--dry-run", "launch.eval_engines=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# GPUs as on 8xh100"))
    rows = [line.split()[1:3] for line in lines[start + 2 : start + 8]]
    assert rows == [
        ["engine-1", "0"],
        ["engine-2", "1"],
        ["eval-engine-1", "2"],
        ["learner", "3,4,5,6"],
        ["retriever-1", "none"],
        ["rollout-1", "none"],
    ]


def test_the_cpu_engine_serves_a_model_of_hundreds_of_millions_with_a_warning(tmp_path: Path) -> None:
    small = {**THREE_B, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(small))
    found = {f.check: f for f in doctor_engine.engine(load_config(None, [f"run.model={tmp_path}"]))}
    assert found["engine"].verdict == "warn" and "million parameters: slow on the CPU" in found["engine"].detail


def test_the_cpu_engine_is_refused_under_a_model_of_billions_and_with_nccl(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(THREE_B | {"rms_norm_eps": 1e-6, "rope_theta": 1e6}))
    config = load_config(None, [f"run.model={tmp_path}", "learner.publish={type: distributed, backend: nccl}"])
    found = {f.check: f for f in (*doctor_engine.engine(config), *doctor_engine.learner(config))}
    assert (
        found["engine"].verdict == "fail"
        and "million parameters: too large for the CPU engine" in found["engine"].detail
    )
    assert found["learner.publish"].detail == "the backend is nccl, but engine.kind.type is cpu"
    assert found["learner.publish"].verdict == "fail"


def test_nccl_on_a_shared_gpu_and_adapters_on_the_output_layer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(THREE_B))
    share = ["engine.kind.type=sglang", "launch.gpus.share=true", f"run.model={tmp_path}"]
    nccl = load_config(None, [*share, "learner.publish={type: distributed, backend: nccl}"])
    (found,) = [f for f in doctor_engine.learner(nccl) if f.check == "learner.publish"]
    assert found.verdict == "fail" and "share" in found.detail and "type: disk" in found.fix
    for layers, verdicts in (("all", ["fail"]), ("q_proj", [])):
        args = f"engine.kind={{type: sglang, args: [--enable-lora, --lora-target-modules, {layers}]}}"
        bf16 = ["learner.model={dtype: bfloat16, lora: {rank: 4}}", "learner.engine.zero_stage=1"]
        config = load_config(None, [args, *bf16, f"run.model={tmp_path}"])
        assert [f.verdict for f in doctor_engine.learner(config) if f.check == "fp32_lm_head"] == verdicts
