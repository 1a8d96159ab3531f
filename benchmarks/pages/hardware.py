"""Generate docs/hardware.md: every preset on every hardware profile, with the memory needed and there.

    python -m benchmarks.pages.hardware > docs/hardware.md

`tests/deploy/test_hardware.py` compares the page with what this prints, and resolves each pair.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.config import load_config
from deploy.hardware.assign import placement_lines
from deploy.hardware.inventory import HARDWARE, gib
from deploy.hardware.memory import ENGINE_OVERHEAD, USABLE
from deploy.hardware.profiles import PROFILES, Resolved, choices, resolve
from foray.commands.init import PRESETS, presets
from protocol.errors import UserError
from protocol.runtime.config import read_tree

HEAD = f"""# Hardware

<!-- made by `python -m benchmarks.pages.hardware > docs/hardware.md` -->

`foray init` writes a preset for a machine, in at most 40 lines:

```sh
# needs: a model, questions and a built index
foray init run.yaml --preset search_r1_grpo --hardware 8xh100 --model DIR --data FILE --index DIR
foray up run.yaml --dry-run
```

It divides the GPUs between engines and learner, chooses ZeRO stage, offload or adapters by the memory that they need,
and sets timeouts by the size of the model. It refuses a preset that does not fit. **No profile has been run on its
hardware yet:** memory is computed, not measured ([what to report](install.md#report)). On 24 GB only adapters are
trained, with ten times the learning rate.

## Seen on one H100

Commit 5a121135 (micro-batches of 4,096 and one transfer: the commit before) on one H100 80GB, 2026-11-27, driver 580,
with what that machine had: torch 2.11.0+cu130, NCCL 2.28.9, transformers 5.17.0, DeepSpeed 0.19.8, no network and no
SGLang. Weights are random.

| what | seen |
|---|---|
| learner, Qwen2.5-1.5B in bfloat16, 64 trajectories, 17 micro-batches of 8,192 tokens | 10,437 trained tokens/s\
 (31,068 read), 284 TFLOP/s, **MFU .37 of 773 TFLOP/s measured (target .4 missed)**, 53 GiB at most |
| the same with micro-batches of 4,096 tokens, attention span by span | 8,557 trained tokens/s, MFU .31, 41 GiB |
| where the GPU's time goes | attention 15 %, most of the rest elementwise kernels: norms, rotary embedding, \
SwiGLU and casts are not fused |
| `nccl` between two processes, over sockets because they share the GPU | joined in 5 to 6 s, 3.5 and 3.9 GB/s; \
a member killed or hanging is noticed after `stall_s` (10 s), and the next group works |
| flat scan of 21M x 768 float16, 131 candidates | figure `retriever_gpu`: 97 % of the bandwidth for one query, \
10 % of the arithmetic for 2,560 |

SGLang on a GPU, the demo and a run with engines on GPUs have not been run yet.

## Check a machine

`make gpu-check` checks a machine with one NVIDIA GPU in ten stages of minutes, one line each: driver and CUDA toolkit,
both environments, FAISS beside torch, tests on CUDA, SGLang cold and warm with the first `top_p` request and log-probs
against the learner's, the engine contract over HTTP, transfer of weights, learner, retriever, demo. A second call
continues after what has passed. `make gpu-check NET=no` uses the machine's own torch and transformers, and the packages
that `make gpu-carry` put in `.cache/gpu-carry` on a machine with a network; stages whose packages are missing are
skipped. `FORAY_GPU_CHECK=cpu make gpu-check` tries all stages without a GPU.

{{checked}}

## Known costs

Calculated for Qwen2.5-7B on 8 H100, not measured, and left until a GPU can judge a change:

| what | cost | left because |
|---|---|---|
| output layer in float32 chunks | 11 % of a micro-batch | a fused kernel has to be written and compared on a GPU |
| torch's variable-length attention is FlashAttention 2 | 3 % of a step | FlashAttention 3 is not on PyPI; the call is \
chosen by a check at load |
| a pause requeues all requests, which are prefilled again | 8 s of an engine a version | \
`engine.pause_mode: in_place` keeps them, without overlap scheduling |
| first start of SGLang compiles kernels | 2 to 4 minutes once | profiles wait 10 minutes and more; keep `~/.cache` of \
a container |

## Placement

`foray up` gives each process its own GPUs by `CUDA_VISIBLE_DEVICES`: engines first (those for evaluation after the
others), then the learner's ranks, then retrievers; processes that use no GPU see none. It uses the GPUs in its own
`CUDA_VISIBLE_DEVICES` only.
`foray up --dry-run` prints the table, `foray doctor` checks it. It refuses too few GPUs, too little memory, and one GPU
for two processes.

| setting | use |
|---|---|
| `launch.gpus.engines`, `learner`, `retrievers` | choose the GPUs yourself |
| `launch.eval_engines` | engines that serve evaluations only; no profile has any |
| `launch.gpus.others: [7]` | leave GPUs free for a judge, a reward model or an embedding service that you start |
| `launch.gpus.share: true` | engine and learner on one GPU, if their memory fits together |
| `--tp-size`, `--pp-size`, `--dp-size` in `engine.kind.args` | GPUs of one engine |

A retriever gets a GPU if its index or encoder is set to use one, and an encoder with `device: auto` if one is left.
Without an NVIDIA GPU nothing is placed; AMD GPUs are not placed either.

## Memory

`deploy/hardware/memory.py` computes the memory per GPU from config.json and the settings. Activations agree with
torch's memory tracker on fake tensors within 5 %: `tests/deploy/test_memory.py`. Up to {USABLE:.0%} of a GPU is
planned; the rest is for fragmentation and the CUDA context. An engine gets {gib(ENGINE_OVERHEAD)} beside weights and
KV cache. Both are assumptions. `foray doctor` checks main memory: 12 bytes per parameter for snapshots of the state,
12 with `offload_optimizer`, and a copy of the weights where they are broadcast.

## Without a GPU

`--hardware cpu` is for trying a recipe on two cores with a small model
([make one](own-data.md)): the CPU engine, float32, no ZeRO, one minibatch of at most
8 groups. Loss, rewards and prompts are those of the preset.

## Profiles

| profile | GPUs | memory of each | preferred layout |
|---|---|---|---|
"""
CHECKED = Path("docs/figures/gpu-check.json")
"""The stages of `make gpu-check` on a GPU, relative to the checkout."""
PAIRS = """
## Presets on profiles

A cell has engines + learner ranks; GiB on the GPU of an engine, and of a rank; the stage of ZeRO; GiB of main memory
for the learner. An engine takes the rest of its GPU for its cache, if it has its own; on one GPU both share it. Engines
run in `.venv-engine/bin/python` ([install](install.md)). Weights go by `nccl` (never run between two GPUs; files are
its fall-back), where a GPU is shared as files, and as adapters where those are trained.

"""
HOSTS = """
## Several machines

`foray up` starts one machine, and refuses the profiles of more. They show who belongs where; start each process by
itself ([operate](operate.md#start-each-process-yourself)). Qwen2.5-7B with `search_r1_grpo`:
"""


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv: int, rows: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": rows,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _qwen(896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5-1.5B": _qwen(1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen2.5-3B": _qwen(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen2.5-7B": _qwen(3584, 18944, 28, 28, 4, 152064, tied=False),
    "Llama-3.2-3B": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
}
"""config.json of published models, as far as their shape goes."""


def models(preset: str) -> list[str]:
    """Return the preset's own model, and Qwen2.5-3B if that is smaller."""
    own = load_config(PRESETS / f"{preset}.yaml").run.model.name.removesuffix("-Instruct")
    return [own] if own.endswith("3B") else [own, "Qwen2.5-3B"]


def pairs() -> Iterator[tuple[str, str, str]]:
    """Yield (preset, model, profile) of every profile of one machine."""
    for preset in presets():
        for model in models(preset):
            yield from ((preset, model, name) for name, hosts in HARDWARE.items() if len(hosts) == 1)


def on_profile(preset: str, model: str, profile: str, directory: Path, *overrides: str) -> Resolved:
    """Return a preset for `model` on a profile; the model's config.json is written to `directory`. Raises UserError."""
    (directory / "config.json").write_text(json.dumps(SHAPES[model]))
    tree = read_tree(PRESETS / f"{preset}.yaml", [f"run.model={directory}", *overrides])
    return resolve(tree, profile, SHAPES[model])


def page() -> str:
    """Return the page as Markdown."""
    path = Path(__file__).parents[2] / CHECKED
    checked = stage_table(json.loads(path.read_text())) if path.is_file() else ["It has not been run on a GPU yet."]
    out = [HEAD.rstrip("\n").replace("{checked}", "\n".join(checked))]
    for name, hosts in HARDWARE.items():
        first = PROFILES[name][0]
        gpus, memory = sum(len(host.gpus) for host in hosts), gib(hosts[0].gpus[0].memory)
        kind = "adapters, " if first.lora else ""
        shared = ", shared" if first.cache_tokens else ""
        out.append(
            f"| `{name}` | {gpus} | {memory} | {kind}{first.engines} engines, {first.ranks} learner ranks{shared} |"
        )
    one_host = [name for name, hosts in HARDWARE.items() if len(hosts) == 1]
    out += [PAIRS.rstrip("\n"), "", f"| preset | model | {' | '.join(f'`{name}`' for name in one_host)} |"]
    out.append("|---|---" + "|---" * len(one_host) + "|")
    with tempfile.TemporaryDirectory() as folder:
        alike: dict[str, list[str]] = {}
        for preset, model in dict.fromkeys((preset, model) for preset, model, _ in pairs()):
            cells = [model, *(_cell(preset, model, name, Path(folder)) for name in one_host)]
            alike.setdefault(" | ".join(cells), []).append(f"`{preset}`")
        out += [f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()]
        out.append(HOSTS.rstrip("\n"))
        for name in (name for name, hosts in HARDWARE.items() if len(hosts) > 1):
            found = on_profile("search_r1_grpo", "Qwen2.5-7B", name, Path(folder))
            out += ["", f"### {name}", "", "```text", *_by_host(found), "```"]
    return "\n".join(out) + "\n"


def stage_table(kept: Mapping[str, Any]) -> list[str]:
    """Return the stages of `make gpu-check` as a table, with the machine."""
    facts = kept["machine"]
    rows = [
        f"| {name} | {one['result']} | {one['seconds']:.0f} | {one['line'].partition(chr(10))[0].replace('|', '/')} |"
        for name, one in kept["stages"].items()
    ]
    where = f"{facts['date']}, commit {facts['commit']}, {facts['gpu'] or facts['cpu']}:"
    return [where, "", "| stage | result | seconds | figures |", "|---|---|---|---|", *rows]


def _cell(preset: str, model: str, profile: str, folder: Path) -> str:
    """Return how the preset is laid out on the profile, or the memory for which it is refused."""
    try:
        found = on_profile(preset, model, profile, folder)
    except UserError as error:
        return f"**refused**: {error.what.partition('GPU 0: ')[2]}"
    layout = found.layout
    need = {a.need.kind: gib(a.need.memory).removesuffix(" GiB") for a in found.placement.assignments}
    _, stage, _, host = choices(found, SHAPES[model]).values()
    extra = " adapters" if layout.lora else " offloaded" if layout.offload else ""
    return f"{layout.engines} + {layout.ranks}{extra}; {need['engine']}, {need['learner']}; ZeRO {stage}; {host}"


def _by_host(found: Resolved) -> Iterator[str]:
    """Yield the placement, with the engines of a host in one line."""
    header, *lines = placement_lines(found.placement, {})
    yield header
    engines: dict[str, list[str]] = {}
    for line in lines:
        name, host, *_ = line.split(maxsplit=3)
        if name.startswith("engine-"):
            engines.setdefault(host, []).append(name)
    for line in lines:
        name, host, *_ = line.split(maxsplit=3)
        held = engines.get(host, [])
        if name not in held:
            yield line
        elif name == held[0]:
            yield line + (f"  (to {held[-1]} on GPU {len(held) - 1}, one GPU each)" if len(held) > 1 else "")


if __name__ == "__main__":
    print(page(), end="")
