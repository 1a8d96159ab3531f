"""The wire messages: frozen structs, with the shape of every array.

Compatibility rules (a reader of schema 1.x reads every 1.y):
  1. add a field only with a default; 2. never change the meaning or type of a field; 3. never reuse a name;
  4. any other change needs a new major version. `tests/golden/` holds encoded messages of every kind and tests this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, field, structs

from protocol.arrays import MAX_ITEMS, Count, Float32Array, Int32Array, Message, Name, NonNegative, Number, Text
from protocol.versions import PolicyVersion
from protocol.weights import WeightBucket

Scalar = str | int | float | bool | None

MAX_SEGMENTS = 1024
MAX_GROUP = 4096
NO_IDS, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class Question(Message, frozen=True, kw_only=True):
    """A question with its gold answers, e.g. Question(id="nq-7", text="who wrote Emma?", answers=("Jane Austen",)).

    meta  `source`, the data set; `supporting_ids`, as `supporting_meta` writes them; further fields of its row
    """

    id: Name
    text: Text
    answers: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    meta: Annotated[dict[Name, Scalar], Meta(max_length=64)] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Return the data set that the question comes from, "" if it is unknown."""
        return str(self.meta.get("source") or "")

    @property
    def supporting(self) -> tuple[str, ...]:
        """Return the ids or titles of the passages that support the answer, as `supporting_meta` wrote them."""
        names = str(self.meta.get("supporting_ids") or "")
        return tuple(name for part in names.split("\n" if "\n" in names else ",") if (name := part.strip()))


def supporting_meta(names: Iterable[str]) -> str:
    """Return ids or titles as one text for a question's `meta["supporting_ids"]`: comma-separated, or one per line if
    a title contains a comma."""
    names = list(names)
    return "".join(f"{name}\n" for name in names) if any("," in name for name in names) else ",".join(names)


class Sampling(Message, frozen=True, kw_only=True):
    """Sampling parameters. They define the log-probs: those of softmax(logits / T)."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: int = -1


class Task(Message, frozen=True, kw_only=True):
    """One occurrence of a question to roll out: seq `seq`, for the `attempt`-th time."""

    seq: Count
    attempt: Count = 1
    question: Question
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP)]
    sampling: Sampling = Sampling()


class Owner(StrEnum):
    """The author of a segment. Mask, reward spans and provenance follow from it, never from tags in the text."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"


class VersionSpan(Message, frozen=True, kw_only=True):
    """Tokens [start, end) of a segment, sampled by policy version (epoch, step)."""

    epoch: Count
    step: Count
    start: Count
    end: Count

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.step)


class Segment(Message, frozen=True, kw_only=True):
    """A sequence of tokens with one owner.

    ids       [n] int32
    logprobs  [n] float32 behaviour log-probs for the policy's tokens, [0] for the others: of softmax(logits / T) over
              the whole vocabulary, where T is the group's `sampling.temperature`; not renormalised after top-p and
              top-k. With T = 0 (greedy) they are of softmax(logits), and ratios to them are not importance weights
    spans     versions that cover [0, n) without a gap for the policy's tokens, empty for the others
    query, passage_ids, latency_s and error describe an observation: the query, the passages returned, the time taken,
    and the cause of a failure ("" for none)
    tool      tool that produced the observation; "" for search
    finish_reason  of a policy's turn: stop or length; of a prompt that is not the first: why it began a new sequence
    reward    reward of this policy turn, included in the trajectory's reward; 0 with outcome rewards only
    """

    owner: Owner
    ids: Int32Array
    logprobs: Float32Array = NO_LOGPROBS
    spans: Annotated[tuple[VersionSpan, ...], Meta(max_length=4096)] = ()
    finish_reason: Name = ""
    engine: Name = ""
    query: Text = ""
    passage_ids: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()
    latency_s: NonNegative = 0.0
    error: Name = ""
    tool: Name = ""
    reward: Number = 0.0

    def check(self) -> None:
        check_segments((self,))

    def __eq__(self, other: object) -> bool:
        """Return whether all fields are equal, arrays by their elements."""
        if not isinstance(other, Segment):
            return NotImplemented
        pairs = zip(structs.astuple(self), structs.astuple(other), strict=True)
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def check_segments(segments: Sequence[Segment]) -> None:
    """Raise ValueError unless log-probs and version spans cover the policy's tokens and nothing else, log-probs are
    finite and not positive, and ids not negative. The values of all segments are compared at once: it is faster."""
    for segment in segments:
        expected = len(segment.ids) if segment.owner is Owner.POLICY else 0
        if len(segment.logprobs) != expected:
            raise ValueError(f"{len(segment.logprobs)} log-probs for {len(segment.ids)} {segment.owner} tokens")
        position = 0
        for span in segment.spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"version spans leave a gap or overlap at token {position}")
            position = span.end
        if position != expected:
            raise ValueError(f"version spans end at {position} of {expected} tokens")
    ids = np.concatenate([NO_IDS, *(segment.ids for segment in segments)])
    if len(ids) and ids.min() < 0:
        raise ValueError("a token id is negative")
    logprobs = np.concatenate([NO_LOGPROBS, *(segment.logprobs for segment in segments)])
    if len(logprobs) and not (logprobs.max() <= 1e-3 and logprobs.min() > -math.inf):
        raise ValueError("a log-prob is above zero or not finite")


class Status(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    OUT_OF_TURNS = "out_of_turns"
    TRUNCATED = "truncated"
    """It reached the token budget."""
    STALE = "stale"
    """The rollout server aborted it because its first version was too old: infrastructure, not behaviour."""
    FAILED = "failed"
    """An engine or the search failed: infrastructure, not behaviour."""

    @property
    def is_valid(self) -> bool:
        """Return whether the trajectory counts in its group's baseline: the policy's behaviour ended it."""
        return self not in (Status.STALE, Status.FAILED)


class Trajectory(Message, frozen=True, kw_only=True, dict=True):
    """One answer of the policy to a question: one or more training sequences, which share its reward (schema 1.7).

    The first segment is the prompt. A later prompt segment begins the next sequence: the policy was given that prompt
    alone, without the segments before it. A learner before schema 1.7 would train all of them as one sequence.

    status, cause    how it ended, and why if it is FAILED or STALE ("" otherwise)
    reward           total reward, including the rewards of the segments
    rewards          reward components by name, unweighted
    turns, searches  their number; seconds: wall time
    """

    status: Status
    cause: Name = ""
    segments: Annotated[tuple[Segment, ...], Meta(max_length=MAX_SEGMENTS)]
    reward: Number = 0.0
    rewards: Annotated[dict[Name, Number], Meta(max_length=64)] = field(default_factory=dict)
    answer: Text = ""
    turns: Count = 0
    searches: Count = 0
    seconds: NonNegative = 0.0

    @cached_property
    def ids(self) -> npt.NDArray[np.int32]:
        """Return [T] int32: all tokens, in order."""
        return np.concatenate([s.ids for s in self.segments] or [NO_IDS])

    @property
    def sequences(self) -> list[tuple[Segment, ...]]:
        """Return the segments of each training sequence, in order."""
        begins = [n for n, segment in enumerate(self.segments) if n == 0 or segment.owner is Owner.PROMPT]
        return [self.segments[begin:end] for begin, end in pairwise([*begins, len(self.segments)])]

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Return [T] bool: True where the policy sampled the token."""
        parts = [np.full(len(s.ids), s.owner is Owner.POLICY) for s in self.segments]
        return np.concatenate(parts or [np.zeros(0, bool)])

    @cached_property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Return [T] float32: behaviour log-probs, 0 where the policy did not sample."""
        parts = [s.logprobs if s.owner is Owner.POLICY else np.zeros(len(s.ids), np.float32) for s in self.segments]
        return np.concatenate(parts or [NO_LOGPROBS])

    @cached_property
    def versions(self) -> npt.NDArray[np.int64]:
        """Return [T, 2] int64: (epoch, step) that sampled each token, (-1, -1) where the policy did not."""
        out = np.full((len(self.ids), 2), -1, np.int64)
        base = 0
        for segment in self.segments:
            for span in segment.spans:
                out[base + span.start : base + span.end] = (span.epoch, span.step)
            base += len(segment.ids)
        return out

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return sum(len(s.ids) for s in self.segments if s.owner is Owner.POLICY)

    def first_version(self) -> PolicyVersion | None:
        """Return the oldest version among the sampled tokens."""
        return min((span.version for s in self.segments for span in s.spans), default=None)

    def last_version(self) -> PolicyVersion | None:
        """Return the newest version among the sampled tokens."""
        return max((span.version for s in self.segments for span in s.spans), default=None)


class TrajectoryGroup(Message, frozen=True, kw_only=True, weakref=True):
    """All trajectories of one seq, which is one occurrence of a question: the unit on the wire, published once per seq.

    run             the run's id
    seq, attempt    of the task that was rolled out, both from 1
    trajectories    `run.group_size` of them, in any state: `Trajectory.status` says which are valid
    sampling        temperature, top-p and top-k of every policy token
    template        `rollout.episode.template`, whose tags the policy's text has
    escape_version  version of the rules by which tags in documents were escaped
    producer        id of the rollout server, as it claims
    seconds         from the start of the first trajectory to the end of the last, in wall time
    """

    run: Name
    seq: Count
    attempt: Count = 1
    question: Question
    trajectories: Annotated[tuple[Trajectory, ...], Meta(min_length=1, max_length=MAX_GROUP)]
    sampling: Sampling = Sampling()
    template: Name = ""
    escape_version: Count = 1
    producer: Name = ""
    seconds: NonNegative = 0.0

    def check(self) -> None:
        check_segments([segment for trajectory in self.trajectories for segment in trajectory.segments])

    def versions(self) -> set[tuple[int, int]]:
        """Return every (epoch, step) that sampled a token."""
        return {(span.epoch, span.step) for t in self.trajectories for s in t.segments for span in s.spans}

    def first_version(self) -> PolicyVersion | None:
        """Return the oldest version among all sampled tokens, which decides how stale the group is."""
        return min((PolicyVersion(*version) for version in self.versions()), default=None)

    def last_version(self) -> PolicyVersion | None:
        """Return the newest version among all sampled tokens."""
        return max((PolicyVersion(*version) for version in self.versions()), default=None)


TASK_UNREADABLE = "task_"
"""Prefix of a `GroupFailed` reason if the task could not be decoded, so its attempt number is unknown."""


class GroupFailed(Message, frozen=True, kw_only=True):
    """Report that the last attempt at a seq failed: the learner settles it as dead, with this reason."""

    run: Name
    seq: Count
    attempt: Count
    question_id: Name = ""
    reason: Name
    detail: Text = ""
    generated_tokens: Count = 0
    producer: Name = ""


Transport = Literal["disk", "distributed", "adapter"]


INITIAL = "initial-"
"""Prefix of `WeightUpdate.digest` for the run's initial model."""
NEEDS_FILES = "its run.model differs from the learner's: it needs files of"
"""Prefix of the detail of an engine that cannot hold the announced initial model."""
NEEDS_BROADCAST = "it waits for a broadcast:"
"""Prefix of the detail of an engine whose host does not have the announced files."""


class WeightUpdate(Message, frozen=True, kw_only=True):
    """A published (committed) policy version, which nodes must load.

    disk         `path` is a directory with model.safetensors and a manifest
    distributed  the members of the view have loaded it already; `path` is such a directory for other engines, written
                 when one needs it
    adapter      `path` is a directory with a LoRA adapter and a manifest, over the run's initial model
    """

    run: Name
    epoch: Count
    step: Count
    digest: Name
    transport: Transport = "disk"
    path: Text
    num_bytes: Count = 0
    broadcast: bool = False
    """The learner also broadcasts: an engine whose host does not have `path` can wait for that."""

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.step)

    @property
    def is_initial(self) -> bool:
        """Whether it is the run's initial model, which nodes have themselves: `path` is not a published directory, and
        `digest` is INITIAL and `protocol.runtime.files.model_digest` of the learner's copy.
        """
        return self.digest.startswith(INITIAL)


class WeightView(Message, frozen=True, kw_only=True):
    """The transfer of one version to a fixed set of engines, over a process group in which the learner is rank 0.

    number    counts the views of an epoch from 1
    phase     prepare: join `group` and answer; transfer: pause, receive every bucket, answer with the checksum;
              commit: set the version and resume (its WeightUpdate is now the target, or was before the view);
              abort: the view has ended, a member that has received a tensor holds weights of no version
    members   "engine id/incarnation" of rank 1, 2, ... in order
    rank_offsets  first rank of each member, which has `EngineInfo.ranks` ranks (tensor parallel)
    deadline  seconds on the Redis clock; a member that has heard nothing by then treats the view as aborted
    committed  numbers of the epoch's last committed views: a member that missed the commit of its view finds it here,
              and one whose view is not listed treats it as aborted
    buckets   empty if `plan` names them, and in the last phases
    plan      sha256 (hex) of the encoded `WeightPlan`, which is under a key of its own: nodes read the view several
              times, and the plan once. "": `buckets` holds it, for a node of an older Foray
    checksum  algorithm of the members' checksums, one of `weights.DIGESTS`
    """

    run: Name
    epoch: Count
    step: Count
    number: Count
    phase: Literal["prepare", "transfer", "commit", "abort"]
    members: Annotated[tuple[Name, ...], Meta(max_length=4096)]
    rank_offsets: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    group: Name
    address: Name
    port: Count
    world_size: Count
    backend: Literal["gloo", "nccl"] = "gloo"
    buckets: Annotated[tuple[WeightBucket, ...], Meta(max_length=MAX_ITEMS)] = ()
    flattened: bool = True
    deadline: Number = 0.0
    committed: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    proof: WeightBucket | None = None
    """A bucket of one tensor that the members hold already: broadcast in a new group before they answer "prepared".
    None: no proof of connection is needed, or a member cannot give it."""
    plan: Name = ""
    checksum: Name = "sha256"

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.step)


class ViewAnswer(Message, frozen=True, kw_only=True):
    """The state of one member of a view.

    phase     prepared: in the group; loaded: has every tensor, generation still paused; failed: see `detail`
    kind      `EngineInfo.layout`, or `EngineInfo.kind` of a node that does not report a layout
    checksum  of all weights in the engine, comparable between engines of one `kind`; "" if the engine computes none
    tensors_sha256  `weights.sum_of` the view's tensors except the `unused` ones (a tied head), as stored in the
              engine, each by the view's `checksum`, for comparison with the learner's value; "" if the engine's layout
              is not Hugging Face's
    pause_s   seconds since generation was paused, including transfer_s and verify_s
    touched   it failed after the first tensor: the engine holds weights of no version
    """

    member: Name
    number: Count
    phase: Literal["prepared", "loaded", "failed"]
    kind: Name = ""
    checksum: Name = ""
    tensors_sha256: Name = ""
    unused: Annotated[tuple[Name, ...], Meta(max_length=MAX_ITEMS)] = ()
    pause_s: Number = 0.0
    transfer_s: Number = 0.0
    verify_s: Number = 0.0
    touched: bool = False
    detail: Annotated[str, Meta(max_length=2000)] = ""
    token: Name = ""
    """`protocol.runtime.http.auth.member_token` of the member and the group; "" without a node token."""


class NodeState(StrEnum):
    """The state of an engine. Only READY takes traffic."""

    JOINING = "joining"
    SYNCING = "syncing"
    READY = "ready"
    LOADING = "loading"
    SUSPECT = "suspect"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    GONE = "gone"


class EngineInfo(Message, frozen=True, kw_only=True):
    """What a node reports about its engine. Renewed with each heartbeat; removed when its lease expires."""

    id: Name
    url: Name
    state: NodeState
    epoch: Count = 0
    step: Count = 0
    tokenizer: Name = ""
    incarnation: Name = ""
    role: Literal["rollout", "eval"] = "rollout"
    kind: Name = ""
    max_running: Count = 0
    running: Count = 0
    waiting: Count = 0
    tokens_per_s: NonNegative = 0.0
    token_usage: NonNegative = 0.0
    updates: Count = 0
    pause_s: NonNegative = 0.0
    detail: Annotated[str, Meta(max_length=2000)] = ""
    transports: tuple[Transport, ...] = ("disk",)
    """Weight transports that the engine supports."""
    ranks: Annotated[int, Meta(ge=1)] = 1
    """Ranks of the engine in a weight-update group (tensor parallel size)."""
    adapter: Name = ""
    """Name of the LoRA adapter that holds `version`; requests must name it. "": the base weights hold it."""
    max_tokens: Count = 0
    """Capacity of its KV cache in tokens; 0 if unknown."""
    retractions: Count = 0
    """Requests retracted for lack of KV cache since its start: a sign of too much concurrency."""
    pace_s: NonNegative = 0.0
    """Seconds of its slowest recent step, the one in progress included: limits on its answers are multiples of it."""
    dtype: Name = ""
    """dtype of its weights, as torch names it; "" if it does not report tensors one by one."""
    layout: Name = ""
    """What its checksum depends on besides the weights, e.g. "sglang/tp2/pp1/dp1/ep1/bfloat16/none": engine, parallel
    sizes, dtype, quantization. "": `kind` alone."""
    versions: Annotated[dict[Name, Name], Meta(max_length=16)] = field(default_factory=dict)
    """Versions of "engine", "torch" and "nccl" in its environment, where known."""
    proves: bool = False
    """It can take part in the proof of a new group (`WeightView.proof`)."""
    checksums: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Algorithms that a view may name (`WeightView.checksum`). A node that names any also reads `WeightView.plan`."""

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.step)

    @property
    def needs_broadcast(self) -> bool:
        """Whether it is up, whatever its state, and its host does not have the files of the announced version."""
        return self.detail.startswith(NEEDS_BROADCAST)


class MetricsSnapshot(Message, frozen=True, kw_only=True):
    """Metrics of one process: gauges, and counters since its start. `waits`: seconds spent waiting, by cause."""

    process: Name
    id: Name
    uptime_s: NonNegative = 0.0
    values: Annotated[dict[Name, Number], Meta(max_length=1024)] = field(default_factory=dict)
    waits: Annotated[dict[Name, Number], Meta(max_length=64)] = field(default_factory=dict)
    text: Annotated[dict[Name, Text], Meta(max_length=64)] = field(default_factory=dict)
