"""What a run's files say beside the journal: steps, validations, evaluations, logs and settings."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from deploy.config import RunConfig, from_tree
from deploy.run.history import StepRecords, numbers
from deploy.run.run_dir import configuration_of, read_configuration
from foray.watch.logs import LogFile, processes_of
from foray.watch.records import leaves
from protocol.errors import UserError
from protocol.redaction import redact
from protocol.runtime.files import lineage_of

MOST_POINTS = 1500
"""Points of a curve that are sent; more steps are averaged in bins."""
LOG_BYTES, LOG_ENTRIES = 256 * 1024, 1000
RESULTS = ("result.json", "protocol.json")


class StepFile(StepRecords):
    """The numbers of the steps, as columns for the charts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, shape=numbers)

    @property
    def last(self) -> dict[str, float]:
        """Return the newest step, {} before the first."""
        return dict(next(reversed(self.by_step.values()), {}))

    def names(self) -> list[str]:
        """Return the fields of the newest steps."""
        return sorted({name for step in list(self.by_step.values())[-50:] for name in step})

    def curves(self, names: Sequence[str]) -> dict[str, Any]:
        """Return `step` and the columns `names`, None where a step has no value, in at most MOST_POINTS points."""
        records = list(self.by_step.values())
        width = max(1, -(-len(records) // MOST_POINTS))
        bins = [records[i : i + width] for i in range(0, len(records), width)]
        columns = {name: [_mean(name, part) for part in bins] for name in names}
        return {"step": [part[-1]["step"] for part in bins], "columns": columns, "width": width}


def _mean(name: str, records: Sequence[Mapping[str, float]]) -> float | None:
    values = [record[name] for record in records if name in record]
    return sum(values) / len(values) if values else None


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the results of `foray eval` in the folder `evaluations` of the run directory, beside it or here, whose
    protocol names this run; the newest last.
    """
    lineage, found = lineage_of(run_dir), []
    for root in dict.fromkeys(p.resolve() for p in (run_dir, run_dir.parent, run_dir.parent.parent, Path())):
        for folder in sorted((root / "evaluations").glob("*/")):
            try:
                result, protocol = (json.loads((folder / name).read_text(encoding="utf-8")) for name in RESULTS)
                subject = dict(protocol["subject"])
                place = (root / str(subject.get("where"))).resolve()  # `where` is relative to the folder of --out
            except (OSError, ValueError, KeyError, TypeError):
                continue
            named = subject.get("lineage_id", "")
            ours = named == lineage if named and lineage else place.is_relative_to(run_dir.resolve())
            if root == run_dir.resolve() or ours:
                written = (folder / RESULTS[0]).stat().st_mtime
                found.append({"name": folder.name, "written": written, "result": result, "subject": subject})
    return sorted(found, key=lambda one: float(one["written"]))


def read_logs(run_dir: Path, name: str = "") -> dict[str, Any]:
    """Return the logs of a run, the one written last first, and the end of the log `name` (default: of the first): its
    newest entry first, at most LOG_ENTRIES of LOG_BYTES. Raises UserError for a log that is not there.
    """
    paths = {process: path for process, path in processes_of(run_dir).items() if path.is_file()}
    stats = sorted(
        ((path.stat(), process) for process, path in paths.items()), key=lambda s: s[0].st_mtime, reverse=True
    )
    files = [{"name": process, "bytes": stat.st_size, "written": stat.st_mtime} for stat, process in stats]
    if not name and not files:
        return {"files": [], "name": "", "entries": []}
    if (name := name or stats[0][1]) not in paths:
        raise UserError(f"there is no log {name[:80]!r}", todo=f"known: {', '.join(paths) or 'none'}")
    log = LogFile(paths[name], end=LOG_BYTES)
    entries = deque(log.read(), LOG_ENTRIES)
    log.close()
    shown = [{"at": e.at, "level": e.level, "error": e.is_error, "text": redact("\n".join(e.lines))} for e in entries]
    return {"files": files, "name": name, "entries": shown[::-1]}


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Return each setting in the run's configuration with its default; without defaults where this version does not
    know one of them."""
    if (path := configuration_of(run_dir)) is None:
        return {"file": "", "note": "the run directory has no configuration", "settings": []}
    tree, note = read_configuration(path, run_dir), ""
    try:
        found = list(_settings(from_tree(tree), RunConfig()))
    except UserError as error:
        note = f"the defaults are unknown: {error.what}"
        found = [(name, _text(value), None) for name, value in leaves(tree)]
    rows = [{"name": name, "value": redact(value), "default": default} for name, value, default in found]
    return {"file": path.name, "note": note, "settings": rows}


def _settings(settings: BaseModel, usual: Any, where: str = "") -> Iterator[tuple[str, str, str | None]]:
    """Yield (name, value, default) as text. `usual`: the default of the whole group, which may be of another type."""
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.get_default(call_default_factory=True)
        if type(usual) is type(settings) or name == "type":
            default = getattr(usual, name, default)
        if isinstance(value, BaseModel):
            yield from _settings(value, default, f"{where}{name}.")
        else:
            yield f"{where}{name}", _text(value), None if default is PydanticUndefined else _text(default)


def _text(value: Any) -> str:
    plain = to_jsonable_python(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
