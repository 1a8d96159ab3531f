"""Run by SGLang's Python: give published tensors to SGLang's own `load_weights`, without a server and without a kernel.

    python sglang_loaders.py DIRECTORY...

Each directory has the config.json of a model and `published.safetensors`. Prints one line of JSON for each: the model's
class and the digests of `numbers_of` its parameters, or the error.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

LAUNCHER = Path(__file__).parents[3] / "requirements" / "sglang_cpu_launch.py"
PUBLISHED = "published.safetensors"
FLAGS = ("--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init", "--disable-radix-cache")
BACKENDS = {"GptOssForCausalLM": "triton"}
KERNELS = (
    *("fused_sigmoid_mul", "fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate", "fused_input_proj"),
    "fused_qkvzba_split_reshape_cat_contiguous",
)
"""CPU kernels that SGLang's qwen3_5.py looks up at import."""
_LAYER, _EXPERT = re.compile(r"\blayers\.(\d+)\."), re.compile(r"\bexperts\.(\d+)\.")
_STACKED = re.compile(r"\.experts\.\w+$|_linear\.weight$")


def numbers_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the digests of the different numbers of each layer, and of each expert of a layer.

    Without Mamba's A_log, which SGLang keeps as A = -exp(A_log)."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, tensor in tensors:
        if name.endswith((".A_log", ".mamba.A", ".mixer.A")):
            continue
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        key = f"layer {layer[1]}" if layer else "other"
        if expert is None and _STACKED.search(name) and tensor.ndim > 1:
            for number, part in enumerate(tensor):
                found[f"{key} expert {number}"].append(part)
        else:
            found[f"{key} expert {expert[1]}" if expert else key].append(tensor)
    return {key: _digest(parts) for key, parts in found.items()}


def _digest(parts: list[torch.Tensor]) -> str:
    numbers = np.unique(np.concatenate([part.detach().float().flatten().numpy() for part in parts]))
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


class Loaders:
    """SGLang's model classes in one process, of one rank, without a server."""

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("sglang_cpu_launch", LAUNCHER)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        self._kernels = torch.library.Library("sgl_kernel", "FRAGMENT")
        for name in KERNELS:
            self._kernels.define(f"{name}_cpu(Tensor x) -> Tensor")
        self._groups = False

    def load(self, directory: Path) -> dict[str, Any]:
        """Build the model of `directory` full of NaN, and load what was published."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import _initialize_model
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        config = self._config(directory)
        with set_default_torch_dtype(torch.float32), torch.device("cpu"):
            model = _initialize_model(config, LoadConfig())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
            model.load_weights(iter(load_file(directory / PUBLISHED).items()))
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
        loaded = [*model.named_parameters(), *biases]
        left = [name for name, tensor in loaded if tensor.isnan().any()]
        return {"class": type(model).__name__, "left": left, "numbers": numbers_of(loaded)}

    def _config(self, directory: Path) -> Any:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
        from sglang.srt.runtime_context import get_parallel, publish
        from sglang.srt.server_args import prepare_server_args

        (kind,) = json.loads((directory / "config.json").read_text())["architectures"]
        backend = BACKENDS.get(kind, "torch_native")  # any: nothing is computed
        args = prepare_server_args(["--model-path", str(directory), "--attention-backend", backend, *FLAGS])
        publish(args, role="scheduler")
        config = ModelConfig.from_server_args(args)
        if not self._groups:
            store = (directory / "store").resolve().as_uri()
            init_distributed_environment(
                backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=store
            )
        sizes = (
            "pp_size",
            "attn_dp_size",
            "attn_tp_size",
            "attn_dcp_size",
            "moe_ep_size",
            "moe_dp_size",
            "moe_tp_size",
        )
        ranks = ("tp_rank", "pp_rank", "attn_dp_rank", "attn_tp_rank", "attn_cp_rank", "moe_ep_rank", "moe_tp_rank")
        one_rank = dict.fromkeys(sizes, 1) | dict.fromkeys((*ranks, "moe_dp_rank"), 0)
        get_parallel().override_permanently(**one_rank)
        if not self._groups:
            initialize_model_parallel()
            self._groups = True
        initialize_dp_attention_flags(args)
        return config


def main() -> None:
    """Print the line of each directory."""
    loaders = Loaders()
    for directory in map(Path, sys.argv[1:]):
        try:
            line = loaders.load(directory)
        except Exception as error:
            line = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps({"model": directory.name, **line}), flush=True)


if __name__ == "__main__":
    main()
