"""DeepSpeed, and the only place that imports it: gradients over ranks, the update, the weights, the saved state.

What DeepSpeed is told not to do: divide by accumulation steps (a batch has as many micro-batches as it needs, and the
loss is already a share of the batch's), build C++ operations while starting, look for MPI, and write to stdout.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, only not in __all__

from learner.config_trainer import TrainerSettings
from learner.optimizer import GuardedAdamW, parameter_groups
from learner.schedule import learning_rate

GATHER_BYTES = 256 << 20
"""ZeRO-3 gathers parameters in chunks of so many bytes: one by one is ten times slower, all at once may not fit."""
TAG = "state"


class Update(NamedTuple):
    """One call of `step`: the norm of the gradient before clipping, and whether it was finite and so applied."""

    grad_norm: float
    applied: bool


class DeepSpeedEngine:
    """One policy under training. `updates` counts the updates that were applied; the learning rate follows it."""

    def __init__(self, module: torch.nn.Module, settings: TrainerSettings, *, total_updates: int, seed: int) -> None:
        self.settings = settings
        self.total_updates = total_updates
        self.updates = 0
        deepspeed = _import_deepspeed()
        join_ranks()
        torch.manual_seed(seed)
        stage = settings.engine.zero_stage
        optimizer = GuardedAdamW(
            parameter_groups(module, settings.optim.weight_decay), settings.optim, guard=stage == 0
        )
        self._deepspeed = deepspeed
        self._engine, *_ = deepspeed.initialize(
            model=module.train(), optimizer=optimizer, config=deepspeed_config(settings), dist_init_required=False
        )
        self._engine.checkpoint_engine.load = _load_without_pickle
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    @property
    def device(self) -> torch.device:
        """Where micro-batches must be."""
        return torch.device(self._engine.device)

    def forward(self, *inputs: Any) -> Any:
        """The module's forward pass, under the present grad mode."""
        return self._engine(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of `loss`, a share of the batch's loss; the shares of all ranks are summed at `step`."""
        # DeepSpeed takes the mean over ranks.
        self._engine.backward(loss * self.world_size)

    def step(self) -> Update:
        """One update with the gradients since the last; none when their norm is not finite, and they are cleared."""
        rate = learning_rate(self.settings.optim, self.updates, self.total_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        applied = not self._engine.optimizer.overflow
        self.updates += applied
        return Update(float("nan") if norm is None else float(norm), applied)

    def reduce(self, sums: list[float], maxima: list[float]) -> tuple[list[float], list[float]]:
        """Element-wise sums and maxima over the ranks."""
        if self.world_size == 1:
            return sums, maxima
        added = torch.tensor(sums, dtype=torch.float64, device=self.device)
        largest = torch.tensor(maxima, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(added)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return added.tolist(), largest.tolist()

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the module, tensor of its own on `device`) of every parameter and saved buffer, shared ones once.

        With ZeRO-3 a collective: every rank must consume it, and every rank gets the whole tensors.
        """
        module: torch.nn.Module = self._engine.module
        named = list(module.named_parameters())
        for chunk in _chunks(named):
            with self._gathered([p for _, p in chunk]):
                copies = [(name, p.detach().to(device, copy=True)) for name, p in chunk]
            yield from copies
        saved = module.state_dict(keep_vars=True).keys() if self.settings.engine.zero_stage < 3 else ()
        for name, buffer in module.named_buffers():
            if name in saved:
                yield name, buffer.detach().to(device, copy=True)

    def _gathered(self, parameters: list[torch.nn.Parameter]) -> Any:
        # Below stage 3 this does nothing.
        return self._deepspeed.zero.GatheredParameters(
            parameters, modifier_rank=None, enabled=self.settings.engine.zero_stage == 3
        )

    def save_state(self, directory: Path) -> None:
        """Write model, optimiser, counters and random state; collective."""
        directory.mkdir(parents=True, exist_ok=True)
        state = {"updates": self.updates, "rng": _random_state()}
        self._engine.save_checkpoint(str(directory), tag=TAG, client_state=state, save_latest=False)

    def load_state(self, directory: Path) -> None:
        """Take up the state that `save_state` wrote, by as many ranks and with the same ZeRO stage; collective."""
        found, state = self._engine.load_checkpoint(str(directory), tag=TAG)
        if found is None:
            raise FileNotFoundError(f"no learner state in {directory}")
        self.updates = state["updates"]
        _restore_random_state(state["rng"])

    def close(self) -> None:
        """Leave the process group."""
        self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def deepspeed_config(settings: TrainerSettings) -> dict[str, Any]:
    """DeepSpeed's own configuration for `settings`."""
    stage = settings.engine.zero_stage
    return {
        "train_micro_batch_size_per_gpu": 1,
        # step() is the boundary, whatever the number of micro-batches before it
        "managed_gradient_accumulation": False,
        # at stage 0 the optimiser clips (learner.optimizer)
        "gradient_clipping": settings.optim.clip_norm if stage else 0.0,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": settings.model.dtype == "bfloat16", "check_grad_overflow": True},
        "steps_per_print": 1 << 40,
    }


def join_ranks() -> None:
    """Join the ranks that a launcher announced in the environment, or be the only one, with no port and no MPI."""
    if torch.distributed.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group(backend)
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asserts that it is set
    torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # It would ask gcc which of its C++ operations can be built, and then build one for minutes to save microseconds.
    deepspeed.ops.__compatible_ops__ = {}
    # Its logger writes to stdout, which belongs to whoever runs us.
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.propagate = True
    # AdamW from torch is on no list of DeepSpeed's, though tests/learner/test_engine.py finds it exact at every stage.
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_scatter_tensor` is deprecated", FutureWarning)
    return deepspeed


def _load_without_pickle(path: str, map_location: Any = None) -> Any:
    """Stands in for DeepSpeed's own loader, which runs whatever code a checkpoint file holds."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)


def _chunks(named: list[tuple[str, torch.nn.Parameter]]) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
    chunk: list[tuple[str, torch.nn.Parameter]] = []
    held = 0
    for name, parameter in named:
        # ZeRO-3 leaves an empty tensor behind and keeps the true size in ds_numel
        size = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if chunk and held + size > GATHER_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append((name, parameter))
        held += size
    if chunk:
        yield chunk


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
