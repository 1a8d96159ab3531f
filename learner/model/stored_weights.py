"""Weights that stay in their safetensors files until a rank reads its part: a model is built without memory for them.

`empty_model` builds the module with placeholders for its parameters, and `StoredWeights.read` copies a range of one
parameter. So a rank of ZeRO stage 3 needs its share of the model and one parameter, not the whole model
(`learner.engine.DeepSpeedEngine`, `learner.trainer.reference.shard`).

transformers may stack what a file keeps separate (experts). Its conversion for saving divides a parameter into the
file's tensors; where they are views of the parameter, copying into the views is the conversion for loading.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of files that `copy_` converts; it would also copy the codes of 8-bit floats, without their scales."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class StoredWeights:
    """The files of one model, and which of their tensors are parts of which parameter of `causal`.

    causal  built by `empty_model`; its parameters are known by identity, because modules around it rename them
    """

    def __init__(self, causal: Any, files: dict[str, Path]) -> None:
        self._causal, self._files = causal, files
        self._names = {id(p): (weakref.ref(p), name) for name, p in causal.named_parameters()}
        self._open: dict[Path, Any] = {}

    @classmethod
    def of(cls, directory: Path, causal: Any) -> StoredWeights | None:
        """Return the weights in `directory`, or None if it has no file for a parameter or buffer of `causal`, one of
        another shape, one that is quantised, or one that must be computed from several tensors.
        """
        stored = cls(causal, _files(directory))
        for name, parameter in causal.named_parameters():
            whole = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format)
            if not stored._covers(name, whole):
                return None
        buffers = {n: b for n, b in causal.state_dict(keep_vars=True).items() if not isinstance(b, torch.nn.Parameter)}
        if not all(stored._covers(name, buffer) for name, buffer in buffers.items()):
            return None
        for name, buffer in buffers.items():
            stored._copy(name, buffer, 0, buffer.numel())
        return stored

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether `parameter` is a placeholder for weights in these files."""
        found = self._names.get(id(parameter))
        return found is not None and found[0]() is parameter  # the id of a freed parameter may occur again

    def read(self, parameter: torch.nn.Parameter, whole: torch.Tensor, start: int, stop: int) -> None:
        """Copy elements [start, stop) of the flattened `parameter` from the files to their places in `whole`.

        whole  contiguous, of the parameter's shape, any dtype and device; other elements may be written too
        """
        self._copy(self._names[id(parameter)][1], whole, start, stop)

    def close(self) -> None:
        """Close the files."""
        self._open.clear()

    def _parts(self, name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the file's names of the parts of a parameter, each with a tensor of its shape."""
        from transformers.core_model_loading import revert_weight_conversion

        with _Views():
            parts: dict[str, torch.Tensor] = revert_weight_conversion(self._causal, {name: whole})
        return parts

    def _covers(self, name: str, whole: torch.Tensor) -> bool:
        parts = self._parts(name, whole)
        return sum(part.numel() for part in parts.values()) == whole.numel() and all(
            saved in self._files
            and (part is whole or part._base is whole)
            and list(part.shape) == self._file(saved).get_slice(saved).get_shape()
            and (self._file(saved).get_slice(saved).get_dtype() in FLOATS) == part.is_floating_point()
            for saved, part in parts.items()
        )

    @torch.no_grad()
    def _copy(self, name: str, whole: torch.Tensor, start: int, stop: int) -> None:
        for saved, part in self._parts(name, whole).items():
            first = part.storage_offset() - whole.storage_offset()
            last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            if last < start or first >= stop:
                continue
            if part.ndim and part.is_contiguous():
                row = max(1, part.stride(0))
                low, high = max(0, start - first) // row, min(len(part), -(-(stop - first) // row))
                part[low:high].copy_(self._file(saved).get_slice(saved)[low:high])
            else:
                part.copy_(self._file(saved).get_tensor(saved))

    def _file(self, saved: str) -> Any:
        path = self._files[saved]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        return self._open[path]


class _Views(TorchFunctionMode):
    """Leave out the copies that make tensors contiguous: transformers 5.19 copies every part for saving."""

    def __torch_function__(self, func: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return given[0] if func is torch.Tensor.contiguous else func(*given, **named or {})


def _files(directory: Path) -> dict[str, Path]:
    """Return tensor name -> file."""
    if (directory / INDEX).is_file():
        found: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        return {name: directory / file for name, file in found.items()}
    if not (directory / SINGLE).is_file():
        return {}
    with safe_open(directory / SINGLE, framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), directory / SINGLE)


def stored_elements(directory: Path) -> int:
    """Return the number of elements of all tensors in the safetensors files in `directory`. Reads their headers."""
    total = 0
    for path in set(_files(directory).values()):
        with safe_open(path, framework="pt", device="cpu") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def empty_model(config: Any, **options: Any) -> Any:
    """Return transformers' causal model of `config`, its buffers computed, its parameters placeholders: one element,
    expanded to the shape. `options` as for `from_config`; dtypes are those of `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.core_model_loading import build_glob_alternation
    from transformers.initialization import no_init_weights

    with _placeholders(), no_init_weights():
        causal = AutoModelForCausalLM.from_config(config, **options)
    if plan := causal._get_dtype_plan(causal.dtype):
        kept, _, _ = build_glob_alternation(list(plan))
        for name, tensor in causal.state_dict(keep_vars=True).items():
            if kept.search(name):
                placeholder = isinstance(tensor, torch.nn.Parameter)
                tensor.data = torch.zeros(()).expand(tensor.shape) if placeholder else tensor.data.float()
    owners = {m: owner for owner in causal.modules() if isinstance(owner, PreTrainedModel) for m in owner.modules()}
    for module, owner in owners.items():
        if module._non_persistent_buffers_set and not module._parameters:
            owner._init_weights(module)  # in float32, as from_pretrained computes them
    causal.tie_weights()
    return causal


@contextmanager
def _placeholders() -> Iterator[None]:
    register, convolution = torch.nn.Module.register_parameter, torch.nn.modules.conv._ConvNd
    reset = convolution.reset_parameters

    def registered(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            nothing = parameter.new_zeros(()).expand(parameter.shape)
            parameter = torch.nn.Parameter(nothing, requires_grad=parameter.requires_grad)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers does not write to it
        register(module, name, parameter)

    torch.nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    convolution.reset_parameters = lambda self: None  # type: ignore[method-assign]  # it writes every element
    try:
        yield
    finally:
        convolution.reset_parameters = reset  # type: ignore[method-assign]
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
