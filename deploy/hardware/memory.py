"""Memory of a run per GPU, computed from a model's shape and the settings: pure arithmetic, nothing is loaded.

Activations follow the tensors that transformers' decoders and `learner.model` keep for the backward pass, listed at
`_saved`; `tests/deploy/test_memory.py` compares them with torch's memory tracker on the policy itself. Weights,
gradients and optimizer follow DeepSpeed 0.19.8 (`learner.engine`). The estimate has no room for fragmentation: compare
it with USABLE of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.hardware.shape import ModelShape
from learner.config.learner import TrainerSettings
from learner.config.model import DeepSpeedSettings

USABLE = 0.92
"""Share of a GPU's memory to plan with; the rest is for fragmentation and the CUDA context. Assumed, not measured."""
ENGINE_OVERHEAD = 3 << 30
"""Bytes of an engine beside weights and KV cache: context, CUDA graphs, activations. Assumed, not measured."""
LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters: parameters gathered at a time."""
SUB_GROUP = 1_000_000_000
"""DeepSpeed's default of sub_group_size: parameters updated at a time at stage 3."""
BUCKET = 500_000_000
"""Elements of a reduce bucket (`learner.engine.deepspeed.REDUCE_BUCKET`)."""
FLOAT32 = 4
INDEX_BYTES = 40
"""Five int64 per token: ids, positions, documents, index, targets."""


@dataclass(frozen=True)
class EngineNeed:
    """Settings of an engine that decide its memory.

    ranks         GPUs that share the weights (tensor times pipeline parallelism)
    cache_tokens  tokens in the KV cache
    """

    ranks: int
    cache_tokens: int


@dataclass(frozen=True)
class TrainedModel:
    """Bytes per GPU of a model in training.

    parameters   weights of the forward pass, and those gathered for it
    gradients    accumulated gradients, and those on the way to them
    optimizer    float32 weights, two moments, a moving average
    activations  peak of a forward and backward pass of one micro-batch
    update       further bytes while the optimizer updates; there are no activations then
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    update: int

    @property
    def kept(self) -> int:
        """Return the bytes between passes."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Return the largest number of bytes at a time."""
        return self.kept + max(self.activations, self.update)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per GPU. critic: None without one; reference: 0 if there is none, or it shares the policy's weights."""

    policy: TrainedModel
    critic: TrainedModel | None
    reference: int
    engine_weights: int
    engine_cache: int

    @property
    def learner(self) -> int:
        """Return the peak of a learner rank: models run one after the other."""
        models = [self.policy, *([self.critic] if self.critic else [])]
        return sum(m.kept for m in models) + max(m.peak - m.kept for m in models) + self.reference

    @property
    def engine(self) -> int:
        """Return the bytes of one engine on each of its GPUs."""
        return self.engine_weights + self.engine_cache + ENGINE_OVERHEAD


def estimate_memory(
    shape: ModelShape,
    settings: TrainerSettings,
    *,
    ranks: int,
    longest: int,
    engine: EngineNeed,
) -> MemoryEstimate:
    """Return the memory of a run per GPU. The models of critic and reference have the shape of run.model.

    Args:
        shape: shape of run.model.
        settings: section `learner`.
        ranks: learner ranks over which ZeRO partitions.
        longest: tokens of the longest trajectory, which forms a micro-batch even above `batch.micro_batch_tokens`.
        engine: what one engine holds.
    """
    tokens = max(settings.batch.micro_batch_tokens, longest)
    rank = settings.model.lora.rank
    own_critic = settings.algorithm.type == "ppo" and settings.critic.backbone == "own"
    averaged = bool(settings.algorithm.kl.coefficient) and settings.reference.kind != "frozen"
    return MemoryEstimate(
        policy=_trained(shape, settings, ranks, tokens, lora=rank, averaged=averaged),
        critic=_trained(shape, settings, ranks, tokens, lora=0, averaged=False) if own_critic else None,
        reference=_reference(shape, settings, ranks),
        engine_weights=2 * shape.parameters // engine.ranks,
        engine_cache=engine.cache_tokens * cache_bytes(shape, engine.ranks),
    )


def cache_bytes(shape: ModelShape, ranks: int) -> int:
    """Return the bytes of one token in a bfloat16 KV cache on one GPU: key and value of its share of heads."""
    return 2 * 2 * shape.layers * max(1, shape.kv_heads // ranks) * shape.head_dim


def weight_bytes(settings: TrainerSettings) -> int:
    """Return the bytes of one weight in the forward pass."""
    return 2 if _dtype(settings) == "bfloat16" else FLOAT32


def _dtype(settings: TrainerSettings) -> str:
    """Return the learner's dtype, with what auto stands for on a GPU."""
    if settings.model.dtype == "auto":
        return "bfloat16" if settings.engine.zero_stage else "float32"
    return settings.model.dtype


def _trained(
    shape: ModelShape, settings: TrainerSettings, ranks: int, tokens: int, *, lora: int, averaged: bool
) -> TrainedModel:
    engine, size = settings.engine, weight_bytes(settings)
    trained = shape.adapters(lora) if lora else shape.parameters
    total = shape.parameters + (trained if lora else 0)
    states = FLOAT32 * (2 if engine.zero_stage == 0 else 3) + (FLOAT32 if averaged else 0)
    optimizer = 0 if engine.offload_optimizer else states * trained // (ranks if engine.zero_stage else 1)
    gradients, update = _gradients(engine, trained, ranks, size, largest=min(shape.embedding, trained))
    parameters = size * total
    if engine.zero_stage == 3:
        gathered = size * (min(total, LIVE_PARAMETERS) + (shape.embedding if total > LIVE_PARAMETERS else 0))
        parameters = (0 if engine.offload_params else size * total // ranks) + gathered
    return TrainedModel(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activation_bytes(
            shape,
            tokens,
            size=size,
            checkpointing=settings.model.gradient_checkpointing,
            chunk=settings.model.logit_chunk_bytes,
            lora=lora,
        ),
        update=update,
    )


def _gradients(engine: DeepSpeedSettings, trained: int, ranks: int, size: int, *, largest: int) -> tuple[int, int]:
    """Return the bytes of gradients during the backward pass, and the further bytes of an update."""
    share = trained // ranks
    bucket = size * min(BUCKET, trained) * (2 if engine.overlap_comm else 1)
    if engine.zero_stage == 0:
        return size * trained, 0
    if engine.zero_stage == 1:  # whole gradients on every rank, partitioned only for the update
        return FLOAT32 * trained + size * largest, 0
    accumulated = 0 if engine.offload_optimizer else FLOAT32 * share
    if engine.zero_stage == 2:  # a partition in the model's dtype before it is added; flattened for the update
        return accumulated + size * share + bucket, accumulated
    return accumulated + bucket, FLOAT32 * min(share, SUB_GROUP) if not engine.offload_optimizer else 0


def _reference(shape: ModelShape, settings: TrainerSettings, ranks: int) -> int:
    """Return the bytes of the reference: none without a divergence, or if adapters make it the policy itself."""
    own, stage = settings.reference, settings.engine.zero_stage
    size = 2 if _dtype(settings) == "bfloat16" else FLOAT32
    shared = settings.model.lora.rank and own.model is None
    if not settings.algorithm.kl.coefficient or (shared and (own.kind == "frozen" or stage < 3)):
        return 0
    if stage == 3 and ranks > 1:  # fully_shard gathers a layer, and embedding and output layer
        layer = (shape.parameters - shape.embedding * (1 if shape.tied else 2)) // shape.layers
        return size * (shape.parameters // ranks + layer + shape.embedding * (1 if shape.tied else 2))
    return size * shape.parameters


def activation_bytes(
    shape: ModelShape, tokens: int, *, size: int, checkpointing: bool, chunk: int, lora: int = 0
) -> int:
    """Return the peak bytes of activations in a forward and backward pass, in which every token is scored.

    It is reached in the output layer (log-probs in chunks, and the gradient of its weight), in the backward pass of the
    last layer, or, with few tokens, in that of the embedding. The gradient of a tied output layer waits for the
    embedding's, and their sum is a third tensor.

    Args:
        shape: shape of the model.
        tokens: tokens of the micro-batch.
        size: bytes of a weight.
        checkpointing: only the input of each layer is kept, and the layer is recomputed.
        chunk: `model.logit_chunk_bytes`.
        lora: rank of the adapters, 0: all weights are trained.
    """
    hidden, vocabulary = shape.hidden, shape.vocabulary
    saved = _saved(shape, size, lora)
    stack = shape.layers * (size * hidden if checkpointing else saved)
    always = stack + 2 * size * shape.head_dim + INDEX_BYTES
    head = 0 if lora else size * shape.embedding
    rows = min(tokens, max(1, chunk // (vocabulary * (size + 2 * FLOAT32))))
    scoring = rows * vocabulary * 2 * FLOAT32  # logits and probabilities
    last = FLOAT32 * hidden + (0 if lora else size * hidden) + 2 * size * hidden
    backward = (saved if checkpointing else 0) + 2 * size * shape.gated + size * hidden
    return max(
        tokens * (always + last) + scoring + head,
        tokens * (always + backward) + (head if shape.tied else 0),
        head * (3 if shape.tied else 1),
    )


def _saved(shape: ModelShape, size: int, lora: int) -> int:
    """Return the bytes per token that one layer keeps for its backward pass.

    norms      input in float32, the normalised states (only for the gradient of the norm's weight), the output; twice
    attention  query, key, value, output of every trajectory, the joined output, one float32 per head
    MLP        gate, its activation, up, their product
    adapters   the inner states of each
    """
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * (FLOAT32 * shape.hidden + (1 if lora else 2) * size * shape.hidden + FLOAT32)
    if shape.head_norm:
        norms += (FLOAT32 + (0 if lora else size)) * (query + kv)
    attention = size * (3 * query + 2 * kv) + FLOAT32 * shape.heads
    return norms + attention + 4 * size * shape.gated + size * lora * len(shape.linear)
