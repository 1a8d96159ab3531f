"""Settings of the learner: section `learner` of the tree. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from learner.config.algorithm import AlgorithmSettings, GrpoSettings
from learner.config.model import CriticSettings, DeepSpeedSettings, ModelSettings, OptimSettings, ReferenceSettings
from learner.config.questions import Questions
from learner.config.trackers import TrackerSettings
from learner.config.validation import ValidationSettings
from protocol.errors import UserError
from protocol.settings import RunSettings, Settings


class FilterSettings(Settings):
    """Dynamic filtering (DAPO, arXiv 2503.14476, section 3.2): skip groups without a learning signal.

    If all valid trajectories of a group have the same reward, it is settled as filtered and not trained; another seq is
    issued in its place. Redis keeps filtered groups, too, until the next checkpoint.
    """

    metric: str = ""
    """Part of the reward that must differ within a group, e.g. `em`; `reward` is the whole reward; "" disables
    filtering, unless the algorithm enables it (`algorithm.filter`): then the whole reward is used."""


class MixSettings(Settings):
    """Off-policy mix: groups of the last steps are trained again, in addition to new ones.

    Repeats are intended and not counted: "each seq is trained at most once" counts the commits of a seq.
    """

    share: float = Field(default=0.0, ge=0, le=4)
    """Groups mixed into a batch, as a share of `run.groups_per_step`. They are drawn by `run.seed` and the step, from
    groups whose first version is at most `run.max_lag` steps old. 0: none."""


class BatchSettings(Settings):
    """Packing of groups into micro-batches."""

    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Maximum tokens in one forward pass, padding included; a longer trajectory runs alone. Increase it on GPUs."""
    row_tokens: int = Field(default=0, ge=0)
    """Trajectories are packed into rows of this many tokens (or of the longest one); 0: one row per trajectory."""
    share_prompts: bool = False
    """Read the common prompt of a group once for as many of its trajectories as fit into `micro_batch_tokens` (Prefix
    Grouper, arXiv 2506.05433): the same loss from fewer tokens. Not for models that compute one trajectory per row."""
    shuffle_rewards: bool = False
    """Control experiment: permute rewards among all trajectories of the batch before advantages are computed, so that
    there is nothing to learn. The metrics still show the true rewards."""

    @property
    def rows(self) -> dict[str, bool]:
        """Return what `learner.model.loading.load_policy` needs to know of the rows: `packed` and `shared`."""
        return {"packed": bool(self.row_tokens) or self.share_prompts, "shared": self.share_prompts}


class TokenValuesSettings(Settings):
    """Files with the values of each trained token of some steps, for the dashboard: log-probs by the policy that was
    trained and by the reference, and the advantage. About 36 bytes per token.
    """

    every: int = Field(default=10, ge=0)
    """Steps between two such steps; 0: none."""
    keep: int = Field(default=20, ge=1)
    """Number of the newest such steps to keep."""

    def due(self, step: int) -> bool:
        """Return whether the values of step `step` are kept."""
        return bool(self.every and step and step % self.every == 0)


class TrainerSettings(Settings):
    """Settings of training itself: base class of the learner's section."""

    algorithm: AlgorithmSettings = GrpoSettings()
    """RL algorithm and its loss."""
    batch: BatchSettings = BatchSettings()
    """Packing of groups."""
    optim: OptimSettings = OptimSettings()
    """Optimiser and learning rate."""
    model: ModelSettings = ModelSettings()
    """Model of the policy."""
    critic: CriticSettings = CriticSettings()
    """Value model, for algorithms that need values."""
    reference: ReferenceSettings = ReferenceSettings()
    """Reference policy, for algorithms with a divergence."""
    engine: DeepSpeedSettings = DeepSpeedSettings()
    """DeepSpeed and its parallelism."""
    token_values: TokenValuesSettings = TokenValuesSettings()
    """Values of single tokens, for inspection."""
    rescored_share: float = Field(default=0.0625, ge=0, le=1)
    """Share of a step's tokens that the updated policy scores again, to measure how the log-probs of good trajectories
    changed (`logprob_change`, `fell_turns`); at most a micro-batch, at least one trajectory. 0: off."""

    @model_validator(mode="after")
    def _bfloat16_needs_zero(self) -> TrainerSettings:
        # DeepSpeed's stage 0 silently uses another kind of optimiser for bfloat16.
        if self.model.dtype == "bfloat16" and self.engine.zero_stage == 0:
            raise ValueError("model.dtype bfloat16 needs engine.zero_stage 1, 2 or 3")
        return self

    @model_validator(mode="after")
    def _distillation_needs_a_teacher(self) -> TrainerSettings:
        if self.algorithm.type == "distill" and self.reference.model is None:
            raise ValueError("algorithm distill needs a teacher: set reference.model to the directory of its model")
        return self


KEEP_VERSIONS = 4
"""Number of newest published versions to keep, in addition to those that a live engine still reports."""


class FilesSettings(Settings):
    """Settings of weight files, which every transport needs: a broadcast also writes files for engines that missed
    it."""

    fsync: bool = True
    """Flush weights to the device before they are announced. If false, a power cut may leave a torn version, which
    nodes refuse by its sha256; the next start publishes the checkpoint's weights again."""
    max_norm_jump: float = Field(default=4.0, ge=0)
    """Do not publish weights, and stop the learner, if their Euclidean norm over all tensors is more than this many
    times larger or smaller than the previous version's: no sane step does that. 0: not checked."""


class DiskPublishSettings(FilesSettings):
    """Weights reach the engines as files on a path that learner and nodes share."""

    type: Literal["disk"] = "disk"
    """Transport."""


class DistributedPublishSettings(FilesSettings):
    """Weights are broadcast to the ready engines; all others read files.

    The learner's host keeps one copy of the weights in main memory (as many bytes as the model in the learner's dtype).
    Files for engines that missed a version are written from it, without delaying training.
    """

    type: Literal["distributed"] = "distributed"
    """Transport."""
    address: str = ""
    """Address of this host as the engines reach it; the ranks meet only there. Anyone who can connect could read the
    weights: use loopback or a private network. gloo uses the interface of this address, unless GLOO_SOCKET_IFNAME is
    set. Empty: this machine's on the route to Redis, if the learner has a token, else loopback."""
    port: int = Field(default=0, ge=0, le=65535)
    """Rendezvous port of the ranks; 0: a free port for each new group."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """`gloo` sends from main memory over sockets; `nccl` from GPU to GPU (has run on one GPU only)."""
    bucket_mb: int = Field(default=256, ge=1)
    """Maximum size of one broadcast, in MiB: one is sent while the next is gathered. Small models use smaller ones."""
    flattened: bool = True
    """One broadcast per bucket; false: one per tensor."""
    prepare_s: float = Field(default=0.0, ge=0)
    """Timeout for the engines to join the group, in seconds; an engine that misses it is excluded for a minute. 0: 15,
    with `nccl` 60, because it includes the connection of all ranks. Grows like `stall_s`."""
    transfer_s: float = Field(default=120.0, gt=0)
    """Timeout for one version, in seconds, from its first byte to the checksums, or `stall_s` for each bucket and the
    checksums, if that is more."""
    stall_s: float = Field(default=20.0, gt=0)
    """Timeout for one bucket or the last checksum, in seconds: a hanging engine must not block training. An NCCL group
    is aborted then. Grows to five times the longest recent wait, and doubles after a transfer that was too late."""
    checksum: Literal["xxh3_128", "sha256"] = "xxh3_128"
    """Checksums by which the tensors of an engine are compared with the policy's. `xxh3_128` takes a sixth of the time
    of `sha256`, which also reveals bytes that an attacker has changed on the way. It is `sha256` in any case if the
    engines are not authenticated: an address beyond loopback without a node token. Files are checked by sha256."""
    patience_s: float = Field(default=5.0, ge=0)
    """Seconds that a serving engine which missed a version waits for the next one before files are written for it."""

    @property
    def join_s(self) -> float:
        """Return `prepare_s`, or its default for the backend."""
        return self.prepare_s or (60.0 if self.backend == "nccl" else 15.0)


class AdapterPublishSettings(FilesSettings):
    """Only a LoRA adapter reaches the engines, as files; they keep the run's initial model loaded and never pause."""

    type: Literal["adapter"] = "adapter"
    """Transport."""


PublishSettings = Annotated[
    DiskPublishSettings | DistributedPublishSettings | AdapterPublishSettings, Field(discriminator="type")
]
"""Union of the transports: a new one is one file and one member here."""


class LearnerSettings(TrainerSettings):
    """The whole section: training (`TrainerSettings`), input, output and intervals."""

    questions: Questions = Path("questions.jsonl")
    """Training questions: a file (JSON lines with `question` and `answers`, Search-R1's parquet, HotpotQA's, ..:
    docs/data.md), or a list of sources: [nq.parquet, hotpotqa.json], [{path: nq.parquet, weight: 2}, ..]."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Steps between checkpoints. Redis keeps the groups since the last one, so one is also due after this many batches'
    worth of groups that were skipped, filtered or stale. If one is due before the last is written, training waits."""
    checkpoint_s: float = Field(default=600.0, gt=0)
    """Write a checkpoint also when the last one is this many seconds old."""
    async_checkpoints: bool = True
    """Write checkpoints in the background while training goes on. Training then stops only to copy the state into main
    memory: 12 bytes per trained parameter (16 with a moving average), kept for the next checkpoint and divided over the
    ranks. False: training waits for each checkpoint, and less memory is needed."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep; the committed one is always kept."""
    on_stale: Literal["mask", "drop"] = "mask"
    """For a group that began more than `run.max_lag` steps ago: mask its tokens beyond max_lag, or drop the group."""
    on_orphan: Literal["train", "mask"] = "train"
    """For tokens sampled by versions that a crash rolled back: train on them within max_lag, or mask them."""
    reconcile_s: float = Field(default=10.0, gt=0)
    """Seconds between checks for lost seqs; a seq that is missing twice in a row is reissued."""
    lease_s: float = Field(default=15.0, ge=0.3)
    """Lifetime of the learner's lease, in seconds; renewed every third of it. A successor waits at most this long."""
    on_no_signal: Literal["stop", "wait"] = "stop"
    """What the learner does, after it has written a checkpoint, when nothing can be learned: 3 batches in a row
    were not finite, 20 had no token to train, or all questions failed (at least 100, and four times the groups in
    flight). `stop`: exit with code 65, which no launcher restarts. `wait`: issue no tasks until you create the file
    `continue` in `run.dir`."""
    journal: bool = True
    """Keep every trained group in `run.dir/journal` for replay."""
    journal_max_gb: float = Field(default=0.0, ge=0)
    """Drop the oldest files of a larger journal after a checkpoint, unless a resume needs them; 0: never. The remaining
    groups can be replayed only from the policy of that time."""
    eval: ValidationSettings = ValidationSettings()
    """Validation on questions that are not trained on, while training goes on."""
    filter: FilterSettings = FilterSettings()
    """Groups without a learning signal."""
    replay_mix: MixSettings = MixSettings()
    """Groups that are trained more than once."""
    metrics_port: int | None = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint `/metrics`; 0: a free port (in the learner's log and its snapshot in
    Redis); null: no endpoint."""
    metrics_host: str = ""
    """Address that endpoint listens on. Any but loopback needs a token: FORAY_VIEWER_TOKEN (SECURITY.md). Empty: this
    machine's on the route to Redis, if the learner has a token, else loopback."""
    trackers: tuple[TrackerSettings, ...] = ()
    """Where to send the metrics of each step besides `run.dir/metrics.jsonl`: [wandb], or [{type: wandb, project:
    mine}]."""
    publish: PublishSettings = DiskPublishSettings()
    """Transport of new weights to the engines: `publish.type` is disk (default), distributed or adapter."""

    @property
    def journal_bytes(self) -> int:
        """Return the maximum size of the journal in bytes, 0 for unlimited."""
        return int(self.journal_max_gb * 1e9)

    @property
    def filtering(self) -> FilterSettings:
        """Return `filter`, or filtering by the whole reward if only the algorithm enables it."""
        enabled = self.algorithm.filter and not self.filter.metric
        return self.filter.model_copy(update={"metric": "reward"}) if enabled else self.filter

    @model_validator(mode="after")
    def _mix_needs_a_journal(self) -> LearnerSettings:
        if self.replay_mix.share and not self.journal:
            raise ValueError("replay_mix.share needs journal: true: a resumed learner reads the groups from it")
        return self

    @model_validator(mode="after")
    def _adapter_is_trained(self) -> LearnerSettings:
        if self.publish.type == "adapter" and not self.model.lora.rank:
            raise ValueError(
                "publish.type adapter needs model.lora.rank above 0: otherwise there is no adapter to publish"
            )
        return self

    @field_validator("questions")
    @classmethod
    def _has_questions(cls, value: Questions) -> Questions:
        if value == ():
            raise ValueError("the list is empty: name at least one file of questions")
        return value

    @field_validator("trackers", mode="before")
    @classmethod
    def _names_are_types(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"type": item} if isinstance(item, str) else item for item in value]

    @field_validator("publish", mode="before")
    @classmethod
    def _disk_unless_said(cls, value: Any) -> Any:
        return {"type": "disk", **value} if isinstance(value, dict) else value


def require_groups(run: RunSettings, settings: LearnerSettings) -> None:
    """Raise UserError if every advantage would be 0: groups of one with a group baseline."""
    algorithm = settings.algorithm
    if run.group_size == 1 and algorithm.group_baseline:
        raise UserError(
            f"run.group_size is 1, but learner.algorithm.type {algorithm.type} compares a trajectory with its group",
            why="a group of one has advantage 0: the run would learn nothing",
            todo="set run.group_size to 2 or more (8 is usual), or use an algorithm without a group baseline: "
            "learner.algorithm.type ppo, reinforce or reinforce_pp (with baseline none)",
        )
