"""Launch the PyPI `sglang` server on a machine without a GPU.

    python requirements/sglang_cpu_launch.py --model-path DIR --device cpu ...

It runs in a separate environment (`sglang_cpu.txt`, `make sglang-env`), so it does not import Foray. It patches the
following before SGLang loads a model, and again in every child process because `spawn` imports this file there:

1. SGLang imports `sgl_kernel` (a wheel of CUDA code) and `torchvision` (whose CPU-less wheel breaks transformers)
   unconditionally. For text models the torch_native path uses names from them but never calls them: placeholder
   modules provide the names and refuse every call.
2. /weights_checker calls `torch.cuda.synchronize` on every device, and LoRA requests pinned memory: both are no-ops
   without CUDA. (For LoRA here: `--enable-lora --lora-backend torch_native`.)
3. transformers uses the class Qwen2Tokenizer, a byte-level BPE, for every config.json with `qwen2`, even if
   tokenizer.json contains another kind of model (the demo's is a table of words): use the file's.
4. On CPUs SGLang pads attention heads for tensor parallelism, and loses the `head_dim` of a Qwen2 if it is not
   hidden_size / heads (as in the demo). One rank needs no padding.

It depends on SGLang's internals: sglang_cpu.txt names the version it is tested with.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# More threads than free cores make small models ten times slower, not faster.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PLACEHOLDERS = frozenset({"sgl_kernel", "torchvision"})


class _PlaceholderType(type):
    """Type of the names in a placeholder module: usable as decorator and base class only."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        raise NotImplementedError(f"{cls.__name__} is not available without a GPU")

    def __getattr__(cls, name: str) -> Any:
        return _placeholder(name)


def _placeholder(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _PlaceholderType.__new__(_PlaceholderType, name, (), {})


class _PlaceholderModule(types.ModuleType):
    """A module that has every public name."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        return _placeholder(name)


class _PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find PLACEHOLDERS and their submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PLACEHOLDERS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def _patch_cuda() -> None:
    import torch

    if torch.cuda.is_available():
        return
    torch.cuda.synchronize = lambda device=None: None
    tensors: Any = torch.Tensor
    tensors.pin_memory = lambda tensor, device=None: tensor
    for name in ("tensor", "zeros", "arange"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _patch_tokenizer() -> None:
    """Make AutoTokenizer use another class if its choice would rebuild the tokenizer as another kind of model."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    choose = AutoTokenizer.from_pretrained

    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        tokenizer = choose(name, *args, **kwargs)
        file = Path(name) / "tokenizer.json"
        if not file.is_file() or not hasattr(tokenizer, "backend_tokenizer"):
            return tokenizer
        kind = json.loads(file.read_text(encoding="utf-8"))["model"].get("type")
        if kind in (None, type(tokenizer.backend_tokenizer.model).__name__):
            return tokenizer
        return PreTrainedTokenizerFast.from_pretrained(name)

    AutoTokenizer.from_pretrained = from_pretrained


def _patch_head_dim() -> None:
    from sglang.srt.configs import update_config

    pad = update_config.adjust_config_with_unaligned_cpu_tp

    def adjust(model_config: Any, load_config: Any, tp_size: int) -> Any:
        return model_config if tp_size == 1 else pad(model_config, load_config, tp_size)

    update_config.adjust_config_with_unaligned_cpu_tp = adjust


_patch_cuda()  # imports torch before the finder is installed, so that torch sees that torchvision is missing
sys.meta_path.insert(0, _PlaceholderFinder())
_patch_tokenizer()
_patch_head_dim()


def main() -> None:
    """Serve until a signal. Leaves no child process behind."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
