"""Settings of the optimiser and of DeepSpeed. Imports nothing heavy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.settings import Settings


class OptimSettings(Settings):
    """AdamW and its learning rate."""

    lr: float = Field(default=1e-6, gt=0)
    """Highest learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; vectors (norms, biases) never decay."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 = never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, over run.steps steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise from lr / warmup_steps."""
    warmup_fraction: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all updates of the run (Search-R1: 0.285); not together with warmup_steps."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """linear and cosine end at this share of lr."""

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimSettings:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("give warmup_steps or warmup_fraction, not both")
        return self


OURS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("managed_gradient_accumulation", "gradient_clipping", "optimizer", "scheduler", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "bf16", "fp16", "torch_autocast", "data_types"),
    *(
        f"zero_optimization.{key}"
        for key in (
            *("stage", "overlap_comm", "reduce_bucket_size", "offload_optimizer", "offload_param"),
            *("zero_hpz_partition_size", "compute_grad_norm", "elastic_checkpoint", "zenflow"),
        )
    ),
}
"""What `EngineSettings.deepspeed` may not say: other settings say it, or the learner relies on it."""


class EngineSettings(Settings):
    """DeepSpeed."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is partitioned over the ranks: nothing, optimiser, and gradients, and parameters."""
    deterministic: bool = False
    """Only operations that give the same bits every time, slower ones on a GPU; torch refuses those that have none.
    On a CPU with a fixed number of threads nothing changes."""
    threads: int = Field(default=0, ge=0)
    """Threads torch computes with on a CPU; 0 = its own choice. The same bits come only of the same number."""
    gradient_dtype: Literal["float32", "model"] = "float32"
    """In what micro-batches' gradients are added up when the model is bfloat16; `model` halves the memory for it."""
    offload_optimizer: bool = False
    """Keep master weights and moments in the memory of the CPU, which then does the update (zero_stage 1 or more)."""
    offload_params: bool = False
    """Keep the parameters there too, between their uses (zero_stage 3)."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass goes on (zero_stage 2 or 3): faster on GPUs, more memory."""
    reduce_bucket: int = Field(default=0, ge=0)
    """Numbers that are reduced at a time; 0 = 500 million, or all of a smaller model. Fewer take less memory."""
    allgather_bucket: int = Field(default=0, ge=0)
    """Numbers that are gathered at a time (at stage 3: fetched ahead); 0 = DeepSpeed's own choice."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """More of DeepSpeed's own configuration, merged last; keys that other settings here stand for are refused."""

    @field_validator("deepspeed")
    @classmethod
    def _not_ours(cls, extra: dict[str, Any]) -> dict[str, Any]:
        zero = extra.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError("zero_optimization must be a mapping")
        said = {*extra, *(f"zero_optimization.{key}" for key in zero)}
        clash = sorted(said & OURS)
        if clash:
            raise ValueError(f"{', '.join(clash)}: the learner sets this itself")
        return extra

    @model_validator(mode="after")
    def _stage_allows(self) -> EngineSettings:
        if self.offload_optimizer and not self.zero_stage:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_params and self.zero_stage != 3:
            raise ValueError("offload_params needs zero_stage 3")
        if self.overlap_comm and self.zero_stage < 2:
            raise ValueError("overlap_comm needs zero_stage 2 or 3")
        return self
