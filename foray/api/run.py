"""A run as an object: what `foray status`, `curves`, `replay`, `export` and `down` show, as values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.run.history import StepTail, read_steps
from deploy.run.run_dir import is_held, locate, read_record
from foray.api.callables import CallableServer
from protocol.errors import ForayError
from protocol.runtime.progress import Progress

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedModel

    from foray.api.serve import PolicyServer
    from learner.checkpoint.journal import JournalEntry

LOG = "up.log"
TAIL = 40
"""Lines of the log in the error of a run that failed."""
POLL_S = 0.5


class RunFailed(ForayError):
    """A run ended without being done. str() has the end of its log."""


class Run:
    """A run in `directory`, whether or not it is in progress. `foray.Run("runs/x")` opens any run.

    `process` and `server` belong to a run that this process started: `foray.train_grpo`.
    """

    def __init__(
        self,
        directory: str | Path,
        process: subprocess.Popen[bytes] | None = None,
        server: CallableServer | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._process, self._server = process, server

    def __repr__(self) -> str:
        return f"foray.Run({str(self.directory)!r}): {self.state}"

    @property
    def state(self) -> str:
        """Return "starting", "running", "stopping", "done", "stopped" or "failed"."""
        ours, alive = self._process is not None, self._process is not None and self._process.poll() is None
        state = read_record(self.directory).get("state")
        if state is None or (alive and not is_held(self.directory)):  # a record is of this start, or of one before
            return "failed" if ours and not alive else "starting"
        return str(state)

    def status(self) -> dict[str, Any]:
        """Return what `foray status --json` prints: steps, accounting, engines, problems. Raises ForayError."""
        from foray.watch.status import look, to_json

        found = locate(Namespace(given=[str(self.directory)], config=None))
        return to_json(look(found), max_lag=found.run.max_lag)

    def diagnose(self, *, corpus: bool = True) -> dict[str, Any]:
        """Return what `foray diagnose --json` prints: findings, what to try, trajectories. Raises ForayError."""
        from foray.watch.findings import diagnose

        found = locate(Namespace(given=[str(self.directory)], config=None), without_redis=True)
        return diagnose(found, corpus=corpus)

    def steps(self) -> list[dict[str, Any]]:
        """Return one mapping per trained step, of metrics.jsonl (docs/metrics.md names its fields)."""
        return list(read_steps(self.directory / "metrics.jsonl").values())

    def groups(self) -> Iterator[JournalEntry]:
        """Yield the trained groups in order, from the journal: token ids, log-probs, versions, rewards."""
        from foray.watch.records import trained_groups

        return trained_groups(self.directory)

    def table(self) -> pyarrow.Table:
        """Return the trajectories of the journal, a row each: `to_pandas()`, or `datasets.Dataset(table)`.

        ids, mask (1: sampled by the policy), logprobs (0 where it did not) and versions (the step whose policy sampled
        the token; -1 where none did) have one item per token.
        """
        import pyarrow

        return pyarrow.Table.from_pylist([row for entry in self.groups() for row in _rows(entry)])

    def tokens(self, seq: int, index: int = 0) -> list[dict[str, Any]]:
        """Return the tokens of a trained trajectory, a mapping each.

        position, id, text, owner (prompt, policy, environment); of the policy's tokens version (the step whose policy
        sampled it) and logprob (when it was sampled). In steps whose values the learner kept (`learner.token_values`)
        also trained_logprob (of the policy that was updated) and advantage.

        Raises KeyError if the group was not trained, IndexError for another index.
        """
        from foray.watch.records import find_tokenizer, read_settings, trained_groups
        from learner.data.token_values import read_token_values

        entry = next(trained_groups(self.directory, seq=seq, last=1), None)
        if entry is None:
            raise KeyError(f"no group {seq} is in the journal of {self.directory}")
        trajectory = entry.group.trajectories[index]
        tokenizer = find_tokenizer(self.directory, None, read_settings(self.directory))
        values = read_token_values(self.directory, entry.step, seq, index)
        computed = {int(at): place for place, at in enumerate(values.get("position", ()))}
        owners = [segment.owner.value for segment in trajectory.segments for _ in segment.ids]
        found = []
        for at, (token, owner, own) in enumerate(zip(trajectory.ids.tolist(), owners, trajectory.mask, strict=True)):
            row = {"position": at, "id": token, "text": tokenizer.decode([token]), "owner": owner}
            if own:
                row |= {"version": int(trajectory.versions[at, 1]), "logprob": float(trajectory.logprobs[at])}
            if (place := computed.get(at)) is not None:
                row["trained_logprob"] = float(values["logprob"][place])
                row["advantage"] = float(values["advantage"][place])
            found.append(row)
        return found

    def wait(self, *, progress: bool = True, timeout_s: float | None = None) -> Run:
        """Wait until the run ends and return it; show its steps if `progress`. Raises RunFailed, TimeoutError."""
        say = Progress.on(sys.stderr) if progress else None
        steps = StepTail(self.directory / "metrics.jsonl", start=1 << 62)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._alive():
            for record in steps.read():
                if say is not None:
                    say(_line(record))
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{self.directory} has not ended within {timeout_s:g} s")
            time.sleep(POLL_S)
        self._close()
        if self.state != "done":
            raise RunFailed(f"the run in {self.directory} is {self.state}; the end of its log:\n{self.log(TAIL)}")
        return self

    def log(self, lines: int = TAIL) -> str:
        """Return the last lines that the launcher printed."""
        path = self.directory / LOG
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def stop(self, *, timeout_s: float = 120.0) -> Run:
        """Stop the run in order: its learner writes a checkpoint. The same settings resume it. Raises ForayError."""
        from foray.commands import down

        if self._process is not None and self._process.poll() is None and not is_held(self.directory):
            os.kill(self._process.pid, signal.SIGTERM)  # it has not begun yet
        elif is_held(self.directory):
            down.stop(self.directory, timeout_s)
        if self._process is not None:
            self._process.wait(timeout_s)
        self._close()
        return self

    def export(self, out: str | Path) -> Path:
        """Write the newest checkpoint's policy as a Hugging Face folder and return it. Raises UserError."""
        run_command("export", str(self.directory), str(out))
        return Path(out)

    def serve(self, **options: Any) -> PolicyServer:
        """Serve its policy to OpenAI's clients: `foray.serve`, with its options. Raises ForayError."""
        from foray.api.serve import serve

        return serve(self.directory, **options)

    def result(self) -> PreTrainedModel:
        """Wait for the end and return the trained model. Raises RunFailed."""
        from transformers import AutoModelForCausalLM

        self.wait()
        out = self.directory / "model-trained"
        if not out.exists():
            self.export(out)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(out)
        return model

    def _alive(self) -> bool:
        started = self._process is not None and self._process.poll() is None
        return started or is_held(self.directory)

    def _close(self) -> None:
        """Let go of what belongs to a run that has ended. Idempotent."""
        if self._process is not None:
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self._server is not None:
            self._server.close()


def run_command(*words: str) -> str:
    """Run a command of the CLI and return what it prints. Raises ForayError with what it says."""
    done = subprocess.run([sys.executable, "-m", "foray", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ForayError(f"foray {words[0]} failed:\n{done.stderr.strip()[-4000:]}")
    return done.stdout


def _line(record: dict[str, Any]) -> str:
    reward = record.get("reward_mean")
    return f"step {record.get('step')}" + (f": reward {reward:.3f}" if isinstance(reward, float) else "")


def _rows(entry: JournalEntry) -> Iterator[dict[str, Any]]:
    question = entry.group.question
    for index, trajectory in enumerate(entry.group.trajectories):
        yield {
            "step": entry.step,
            "seq": entry.group.seq,
            "index": index,
            "question": question.text,
            "answers": list(question.answers),
            "answer": trajectory.answer,
            "status": trajectory.status.value,
            "reward": trajectory.reward,
            "searches": trajectory.searches,
            "ids": trajectory.ids.tolist(),
            "mask": trajectory.mask.astype("int8").tolist(),
            "logprobs": trajectory.logprobs.tolist(),
            "versions": trajectory.versions[:, 1].tolist(),
        }
