"""One module in training: gradients over ranks, the update, the weights, their moving average.

DeepSpeed is configured not to do what the learner does itself. By default it divides by accumulation steps (a batch has
as many micro-batches as it needs, and the loss is already a share of the batch's), builds C++ operations at start,
looks for MPI, and writes to stdout.
"""

from __future__ import annotations

import ctypes
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from learner.config.model import DeepSpeedSettings, OptimSettings
from learner.engine.accelerator import without_gpu
from learner.engine.optimizer import GuardedAdamW, learning_rate, parameter_groups
from learner.engine.partition import EMA, byte_chunks, gathered, partition_of, whole_bytes
from learner.engine.ranks import join_ranks
from learner.engine.state import StateFiles

NEVER = 1 << 40
REDUCE_BUCKET = 500_000_000
"""DeepSpeed's default: elements reduced at a time."""


def import_deepspeed() -> Any:
    """Import DeepSpeed without its start-up output and builds; return the module."""
    without_gpu()
    import deepspeed

    # It would check with gcc which C++ operations can be built, and build one for minutes to save microseconds.
    deepspeed.ops.__compatible_ops__ = {}
    # Its optimiser for stage 1 with bfloat16 collects garbage ten times while starting, to report memory.
    deepspeed.runtime.bf16_optimizer.see_memory_usage = _unseen
    # Its logger writes to stdout, which belongs to the caller.
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)  # its INFO level reports every buffer
    # DeepSpeed does not list torch's AdamW as tested; tests/learner/test_engine.py shows that it is exact at every
    # stage.
    logger.addFilter(_no_gossip)
    warnings.filterwarnings("ignore", "`torch.distributed.[a-z_]+` is deprecated", FutureWarning)
    return deepspeed


def _unseen(*_: object, **__: object) -> None:
    pass


def _no_gossip(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()


def deepspeed_config(optim: OptimSettings, engine: DeepSpeedSettings, dtype: str, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a model with this many parameters.

    `engine.deepspeed` is merged last; the settings refuse conflicting keys.
    """
    stage, low = engine.zero_stage, dtype == "bfloat16"
    pinned = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    # Buckets are allocated in full: gigabytes for a model of megabytes, so that even a fork fails.
    bucket = min(REDUCE_BUCKET, max(1, parameters))
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": engine.overlap_comm, "reduce_bucket_size": bucket}
    if engine.offload_optimizer:
        zero["offload_optimizer"] = pinned
    if engine.offload_params:
        zero["offload_param"] = pinned
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # step() is the boundary, for any number of micro-batches
        "managed_gradient_accumulation": False,
        # at stage 0 the optimiser clips (learner.engine.optimizer)
        "gradient_clipping": optim.clip_norm if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's AdamW for offloaded states must be compiled; torch's has a fast CPU path
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": low, "check_grad_overflow": True},
        "steps_per_print": NEVER,
    }
    if low:
        # Sums of many small bfloat16 gradients lose most of them.
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(made, engine.deepspeed)


def _merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


class OptimizerUpdate(NamedTuple):
    """Result of one `step`: the gradient norm before clipping, whether it was finite and thus applied, and the
    learning rate (of parameters with `lr_scale` 1).
    """

    grad_norm: float
    applied: bool
    lr: float = 0.0


class HeapTrimmer:
    """Gives free pages of the C heap back to the system once it has grown, where the C library is glibc.

    Activations of rows of many lengths fragment glibc's heap, which it shrinks at its end only: a learner on a CPU
    grows by several GiB in a few steps. But the next step has to map and clear the pages again, which takes 5 % of its
    time. So this waits until the process is GROWTH times as large as after the first update since the last time.
    """

    GROWTH = 1.2

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._first_pages = 0

    def after_update(self) -> None:
        """Look at the resident memory, and trim the heap if it has grown."""
        if self._trim is None:
            return
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._first_pages = self._first_pages or pages
        if pages > self.GROWTH * self._first_pages:
            self._trim(0)
            self._first_pages = 0


class DeepSpeedEngine:
    """One module in training. `updates` counts the applied updates and determines the learning rate.

    A process may have several (policy, critic): they share one process group, which `join_ranks` creates and
    `leave_ranks` ends. Methods called collective must be called by every rank, in the same order.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        optim: OptimSettings,
        engine: DeepSpeedSettings,
        dtype: str,
        total_updates: int,
        seed: int,
    ) -> None:
        if dtype == "bfloat16" and engine.zero_stage == 0:
            raise ValueError("bfloat16 needs zero_stage 1, 2 or 3: DeepSpeed's stage 0 uses another optimiser for it")
        self.optim, self.settings, self.total_updates = optim, engine, total_updates
        self.updates = 0
        self.stage: int = engine.zero_stage
        self._deepspeed = import_deepspeed()
        join_ranks()
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.seed = (seed << 16) + self.rank  # different dropout on each rank; RunSettings bounds the seed
        torch.manual_seed(self.seed)
        self._optimizer = GuardedAdamW(
            parameter_groups(module, optim.weight_decay),
            optim,
            guard=self.stage == 0,
        )
        config = deepspeed_config(optim, engine, dtype, sum(p.numel() for p in module.parameters()))
        if self.stage == 3 and getattr(module, "stored", None) is not None:
            _load_shares(self._deepspeed, module, config)
        self._engine, *_ = self._deepspeed.initialize(
            model=module.train(), optimizer=self._optimizer, config=config, dist_init_required=False
        )
        self._partition = partition_of(self._engine.module, self._engine.optimizer, self.stage, self.device)
        self._averages = False
        self._heap = HeapTrimmer()
        self._room: dict[str, torch.Tensor] = {}
        """Main memory of snapshots."""

    @property
    def device(self) -> torch.device:
        """Return the device for micro-batches."""
        return torch.device(self._engine.device)

    @property
    def module(self) -> torch.nn.Module:
        """Return the bare module. At stage 3 its parameters are empty outside a forward pass of the engine."""
        module: torch.nn.Module = self._engine.module
        return module

    def forward(self, *inputs: Any) -> Any:
        """Run the module's forward pass in the current grad mode; at stage 3 collective."""
        return self._engine(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss`, a share of the batch's loss; the shares of all ranks are summed at `step`."""
        # DeepSpeed takes the mean over ranks.
        self._engine.backward(loss * self.world_size)

    def step(self) -> OptimizerUpdate:
        """Update with the accumulated gradients, or skip the update if their norm is not finite; clear them."""
        rate = learning_rate(self.optim, self.updates, self.total_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        applied = not self._engine.optimizer.overflow
        if not applied and self.settings.offload_optimizer and self.stage < 3:
            # DeepSpeed 0.19.8 keeps them here: later gradients would be added to non-finite ones.
            gradients = self._engine.optimizer.averaged_gradients
            gradients.update(dict.fromkeys(gradients))
        self.updates += applied
        if self.device.type == "cpu":
            self._heap.after_update()
        return OptimizerUpdate(float("nan") if norm is None else float(norm), applied, rate)

    def all_reduce_scalars(self, sums: list[float], maxima: list[float]) -> tuple[list[float], list[float]]:
        """Return element-wise sums and maxima over the ranks; collective."""
        if self.world_size == 1:
            return sums, maxima
        largest = torch.tensor(maxima, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return self.all_reduce(torch.tensor(sums, dtype=torch.float64)).tolist(), largest.tolist()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, in a new tensor with the same dtype, on the same device; collective."""
        if self.world_size == 1:
            return tensor.clone()
        added = tensor.detach().to(self.device, copy=True)
        torch.distributed.all_reduce(added)
        return added.to(tensor.device)

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the module, a new tensor on `device`) for every parameter and saved buffer, shared ones once.

        Values and dtype are those of the forward pass. Collective: every rank must consume it to the end; every rank
        gets the whole tensors.
        """
        named = dict(self.module.named_parameters())
        for names in byte_chunks({name: whole_bytes(p) for name, p in named.items()}):
            with self._gathered([named[name] for name in names]):
                copies = [(name, named[name].detach().to(device, copy=True)) for name in names]
            yield from copies
        for name, buffer in saved_buffers(self.module):
            yield name, buffer.detach().to(device, copy=True)

    def _gathered(self, parameters: list[torch.nn.Parameter]) -> Any:
        # A no-op below stage 3.
        return self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=None, enabled=self.stage == 3)

    def iter_state(self, key: str, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (parameter's name, a new whole float32 tensor on `device`) for every optimised parameter; collective.

        key  master | exp_avg | exp_avg_sq | ema (after `start_ema`)
        """
        kept = {id(flat): self._optimizer.kept(flat, key) for flat, _ in self._partition.groups}
        for name, tensor in gathered(self._partition, kept, self.device):
            yield name, tensor.to(device, copy=True)

    @torch.no_grad()
    def start_ema(self) -> None:
        """Begin (again) a moving average of the float32 master weights, at their current value.

        The average is another optimiser state: partitioned, saved, resumed and offloaded like the moments.
        """
        for flat, _ in self._partition.groups:
            self._optimizer.state_of(flat)[EMA] = flat.detach().clone()
        self._averages = True

    @torch.no_grad()
    def update_ema(self, tau: float) -> None:
        """Set ema <- tau * ema + (1 - tau) * master, each rank updates its own partition, without communication."""
        for flat, _ in self._partition.groups:
            self._optimizer.state_of(flat)[EMA].mul_(tau).add_(flat.detach(), alpha=1.0 - tau)

    def save_state(self, directory: Path) -> None:
        """Write master weights, moments, average, buffers, counters and random state; collective.

        Each rank writes its share of files into `directory`. Raises OSError on all ranks if one fails.
        """
        self._files(directory).save(self.updates, self.stage, averages=self._averages)

    def snapshot_state(self, directory: Path) -> Callable[[], None]:
        """Copy this rank's share of the state into main memory; collective. Return the function that writes it into
        `directory` as `save_state` does, not collective, which another thread may call while this engine trains.

        The memory is kept for the next snapshot, so there may be one at a time. The function raises OSError.
        """
        return self._files(directory).snapshot(self.updates, self.stage, self._room, averages=self._averages)

    @torch.no_grad()
    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote, with any number of ranks and at any stage; collective.

        With the same number of ranks and the same stage, training continues bit for bit. Ranks without a saved random
        state use their own seed. An average that was not saved starts again; a saved one is restored. Raises UserError
        on all ranks if a file is missing, damaged or of another model for one of them.
        """
        self.updates, saved = self._files(directory).load()
        if self._averages and not saved:
            self.start_ema()
        self._averages |= saved

    def _files(self, directory: Path) -> StateFiles:
        buffers = dict(saved_buffers(self.module))
        return StateFiles(directory, self._partition, self._optimizer, buffers, self.device, self.seed)

    def close(self) -> None:
        """Free DeepSpeed's resources; the process group remains (`leave_ranks`)."""
        self._engine.destroy()


def _load_shares(deepspeed: Any, module: Any, config: dict[str, Any]) -> None:
    """Partition the parameters of `module` over the ranks, one after the other; each rank reads its part from
    `module.stored`. Parameters that are not in the files (adapters, value head) must be equal on all ranks.

    Afterwards `deepspeed.initialize` has nothing to partition, and moves no whole model to the device.
    """

    class Init(deepspeed.zero.Init):  # type: ignore[misc]
        def _zero_init_param(self, parameter: torch.nn.Parameter) -> None:
            # DeepSpeed would send every whole parameter from rank 0 first.
            self._convert_to_deepspeed_param(parameter)
            parameter.partition()  # type: ignore[attr-defined]

    init = Init(module=torch.nn.Module(), config_dict_or_path=config)
    stored, module.stored = module.stored, None
    # one buffer for all: many large ones between the shares would fragment the memory
    largest = max(p.numel() * p.element_size() for p in module.parameters())
    buffer = torch.empty(-(-largest // 16) * 16, dtype=torch.uint8, device=init.local_device)
    for parameter in module.parameters():
        if stored.holds(parameter):
            share = -(-parameter.numel() // init.dp_world_size)
            whole = buffer.view(parameter.dtype)[: parameter.numel()].view(parameter.shape)
            stored.read(parameter, whole, init.rank * share, (init.rank + 1) * share)
            parameter.data = whole
        init._convert_to_zero_parameters([parameter])
    for buffer in module.buffers():  # DeepSpeed leaves a partitioned module where it is
        buffer.data = buffer.data.to(init.local_device)
    stored.close()


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of the buffers in the state dict, shared ones once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer
