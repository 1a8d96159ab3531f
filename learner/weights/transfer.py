"""One version over one group, from prepare to verify: the protocol with the nodes. Runs in the training thread.

    prepare    view written; the members report in, join (a new group), and answer "prepared" without a
               detail; the first bucket is gathered meanwhile
    transfer   view written; each bucket is sent while the next one is gathered
    verify     every member has answered with a checksum; those of one kind agree, and a member that reports its
               tensors has the policy's

Every wait has a deadline, and ends early if a member reports a failure or is gone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from learner.weights.base import EngineLink
from learner.weights.buckets import PackedBucket
from learner.weights.checksums import SourceChecksums
from learner.weights.process_group import GroupSender
from protocol.errors import ForayError
from protocol.messages import NodeState, ViewAnswer, WeightView

log = logging.getLogger(__name__)

POLL_S = 0.005
MEMBERSHIP_CHECK_S = 0.5
"""Seconds between checks of the members' registrations while waiting for them."""
VIEW_OUTLIVES_S = 60.0
GONE = (NodeState.SUSPECT, NodeState.QUARANTINED, NodeState.GONE)


class TransferFailed(ForayError):
    """The version did not reach every member. `missing`: members to exclude for a while."""

    def __init__(self, what: str, missing: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.missing = tuple(missing)


class Transfer:
    """Transfers one version. `seconds`: duration of each phase by name. Every method raises the errors of the link.

    sums    checksums of the sent tensors, complete when all are gathered
    dtypes  weight dtype of each member
    """

    def __init__(
        self, link: EngineLink, sender: GroupSender, view: WeightView, sums: SourceChecksums, dtypes: Mapping[str, str]
    ) -> None:
        self._link, self._sender, self.view = link, sender, view
        self._sums, self._dtypes = sums, dtypes
        self.seconds: dict[str, float] = {}
        self.answers: dict[str, ViewAnswer] = {}
        self._next_roll_call = 0.0

    def run(self, buckets: Iterator[PackedBucket], *, prepare_s: float, transfer_s: float, stall_s: float) -> None:
        """Run the transfer; `buckets` is gathered as it is consumed. Raises TransferFailed and the errors of gathering.

        prepare_s, transfer_s  timeouts of the phases; stall_s: timeout of each single wait within the transfer
        """
        began = time.monotonic()
        self._write("prepare", prepare_s)
        first = self._gather(buckets)
        self._wait(lambda: self._all("prepared", "loaded") and self._sender.joined.done(), began + prepare_s, "prepare")
        self._settled(self._sender.joined)
        self.seconds["prepare"] = time.monotonic() - began - self.seconds["gather"]
        began = time.monotonic()
        self._write("transfer", transfer_s)
        self._send(first, buckets, began + transfer_s, stall_s)
        self._wait(lambda: self._all("loaded"), min(began + transfer_s, time.monotonic() + stall_s), "transfer")
        self.seconds["verify"] = max(answer.verify_s for answer in self.answers.values())
        self.seconds["transfer"] = time.monotonic() - began - self.seconds["verify"]
        self._compare()

    def abort(self) -> None:
        """Notify the members that the transfer is aborted."""
        self._write("abort", 0.0)

    def commit(self) -> None:
        """Notify the members to resume with the new version, which is already the target."""
        self._write("commit", VIEW_OUTLIVES_S)

    def _send(self, first: PackedBucket | None, rest: Iterator[PackedBucket], deadline: float, stall_s: float) -> None:
        under_way: deque[Future[None]] = deque()
        packed = first
        while packed is not None:
            tensors = [packed.flat] if self.view.flattened else [tensor for _, tensor in packed.tensors()]
            under_way.append(self._sender.send(tensors))
            packed = self._gather(rest)
            while under_way and (len(under_way) > 1 or packed is None):  # one being sent, one ready
                self._wait(under_way[0].done, min(deadline, time.monotonic() + stall_s), "transfer")
                self._settled(under_way.popleft())

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
        buckets = self.view.buckets if phase in ("prepare", "transfer") else ()  # nodes poll it
        now = self._link.now()
        self.view = WeightView.model_validate(
            {**self.view.model_dump(), "phase": phase, "deadline": now + seconds, "buckets": buckets}
        )
        self._link.view(self.view, seconds + VIEW_OUTLIVES_S)

    def _wait(self, until: Callable[[], bool], deadline: float, phase: str) -> None:
        while not until():
            self._listen()
            if time.monotonic() > deadline:
                raise self._late(phase)
            if until():  # the last answers may complete it
                return
            time.sleep(POLL_S)

    def _all(self, *phases: str) -> bool:
        heard = self.answers
        return all(m in heard and heard[m].phase in phases and not heard[m].detail for m in self.view.members)

    def _late(self, phase: str) -> TransferFailed:
        """Return the failure, blaming silent members and those behind the others; if all hang, it may be any of
        them."""
        silent = [member for member in self.view.members if member not in self.answers]
        behind = silent or [m for m in self.view.members if self.answers[m].phase != "loaded"]
        blamed = behind if silent or len(behind) < len(self.view.members) else []
        return TransferFailed(f"{phase} timed out, waiting for {', '.join(behind)}", blamed)

    def _listen(self) -> None:
        """Read the answers. Raises TransferFailed if a member reports a failure or is gone."""
        self.answers = self._link.answers(self.view.epoch, self.view.number)
        for member in self.view.members:
            answer = self.answers.get(member)
            if answer is not None and answer.phase == "failed":
                raise TransferFailed(f"{member}: {answer.detail}", [member] if self.view.phase == "prepare" else [])
        if time.monotonic() < self._next_roll_call:
            return
        self._next_roll_call = time.monotonic() + MEMBERSHIP_CHECK_S
        present = {f"{e.id}/{e.incarnation}": e for e in self._link.engines()}
        for member in self.view.members:
            if member not in present or present[member].state in GONE:
                raise TransferFailed(f"{member} is gone", [member])

    def _compare(self) -> None:
        """Raise TransferFailed unless engines of one kind agree, and each reported checksum matches what was sent."""
        sums: dict[str, dict[str, str]] = {}
        for member in self.view.members:
            answer = self.answers[member]
            sums.setdefault(answer.kind, {})[member] = answer.checksum
            wanted = self._sums.total(self._dtypes[member], answer.unused)
            if answer.tensors_sha256 and answer.tensors_sha256 != wanted:
                raise TransferFailed(f"the weights of {member} differ from the policy")
        for kind, by_member in sums.items():
            if len(set(by_member.values())) > 1:
                raise TransferFailed(f"the checksums of the {kind} engines differ: {by_member}")

    def digest(self) -> str:
        """Return the members' checksums, by kind."""
        found = {answer.kind: answer.checksum[:32] for answer in self.answers.values()}
        return ",".join(f"{kind}:{checksum}" for kind, checksum in sorted(found.items()))[:256]
