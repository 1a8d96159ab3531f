"""LoRA adapters of the CPU engine against transformers with the adapter merged into the weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from rollout_server.cpu_engine.config import EngineSettings
from rollout_server.cpu_engine.model.loader import WeightsError
from rollout_server.cpu_engine.model.lora import Adapter, read_adapter
from rollout_server.cpu_engine.scheduler.request import Request, SamplingParams
from rollout_server.cpu_engine.scheduler.scheduler import Scheduler, one_of
from rollout_server.cpu_engine.server.app import build_app, build_engine

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = list(range(20, 50))


@pytest.fixture(scope="module", params=["qwen2", pytest.param("qwen3", marks=pytest.mark.slow)])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    common = {**SIZES, **HEADS, "initializer_range": 0.2, "eos_token_id": 0}
    if request.param == "qwen2":
        Qwen2ForCausalLM(Qwen2Config(**common)).save_pretrained(path)
    else:
        Qwen3ForCausalLM(Qwen3Config(**common, head_dim=16)).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def write_adapter(path: Path, base: Path, seed: int, modules: tuple[str, ...] = MODULES, **config: Any) -> Path:
    """Rank 3, alpha 6, large enough to change every log-prob."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith(tuple(f".{module}.weight" for module in modules)):
            at = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{at}.lora_A.weight"] = torch.randn(3, weight.shape[1], generator=generator) * 0.2
            tensors[f"{at}.lora_B.weight"] = torch.randn(weight.shape[0], 3, generator=generator) * 0.2
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(modules), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(given | config))
    return path


def merged(base: Path, adapter: Path | None, scale: float = 2.0) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tensors = load_file(adapter / "adapter_model.safetensors") if adapter else {}
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[name.replace("lora_A", "lora_B")]
                model.get_parameter(f"{module}.weight").add_(scale * b @ a)
    return model


def scheduler(base: Path, **settings: Any) -> Scheduler:
    return build_engine(EngineSettings(model_path=base, **settings))[0].scheduler


def load(s: Scheduler, path: Path) -> Adapter:
    return read_adapter(path.name, path, s.runner.model.weights)


def request(ids: list[int], tokens: int, adapter: Adapter | None, seed: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    key = str(adapter.number) if adapter else ""
    fields: dict[str, Any] = {"return_logprob": True, "adapter": adapter, "extra_key": key}
    return Request(f"r{seed}", ids, params, seed, tokens, lambda *_: None, **fields)


def run(s: Scheduler, requests: list[Request] | None = None, steps: int = 10_000) -> None:
    for r in requests or []:
        s.submit(r)
    with torch.inference_mode():
        while (s.running or s.waiting) and steps:
            s.step()
            steps -= 1


def check(model: Any, r: Request, tolerance: float = 2e-4) -> None:
    ids = r.prompt_ids + r.output_ids
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    expected = logprobs[len(r.prompt_ids) - 1 : -1].gather(1, torch.tensor(r.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=tolerance, rtol=0)


def test_requests_of_one_batch_use_different_adapters_and_none(base: Path, tmp_path: Path) -> None:
    paths = [None, write_adapter(tmp_path / "a", base, 1), write_adapter(tmp_path / "b", base, 2)]
    s, policies = scheduler(base), [merged(base, path) for path in paths]
    adapters = [path and load(s, path) for path in paths]
    requests = [request(PROMPT[: 3 + 2 * i], 10 + 3 * i, adapters[i % 3], i) for i in range(9)]
    run(s, requests)
    for i, r in enumerate(requests):
        check(policies[i % 3], r)
    with pytest.raises(AssertionError):
        check(policies[0], requests[1])


@pytest.mark.parametrize("modules", [("q_proj",), ("v_proj", "up_proj"), ("o_proj", "down_proj")], ids=str)
def test_an_adapter_of_some_modules_leaves_the_others(base: Path, tmp_path: Path, modules: tuple[str, ...]) -> None:
    path = write_adapter(tmp_path / "some", base, 3, modules)
    s = scheduler(base)
    r = request(PROMPT, 20, load(s, path))
    run(s, [r])
    check(merged(base, path), r)


def test_a_rank_stabilised_adapter_is_scaled_by_the_root_of_its_rank(base: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "rs", base, 4, use_rslora=True)
    s = scheduler(base)
    r = request(PROMPT, 20, load(s, path))
    run(s, [r])
    check(merged(base, path, scale=6 / 3**0.5), r)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
FURTHER: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "phi3": (Phi3Config, {"pad_token_id": 0}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "olmo2": (Olmo2Config, {}, MODULES),
    "smollm3": (SmolLM3Config, {"pad_token_id": 0, "no_rope_layer_interval": 2}, MODULES),
    "granite": (GraniteConfig, {"residual_multiplier": 0.4, "logits_scaling": 3.0}, MODULES),
    "gemma3": (Gemma3TextConfig, {"head_dim": 16, "query_pre_attn_scalar": 24}, MODULES),
    "qwen3_moe": (Qwen3MoeConfig, MOE, MODULES[:4]),
    "olmoe": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}, MODULES[:4]),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}, MODULES[:4]),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {**MOE, "shared_expert_intermediate_size": 24},
        (*MODULES[:4], *(f"shared_expert.{name}" for name in MODULES[4:])),
    ),
    "granitemoe": (GraniteMoeConfig, {"num_local_experts": 4, "residual_multiplier": 0.4}, MODULES[:4]),
}


@pytest.mark.parametrize("family", FURTHER)
def test_adapters_of_the_other_families(base: Path, tmp_path: Path, family: str) -> None:
    config, extra, modules = FURTHER[family]
    AutoModelForCausalLM.from_config(config(**SIZES, **HEADS, **extra, initializer_range=0.2)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    s = scheduler(tmp_path)
    path = write_adapter(tmp_path / "adapter", tmp_path, 3, modules)
    r = request(PROMPT, 20, load(s, path))
    run(s, [r])
    check(merged(tmp_path, path), r)
    if family == "qwen3_moe":
        with pytest.raises(WeightsError, match="experts are not supported"):
            load(s, write_adapter(tmp_path / "experts", tmp_path, 3, ("gate_proj",)))


def test_a_prefix_is_shared_under_one_adapter_only(base: Path, tmp_path: Path) -> None:
    s = scheduler(base)
    a, b = (load(s, write_adapter(tmp_path / name, base, seed)) for seed, name in enumerate("ab"))
    policies = {a: merged(base, a.path), b: merged(base, b.path), None: merged(base, None)}
    for adapter, cached in ((a, False), (b, False), (None, False), (a, True), (b, True), (None, True)):
        r = request(PROMPT, 8, adapter)
        run(s, [r])
        assert (r.cached_tokens > 0) is cached
        check(policies[adapter], r)


def test_rows_move_and_requests_return_with_their_adapter(base: Path, tmp_path: Path) -> None:
    s = scheduler(base)
    adapter = load(s, write_adapter(tmp_path / "a", base, 5))
    owners = [adapter if i % 2 else None for i in range(12)]
    requests = [request(PROMPT[: 5 + i], 30, owner, i) for i, owner in enumerate(owners)]
    run(s, requests, steps=6)
    with torch.inference_mode():
        s.abort(one_of(requests[:3]))
    run(s, steps=3)
    with torch.inference_mode():
        s.retract_all()
    run(s)
    policies = {True: merged(base, adapter.path), False: merged(base, None)}
    for r, owner in zip(requests, owners, strict=True):
        check(policies[owner is not None], r)


def test_a_prompt_in_several_chunks_goes_through_its_adapter(base: Path, tmp_path: Path) -> None:
    s = scheduler(base)
    adapter = load(s, write_adapter(tmp_path / "a", base, 6))
    long = [(31 * i + i * i) % 96 + 1 for i in range(1300)]
    requests = [request(PROMPT, 8, None), request(long, 6, adapter, 1)]
    run(s, requests)
    check(merged(base, None), requests[0])
    check(merged(base, adapter.path), requests[1])


def spoil(path: Path, kind: str) -> None:
    file, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    tensors, settings = load_file(file), json.loads(config.read_text())
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    if kind == "one of two":
        del tensors[name]
    elif kind == "shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif kind == "ranks differ":
        tensors[name] = tensors[name][:-1].contiguous()
    elif kind == "not finite":
        tensors[name][0, 0] = float("inf")
    elif kind == "no layer of ours":
        tensors[name.replace("layers.1", "layers.7")] = tensors[name].clone()
    elif kind == "embedding":
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(3, 97)
    elif kind == "nothing":
        tensors = {}
    elif kind == "dora":
        settings["use_dora"] = True
    elif kind == "ranks by module":
        settings["rank_pattern"] = {"q_proj": 5}
    elif kind == "no rank":
        del settings["r"]
    save_file(tensors, file)
    config.write_text(json.dumps(settings))
    if kind == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    if kind == "no file":
        file.unlink()
    if kind == "no json":
        config.write_text("{")


FAULTS = ("one of two", "shape", "ranks differ", "not finite", "no layer of ours", "embedding", "nothing", "dora")
FAULTS += ("ranks by module", "no rank", "cut off", "no file", "no json")


@pytest.mark.parametrize("kind", FAULTS)
def test_an_adapter_that_cannot_be_used_is_refused(base: Path, tmp_path: Path, kind: str) -> None:
    path = write_adapter(tmp_path / "bad", base, 0)
    spoil(path, kind)
    with pytest.raises(WeightsError, match=r"adapter|safetensors"):
        load(scheduler(base), path)


@pytest.mark.slow
async def test_adapters_are_loaded_named_and_unloaded_over_http(base: Path, tmp_path: Path) -> None:
    settings = EngineSettings(model_path=base, weight_version="1.0")
    engine, tokenizer, config = build_engine(settings)
    engine.start()
    app = build_app(engine, tokenizer, config, settings, ("", ""))
    try:
        async with TestClient(TestServer(app)) as client:
            await adapters_over_http(client, base, tmp_path)
    finally:
        await asyncio.to_thread(engine.stop)


async def by_model_name(client: TestClient[Any, Any], base: Path, adapters: dict[str, Path]) -> None:
    """OpenAI's routes name an adapter as the model."""
    sampling = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    for name, policy in {"a": adapters["a"], f"{base.name}:b": adapters["b"], base.name: None}.items():
        async with client.post("/v1/completions", json={"model": name, "prompt": PROMPT, **sampling}) as answer:
            assert answer.status == 200, await answer.text()
            columns = (await answer.json())["choices"][0]["logprobs"]
        with torch.inference_mode():
            logits = merged(base, policy)(torch.tensor([PROMPT])).logits[0, -1]
        best = torch.log_softmax(logits, -1).max(-1)
        assert columns["tokens"][0] == f"w{int(best.indices)}"
        assert columns["token_logprobs"][0] == pytest.approx(float(best.values), abs=2e-4)
    async with client.post("/v1/completions", json={"model": "c", "prompt": PROMPT}) as answer:
        assert answer.status == 404
    cards = {card["id"]: card for card in (await (await client.get("/v1/models")).json())["data"]}
    assert {name: (card["root"], card["parent"]) for name, card in cards.items()} == {
        base.name: (str(base), None),
        **{name: (str(path), base.name) for name, path in adapters.items()},
    }
    assert await (await client.get("/v1/models/a")).json() == cards["a"]


async def adapters_over_http(client: TestClient[Any, Any], base: Path, tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", base, 1), write_adapter(tmp_path / "two", base, 2)

    async def call(path: str, status: int, **body: Any) -> Any:
        async with client.post(path, json=body) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def generate(names: Any, status: int = 200, tokens: int = 12) -> Any:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        prompts = [PROMPT] * len(names) if isinstance(names, list) else PROMPT
        fields = {"return_logprob": True, "sampling_params": sampling, "lora_path": names}
        return await call("/generate", status, input_ids=prompts, **fields)

    def matches(answer: Any, policy: Path | None) -> None:
        r = request(PROMPT, 0, None)
        r.output_ids = answer["output_ids"]
        r.output_logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        check(merged(base, policy), r)
        assert {span["version"] for span in answer["meta_info"]["weight_versions"]} == {"1.0"}

    assert "never been loaded" in (await generate("a", 400))["message"]
    loaded = await call("/load_lora_adapter", 200, lora_name="a", lora_path=str(one))
    assert loaded == {"success": True, "error_message": None, "loaded_adapters": {"a": str(one)}}
    again = await call("/load_lora_adapter", 400, lora_name="a", lora_path=str(two))
    assert again["success"] is False and "already" in again["error_message"]
    missing = await call("/load_lora_adapter", 400, lora_name="x", lora_path=str(tmp_path / "nowhere"))
    assert "cannot read" in missing["error_message"] and missing["loaded_adapters"] == {"a": str(one)}
    await call("/load_lora_adapter", 200, lora_name="b", lora_path=str(two))
    for answer, policy in zip(await generate(["a", None, "b"]), (one, None, two), strict=True):
        matches(answer, policy)
    await by_model_name(client, base, {"a": one, "b": two})
    long = asyncio.create_task(generate("a", tokens=600))
    await asyncio.sleep(0.1)
    await call("/unload_lora_adapter", 200, lora_name="a")
    await call("/unload_lora_adapter", 400, lora_name="a")
    await generate("a", 400)
    await call("/load_lora_adapter", 200, lora_name="a", lora_path=str(two))
    fresh = await generate("a")
    assert fresh["meta_info"]["cached_tokens"] == 0  # another adapter of the same name
    matches(fresh, two)
    matches(await long, one)
    for wrong in (7, ["a", "b"], {"name": "a"}):
        async with client.post("/generate", json={"input_ids": PROMPT, "lora_path": wrong}) as answer:
            assert answer.status == 400
