"""DeepSpeed, told what to leave alone.

It divides by accumulation steps (a batch has as many micro-batches as it needs, and the loss is already a share of
the batch's), builds C++ operations while starting, looks for MPI, and writes to stdout: none of it here.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from learner.accelerator import without_gpu
from learner.config_engine import EngineSettings, OptimSettings

NEVER = 1 << 40
REDUCE_BUCKET = 500_000_000
"""DeepSpeed's own: numbers that are reduced at a time."""


def import_deepspeed() -> Any:
    """The module."""
    without_gpu()
    import deepspeed

    # It would ask gcc which of its C++ operations can be built, and then build one for minutes to save microseconds.
    deepspeed.ops.__compatible_ops__ = {}
    # Its optimiser for stage 1 with bfloat16 collects garbage ten times while starting, to report memory to nobody.
    deepspeed.runtime.bf16_optimizer.see_memory_usage = _unseen
    # Its logger writes to stdout, which belongs to whoever runs us.
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)  # it reports every buffer
    # AdamW from torch is on no list of DeepSpeed's, though tests/learner/test_engine.py finds it exact at every stage.
    logger.addFilter(_no_gossip)
    warnings.filterwarnings("ignore", "`torch.distributed.[a-z_]+` is deprecated", FutureWarning)
    return deepspeed


def _unseen(*_: object, **__: object) -> None:
    pass


def _no_gossip(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()


def deepspeed_config(optim: OptimSettings, engine: EngineSettings, dtype: str, parameters: int) -> dict[str, Any]:
    """DeepSpeed's own configuration, for a model of so many parameters. `engine.deepspeed` is merged last; the settings
    refuse what would clash.
    """
    stage, low = engine.zero_stage, dtype == "bfloat16"
    pinned = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    # Its buckets are reserved whole: gigabytes for a model of megabytes, until even a fork is refused.
    bucket = engine.reduce_bucket or min(REDUCE_BUCKET, max(1, parameters))
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": engine.overlap_comm, "reduce_bucket_size": bucket}
    if engine.allgather_bucket:
        zero["stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size"] = engine.allgather_bucket
    if engine.offload_optimizer:
        zero["offload_optimizer"] = pinned
    if engine.offload_params:
        zero["offload_param"] = pinned
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # step() is the boundary, whatever the number of micro-batches before it
        "managed_gradient_accumulation": False,
        # at stage 0 the optimiser clips (learner.optimizer)
        "gradient_clipping": optim.clip_norm if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # its own AdamW for offloaded states has to be compiled first; torch's has a fast CPU path by now
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": low, "check_grad_overflow": True},
        "steps_per_print": NEVER,
    }
    if low:
        # Sums of many small bfloat16 gradients lose most of them.
        made["data_types"] = {"grad_accum_dtype": "fp32" if engine.gradient_dtype == "float32" else "bf16"}
    return _merged(made, engine.deepspeed)


def _merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result
