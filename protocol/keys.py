"""All Redis keys of a run. The braces are a hash tag: the keys of one run share one slot.

key                 type     owner      if lost, and notes
tasks               stream   learner    reissued from the sampler (group `rollout`)
traj                stream   rollouts   generated again (group `learner`)
issued              string   learner    its floor is the ledger's watermark
learner:epoch       string   learner    max with the checkpoint
learner:lease       hash     learner    acquired again; TTL
wv:target           hash     learner    published again
wv:view             string   learner    a new view is made; TTL
wv:plan             string   learner    the tensors of the view, under their sha256 in it: written with every view; TTL
wv:wake             stream   functions  an entry for each change of target and view, to wake the nodes; the last 8
wv:validated        string   learner    the version under validation, for engines that have not loaded it; TTL
wv:answers:{e}.{n}  hash     nodes      the view times out; TTL
 ..:new             stream   nodes      the same answers, for a learner that waits for the next; TTL
engine:{id}         string   node       registers again; TTL
engines             zset     node       id -> expiry in Redis seconds, for listing without KEYS
metrics:{p}:{id}    string   process    reported again; TTL; also registers a retriever or rollout server (url, state)
processes           zset     process    "{p}:{id}" -> expiry, for listing without KEYS
tokens              hash     functions  tokens of attempts that ended (published, rejected) since Redis was empty
meta                hash     learner    written at every start: lineage id, schema, tokenizer, settings of the run
events              stream   anyone     event log for users; bounded, informational
dlq                 stream   anyone     dead letters; bounded, the learner's files are authoritative
requeue             set      operator   seqs to try again, added by a user; the learner empties it
drain               set      operator   ids of engines to drain, added by a user; each node removes its own
launcher            hash     operator   `engines`: how many engines `foray up` shall run instead of its configuration's;
                                        `stop`: the launcher (HOST:PID:START) that shall stop the run
evaluation          string   rollouts   while set, weight updates wait (`VersionPin`); TTL
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import UserError
from protocol.settings import RUN_ID

TASK_GROUP = "rollout"
TRAJ_GROUP = "learner"


@dataclass(frozen=True)
class _KeyName:
    """A key of every run: `Keys("r").tasks` is `{r}:tasks`."""

    name: str

    def __get__(self, keys: Keys, owner: type[Keys]) -> str:
        return keys._key(self.name)


@dataclass(frozen=True)
class Keys:
    """Key names of run `run` (letters, digits and hyphens; raises UserError otherwise)."""

    run: str

    tasks = _KeyName("tasks")
    traj = _KeyName("traj")
    issued = _KeyName("issued")
    epoch = _KeyName("learner:epoch")
    lease = _KeyName("learner:lease")
    target = _KeyName("wv:target")
    validated = _KeyName("wv:validated")
    view = _KeyName("wv:view")
    plan = _KeyName("wv:plan")
    wake = _KeyName("wv:wake")
    engines = _KeyName("engines")
    processes = _KeyName("processes")
    tokens = _KeyName("tokens")
    meta = _KeyName("meta")
    events = _KeyName("events")
    dlq = _KeyName("dlq")
    requeue = _KeyName("requeue")
    drain = _KeyName("drain")
    launcher = _KeyName("launcher")
    evaluation = _KeyName("evaluation")

    def __post_init__(self) -> None:
        if not RUN_ID.match(self.run):
            raise UserError(f"run.id = {self.run!r} is not valid", todo="use at most 63 of a-z, 0-9 and '-'")

    def _key(self, name: str) -> str:
        return f"{{{self.run}}}:{name}"

    def answers(self, epoch: int, number: int) -> str:
        return self._key(f"wv:answers:{epoch}.{number}")

    def new_answers(self, epoch: int, number: int) -> str:
        return f"{self.answers(epoch, number)}:new"

    def engine(self, engine_id: str) -> str:
        return self._key(f"engine:{engine_id}")

    def metrics(self, process: str, process_id: str) -> str:
        return self._key(f"metrics:{process}:{process_id}")
