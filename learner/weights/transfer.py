"""One version over one group, from prepare to verify: the protocol with the nodes. Runs in the training thread.

    prepare    view written; the members report in, join (a new group), and answer "prepared" without a
               detail; the first bucket is gathered meanwhile, on a GPU as many as it has room for
    transfer   view written; each bucket is sent while the next one is gathered
    verify     every member has answered with a checksum; those of one kind agree, and a member that reports its
               tensors has the policy's

Every wait has a deadline, and ends early if a member reports a failure or is gone.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait

import torch

from learner.config.learner import DistributedPublishSettings
from learner.weights.base import EngineLink
from learner.weights.buckets import PackedBucket
from learner.weights.checksums import SourceChecksums
from learner.weights.process_group import GroupSender
from protocol.errors import ForayError
from protocol.messages import NodeState, ViewAnswer, WeightView
from protocol.runtime.http.auth import Access, member_token, variable
from protocol.runtime.timing import PATIENCE

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between looks at the members while a bucket is sent. Otherwise an answer ends the wait at once."""
MEMBERSHIP_CHECK_S = 0.5
"""Seconds between checks of the members' registrations, and of all answers, while waiting for them."""
VIEW_OUTLIVES_S = 60.0
MOST_DOUBLINGS = 6
"""64 times the settings: a member that hangs is found by its node before that."""
GONE = (NodeState.SUSPECT, NodeState.QUARANTINED, NodeState.GONE)


class TransferFailed(ForayError):
    """The version did not reach every member. `missing`: members to exclude for a while; `late`: a limit is over."""

    def __init__(self, what: str, missing: Sequence[str] = (), *, late: bool = False) -> None:
        super().__init__(what)
        self.missing, self.late = tuple(missing), late


class Transfer:
    """Transfers one version. `seconds`: duration of each phase by name. Every method raises the errors of the link.

    sums    checksums of the sent tensors, complete when all are gathered; None: engines are compared only with each
            other
    dtypes  weight dtype of each member
    access  with a node token, only members that know it are admitted
    plan    the encoded WeightPlan that the view names; b"" if the view has the buckets itself
    """

    def __init__(
        self,
        link: EngineLink,
        sender: GroupSender,
        view: WeightView,
        sums: SourceChecksums | None,
        dtypes: Mapping[str, str],
        access: Access | None = None,
        plan: bytes = b"",
    ) -> None:
        self._link, self._sender, self.view, self._plan = link, sender, view, plan
        self._sums, self._dtypes, self._access = sums, dtypes, access or Access()
        self.seconds: dict[str, float] = {}
        self.answers: dict[str, ViewAnswer] = {}
        self._heard, self._next_roll_call = "0", time.monotonic() + MEMBERSHIP_CHECK_S
        self.slowest_s = 0.0
        """Seconds of the longest wait for a bucket or the checksums."""

    def run(
        self, buckets: Iterator[PackedBucket], *, prepare_s: float, transfer_s: float, stall_s: float, room: int = 0
    ) -> None:
        """Run the transfer; `buckets` is gathered as it is consumed. Raises TransferFailed and the errors of gathering.

        prepare_s, transfer_s  timeouts of the phases; stall_s: timeout of each single wait within the transfer
        room  bytes of buckets to gather before the members pause; the first one always is
        """
        began = time.monotonic()
        self._write("prepare", prepare_s)
        staged, exhausted = self._stage(buckets, room, began + prepare_s / 2)
        joined = self._sender.joined
        self._wait(lambda: self._all("prepared", "loaded") and joined.done(), began + prepare_s, "prepare", joined)
        self._settled(joined)
        self._admit()
        self.seconds["prepare"] = time.monotonic() - began - self.seconds["gather"]
        began = time.monotonic()
        self._write("transfer", transfer_s)
        self._send(staged, iter(()) if exhausted else buckets, began + transfer_s, stall_s)
        sent = time.monotonic()
        self._wait(lambda: self._all("loaded"), min(began + transfer_s, sent + stall_s), "transfer")
        self.slowest_s = max(self.slowest_s, time.monotonic() - sent)
        self.seconds["verify"] = max(answer.verify_s for answer in self.answers.values())
        self.seconds["transfer"] = time.monotonic() - began - self.seconds["verify"]
        self._compare()

    def abort(self) -> None:
        """Notify the members that the transfer is aborted."""
        self._write("abort", 0.0)

    def commit(self) -> None:
        """Notify the members to resume with the new version, which is already the target."""
        self._write("commit", VIEW_OUTLIVES_S)

    def _stage(self, buckets: Iterator[PackedBucket], room: int, until: float) -> tuple[list[PackedBucket], bool]:
        """Gather what there is room and time for, at least one bucket. Return it, and whether that is all."""
        staged: list[PackedBucket] = []
        sizes: list[int] = [0]
        # the next bucket is about as large as the largest so far: only a tensor that is alone in its own is larger
        while not staged or (sum(sizes) + max(sizes) <= room and time.monotonic() < until):
            packed = self._gather(buckets)
            if packed is None:
                return staged, True
            staged.append(packed)
            sizes.append(packed.flat.numel())
        return staged, False

    def _send(self, staged: list[PackedBucket], rest: Iterator[PackedBucket], deadline: float, stall_s: float) -> None:
        under_way = deque(self._sender.send(self._tensors(packed)) for packed in staged)
        staged.clear()
        while True:
            packed = self._gather(rest)
            while under_way and (len(under_way) > 1 or packed is None):  # one being sent, one ready
                sent = under_way[0]
                asked = time.monotonic()
                self._wait(sent.done, min(deadline, asked + stall_s), "transfer", sent)
                self.slowest_s = max(self.slowest_s, time.monotonic() - asked)
                self._settled(under_way.popleft())
            if packed is None:
                return
            under_way.append(self._sender.send(self._tensors(packed)))

    def _tensors(self, packed: PackedBucket) -> list[torch.Tensor]:
        return [packed.flat] if self.view.flattened else [tensor for _, tensor in packed.tensors()]

    def _gather(self, buckets: Iterator[PackedBucket]) -> PackedBucket | None:
        began = time.monotonic()
        packed = next(buckets, None)
        self.seconds["gather"] = self.seconds.get("gather", 0.0) + time.monotonic() - began
        return packed

    def _settled(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            raise TransferFailed(f"the group is broken: {str(error).strip().splitlines()[0][:300]}")

    def _write(self, phase: str, seconds: float) -> None:
        buckets = self.view.buckets if phase in ("prepare", "transfer") else ()  # nodes read it several times
        now = self._link.now()
        self.view = self.view.model_copy(update={"phase": phase, "deadline": now + seconds, "buckets": buckets})
        self._link.view(self.view, seconds + VIEW_OUTLIVES_S, self._plan if phase == "prepare" else b"")

    def _wait(self, until: Callable[[], bool], deadline: float, phase: str, wakes: Future[None] | None = None) -> None:
        """Wait for `until`: for an answer, or while `wakes` is not done for that, with a look every POLL_S."""
        while not until():
            left_s = max(0.0, deadline - time.monotonic())
            if wakes is not None and not wakes.done():
                wait([wakes], min(POLL_S, left_s))
                self._listen(0.0)
            else:
                self._listen(min(MEMBERSHIP_CHECK_S, left_s))
            if not until() and time.monotonic() > deadline:  # the last answers may complete it
                raise self._late(phase)

    def _all(self, *phases: str) -> bool:
        heard = self.answers
        return all(m in heard and heard[m].phase in phases and not heard[m].detail for m in self.view.members)

    def _late(self, phase: str) -> TransferFailed:
        """Return the failure, blaming silent members and those behind the others; if all hang, it may be any of
        them."""
        silent = [member for member in self.view.members if member not in self.answers]
        behind = silent or [m for m in self.view.members if not self._through(self.answers[m])]
        blamed = behind if silent or len(behind) < len(self.view.members) else []
        return TransferFailed(f"{phase} timed out, waiting for {', '.join(behind)}", blamed, late=True)

    def _admit(self) -> None:
        """Raise TransferFailed for a member without the token of the run: no tensor is sent before."""
        for member in self.view.members:
            wanted = member_token(self._access, member, self.view.group)
            if wanted and not hmac.compare_digest(wanted, self.answers[member].token):
                node = variable("node")
                raise TransferFailed(
                    f"{member} is not admitted to the group: its node has another {node} than the learner", [member]
                )

    def _through(self, answer: ViewAnswer) -> bool:
        """Return whether a member has completed the phase; one that still joins answers with a detail."""
        return answer.phase == "loaded" or (self.view.phase, answer.phase, answer.detail) == ("prepare", "prepared", "")

    def _listen(self, wait_s: float) -> None:
        """Read answers; wait up to `wait_s` for one. Raises TransferFailed if a member reports a failure or is gone.

        At a roll call all are read: one that could not be written to the stream is late by so much.
        """
        epoch, number, look = self.view.epoch, self.view.number, time.monotonic() > self._next_roll_call
        found, self._heard = self._link.next_answers(epoch, number, self._heard, 0.0 if look else wait_s)
        self.answers = (self.answers | found) if not look else self._link.answers(epoch, number)
        for member in self.view.members:
            answer = self.answers.get(member)
            if answer is not None and answer.phase == "failed":
                raise TransferFailed(f"{member}: {answer.detail}", [member] if self.view.phase == "prepare" else [])
        if not look:
            return
        self._next_roll_call = time.monotonic() + MEMBERSHIP_CHECK_S
        present = {f"{e.id}/{e.incarnation}": e for e in self._link.engines()}
        for member in self.view.members:
            info = present.get(member)
            if info is None or (info.state in GONE and not info.needs_broadcast):
                raise TransferFailed(f"{member} is gone", [member])

    def _compare(self) -> None:
        """Raise TransferFailed unless engines of one kind agree, and each reported checksum matches what was sent."""
        sums: dict[str, dict[str, str]] = {}
        for member in self.view.members:
            answer = self.answers[member]
            sums.setdefault(answer.kind, {})[member] = answer.checksum
            if self._sums is None or not answer.tensors_sha256:
                continue
            if answer.tensors_sha256 != self._sums.total(self._dtypes[member], answer.unused):
                raise TransferFailed(f"the weights of {member} differ from the policy")
        for kind, by_member in sums.items():
            if len(set(by_member.values())) > 1:
                raise TransferFailed(f"the checksums of the {kind} engines differ: {by_member}")

    def digest(self) -> str:
        """Return the members' checksums, by kind."""
        found = {answer.kind: answer.checksum[:32] for answer in self.answers.values()}
        return ",".join(f"{kind}:{checksum}" for kind, checksum in sorted(found.items()))[:256]


class TransferLimits:
    """The limits of the next transfer: of one wait `stall_s`, of the phases what follows from it.

    The settings are floors. A wait may take PATIENCE times the longest recent one that ended well. Before there is one,
    nothing says how fast network and engines are: each transfer that was too late doubles the floors, and each that
    ended well takes one doubling back.
    """

    def __init__(self, settings: DistributedPublishSettings) -> None:
        self._settings, self._doublings, self._slowest_s, self._prepare_s = settings, 0, 0.0, 0.0

    @property
    def stall_s(self) -> float:
        """Limit of the wait for one bucket, or for the last checksum, in seconds."""
        return max(self._settings.stall_s * 2.0**self._doublings, PATIENCE * self._slowest_s)

    @property
    def join_s(self) -> float:
        """Limit of the first phase, in seconds."""
        return max(self._settings.join_s * 2.0**self._doublings, PATIENCE * self._prepare_s)

    def transfer_s(self, buckets: int) -> float:
        """Limit of the second phase, in seconds: what the waits for its buckets and checksums may take together."""
        return max(self._settings.transfer_s, self.stall_s * (buckets + 1))

    def note(self, transfer: Transfer) -> None:
        """Note a transfer that ended well."""
        self._doublings = max(0, self._doublings - 1)
        self._slowest_s = max(transfer.slowest_s, 0.9 * self._slowest_s)
        self._prepare_s = max(transfer.seconds["prepare"], 0.9 * self._prepare_s)

    def failed(self, error: BaseException | None) -> None:
        """Note a transfer that failed."""
        if isinstance(error, TransferFailed) and error.late:
            self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)
