"""Pictures of a run: `python -m benchmarks.pages.captures RUN_DIR [top trajectory lag]`.

Writes docs/figures/top.svg (what `foray top` shows; call it while the run trains), docs/figures/trajectory.svg (what
`foray replay` prints) and docs/figures/lag.svg (from which version each trained trajectory was sampled).
"""

from __future__ import annotations

import argparse
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, takewhile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from benchmarks.pages.plots import GREY, themed
from benchmarks.report import ROOT
from deploy.run.run_dir import add_arguments, locate
from foray.watch.plot import COLOURS
from foray.watch.records import find_tokenizer, read_lineage, read_settings, trained_groups
from foray.watch.status import look
from foray.watch.top import frame, read_searches
from foray.watch.transcript import Shown, render
from learner.checkpoint.journal import JournalEntry

COLUMNS = 84
SVG = re.sub(r"@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT, flags=re.S).replace("Fira Code", "DejaVu Sans Mono")
"""rich's format without fonts from another host."""
BETWEEN_S = 4.0
FIRST_STEPS = 12
OF_LAG = (COLOURS[2], COLOURS[0], COLOURS[1], COLOURS[3])


def save(path: Path, title: str, text: Text) -> None:
    """Write text as a picture of a terminal of COLUMNS columns."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text)
    path.write_text(console.export_svg(title=title, code_format=SVG, unique_id=path.stem))


def top(directory: Path, path: Path) -> None:
    """Write one frame of `foray top`, with rates over BETWEEN_S seconds."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    found = locate(parser.parse_args([str(directory)]))
    before = look(found)
    time.sleep(BETWEEN_S)
    found = found.refreshed()
    snapshot = look(found)
    searches = read_searches(found.urls(snapshot, "retriever"))
    rows = frame(snapshot, before, searches, max_lag=found.run.max_lag).rows(COLUMNS)
    bold = ("run ", "  engine ", "  time spent ")
    styles = [(line, "bold red" if part == "problems" else "bold" * line.startswith(bold)) for part, line in rows]
    save(path, f"foray top {directory}", Text("\n").join(Text(line, style) for line, style in styles))


def trajectory(directory: Path, path: Path) -> None:
    """Write, of the last groups, the shortest trajectory with the highest reward and two searches or more."""
    run, lineage = read_settings(directory), read_lineage(directory)
    shown = [
        Shown(entry.group, index, entry.step, entry.epoch, run.max_lag if run else None, lineage)
        for entry in trained_groups(directory, last=64)
        for index in range(len(entry.group.trajectories))
    ]
    best = max(
        shown, key=lambda one: (one.trajectory.reward, min(2, one.trajectory.searches), -len(one.trajectory.ids))
    )
    text = render(best, find_tokenizer(directory, None, run), colour=True)
    save(path, f"foray replay {directory} --seq {best.group.seq}", Text.from_ansi(text))


def sampled(entries: list[JournalEntry]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (position, lag, version's step, tokens) of each trained trajectory, in the order of training."""
    position = 0
    for entry in entries:
        for index in range(len(entry.group.trajectories)):
            shown = Shown(entry.group, index, entry.step, entry.epoch)
            for segment in shown.trajectory.segments:
                for span, behind, _ in shown.spans(segment):
                    yield position, behind, span.step, span.end - span.start
            position += 1


def joined(marks: Iterable[tuple[int, int]]) -> list[tuple[float, int]]:
    """Return the ends of lines one trajectory wide, neighbours of one version as one line, NaN between two lines."""
    lines: list[list[int]] = []
    for position, version in sorted(set(marks), key=lambda mark: mark[::-1]):
        if lines and lines[-1][1:] == [position, version]:
            lines[-1][1] = position + 1
        else:
            lines.append([position, position + 1, version])
    return [(x, version) for start, end, version in lines for x in (start, end, float("nan"))]


def lag(directory: Path, path: Path) -> None:
    """Plot the version of each trained token below that of the learner, over the first FIRST_STEPS steps."""
    entries = list(takewhile(lambda entry: entry.step <= FIRST_STEPS, trained_groups(directory)))
    marks, run = list(sampled(entries)), read_settings(directory)
    with themed(path, (8.0, 4.5)) as figure:
        axes = figure.add_subplot()
        begin, middles, names, stairs = 0, [], [], []
        for step, group in groupby(entries, key=lambda entry: entry.step):
            end = begin + sum(len(entry.group.trajectories) for entry in group)
            stairs += [(begin, step - 1), (end, step - 1)]
            middles.append((begin + end) / 2)
            names.append(str(step))
            begin = end
        axes.plot(*zip(*stairs, strict=True), color=GREY, linewidth=6, alpha=0.35, label="the learner's version")
        total = sum(tokens for *_, tokens in marks)
        for behind in sorted({mark[1] for mark in marks}):
            of_lag = [mark for mark in marks if mark[1] == behind]
            share = sum(tokens for *_, tokens in of_lag) / total
            points = joined((position, version) for position, _, version, _ in of_lag)
            percent = f"{share:.0%}" if share >= 0.005 else "below 1%"
            masked = ", masked" if run and behind > run.max_lag else ""
            label = f"sampled with lag {behind}: {percent} of the tokens{masked}"
            axes.plot(*zip(*points, strict=True), color=OF_LAG[behind % len(OF_LAG)], linewidth=3, label=label)
        axes.set_xticks(middles, names)
        axes.set_xlabel("trained trajectories in their order, by the step that trained them")
        axes.set_ylabel("version of the weights (step)")
        axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)


PICTURES: dict[str, Callable[[Path, Path], None]] = {"top": top, "trajectory": trajectory, "lag": lag}


def main() -> None:
    """Write the pictures that the command line names, by default all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages.captures")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    args = parser.parse_args()
    for name in args.names or PICTURES:
        PICTURES[name](args.run_dir, args.out / f"{name}.svg")


if __name__ == "__main__":
    main()
