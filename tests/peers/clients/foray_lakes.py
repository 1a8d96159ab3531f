"""A small taskset of verifiers: the second task wants the answer c."""

import verifiers.v1 as vf


class LakesTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float("c" in (trace.last_reply or ""))


class LakesTaskset(vf.Taskset[LakesTask, vf.TasksetConfig]):
    def load(self) -> list[LakesTask]:
        return [LakesTask(vf.TaskData(prompt=prompt), self.config.task) for prompt in ("a ?", "a b ?")]


__all__ = ["LakesTaskset"]
