"""`make figures`: which figures are made again, and the page generated from the files."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import BENCHMARKS
from benchmarks.base import Target
from benchmarks.figures import __main__ as figures_run
from benchmarks.figures.page import MET, PAGES, STALE, page
from benchmarks.figures.table import FOLDER, NEEDS_GPU, Figure, figures, read, stale
from benchmarks.pages import plots
from benchmarks.pages.hardware import CHECKED
from benchmarks.report import ROOT, digest, judged
from deploy.hardware.gpus import without_cuda
from protocol.errors import ForayError
from protocol.runtime.number_format import CpuSpeed
from tests.gpu.check import TESTS
from tests.support.waiting import wait_until

VERSION = Figure("packing", ("version", "--json"), ("protocol/versions.py",), (Target("lots", 2.0, "how many"),))


def report(figure: Figure, **changed: Any) -> dict[str, Any]:
    """A file of FOLDER, as up to date as can be."""
    found = {
        "name": figure.name,
        "value": 3.0,
        "unit": "apples",
        "ratio": 1.5,
        "baseline": {"name": "pears", "size": 2.0},
    }
    machine = {
        "date": "2026-01-02",
        "commit": "abc1234",
        "cores": 2,
        "cpu": "a CPU",
        "load_1m": 0.5,
        "load_1m_end": 1.0,
    }
    envelope = {
        "figure": figure.name,
        "command": figure.command,
        "machine": machine | {"run_s": 9.0},
        "modules": {"hash": digest(figure.modules), "paths": []},
        "targets": [judged(target, found) for target in figure.targets],
    }
    return found | envelope | changed


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_is_what_the_files_and_the_template_make(path: Path) -> None:
    assert path.read_text() == page(PAGES[path]), "run `make page`: the code of a figure has changed"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_says_what_it_measures_and_each_module_is_there(name: str) -> None:
    assert BENCHMARKS[name].modules and len(digest(BENCHMARKS[name].modules)) == 16
    assert BENCHMARKS[name].targets or name == "retriever_gpu", "a speed without a target cannot be missed"


def test_figures_are_commands_with_known_flags_and_all_that_was_measured_is_one() -> None:
    known = figures()
    assert set(BENCHMARKS) < set(known) and {
        "demo-4",
        "demo-agent-0",
        "demo-agent-1",
        "demo-control",
        "demo-hard-4",
        "demo-hard-control",
        "compare-grpo",
    } < set(known)
    for figure in known.values():
        if figure.argv[0] == "bench":
            flags = {word[2:].replace("-", "_") for word in figure.argv if word.startswith("--")} - {"json"}
            assert flags <= set(BENCHMARKS[figure.argv[1]].model_fields), figure.command
    assert {path.stem for path in FOLDER.glob("*.json")} <= {*known, CHECKED.stem}


def test_the_plots_are_made_from_the_figures(tmp_path: Path) -> None:
    plots.main(tmp_path)
    for path in tmp_path.iterdir():
        kept = ROOT / "docs" / path.name
        assert kept.read_bytes() == path.read_bytes(), "python -m benchmarks.pages.plots"
        assert len(kept.read_bytes()) < 150_000


def test_files_hold_no_place_of_one_machine() -> None:
    for path in FOLDER.glob("*.json"):
        assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users|var)/", path.read_text()), path.name


def test_a_figure_whose_code_has_changed_is_marked_stale(tmp_path: Path) -> None:
    template = tmp_path / "template.md"
    names = [name for name in figures() if name.partition("-")[0] not in ("demo", "compare")]
    template.write_text(
        "# T\n{{summary}}\n{{demo}}\n{{demo-curves}}\n" + "\n".join(f"{{{{{name}}}}}" for name in names) + "\n"
    )
    engine, demo = figures()["engine"], figures()["demo-3"]
    (tmp_path / engine.path.name).write_text(json.dumps(report(engine)))
    (tmp_path / demo.path.name).write_text(json.dumps(report(demo, curve=[0.5] * 10 + [0.7, 0.9])))
    fresh = page(template, tmp_path)
    assert "| steps | 3 |\n| --- | --- |\n| 1-10 | 0.50 |\n| 11-20 | 0.80 |" in fresh
    assert STALE not in fresh and "at abc1234" in fresh and 'Not measured yet: `make figures ARGS="weights"`' in fresh
    for change in ({"modules": {"hash": "0" * 16}}, {"command": "foray bench engine --json --rounds 1"}):
        (tmp_path / engine.path.name).write_text(json.dumps(report(engine, **change)))
        marked = page(template, tmp_path)
        assert marked.endswith(f"{STALE} engine.\n"), "once, at the end"
    (tmp_path / demo.path.name).write_text(json.dumps(report(demo, modules={"hash": ""})))
    assert page(template, tmp_path).endswith(f"{STALE} engine, demo-3.\n")


def test_the_two_demos_have_tables_and_curves_of_their_own(tmp_path: Path) -> None:
    known, template = figures(), tmp_path / "template.md"
    names = [name for name in known if name.partition("-")[0] not in ("demo", "compare")]
    for name, em in (("demo-1", 0.95), ("demo-hard-1", 0.7), ("demo-hard-control", 0.1)):
        facts = {"curve": [0.25] * 20 + [em] * 20, "em_after": em, "half_gain": None if em < 0.25 else 21}
        facts["targets"] = [judged(target, facts) for target in known[name].targets]
        (tmp_path / f"{name}.json").write_text(json.dumps(report(known[name], **facts)))
    for start, shown, hidden in (("demo", "| 1 |", "never"), ("demo-hard", "| control |", "0.95")):
        places = [start, f"{start}-curves", *names]
        template.write_text("# T\n" + "\n".join(f"{{{{{name}}}}}" for name in places) + "\n")
        made = page(template, tmp_path)
        assert shown in made and hidden not in made
    assert "| steps | 1 | control |\n| --- | --- | --- |\n| 1-20 | 0.25 | 0.25 |\n| 21-40 | 0.70 | 0.10 |" in made
    assert "never" in made and MET[True] in made
    assert known["demo-hard-0"].minutes > known["demo-0"].minutes


def test_the_page_shows_each_target_as_met_or_missed(tmp_path: Path) -> None:
    template = tmp_path / "template.md"
    names = [name for name in figures() if name.partition("-")[0] not in ("demo", "compare")]
    template.write_text("# T\n" + "\n".join(f"{{{{{name}}}}}" for name in names) + "\n")
    engine = figures()["engine"]
    for ratio, word in ((2.9, "2.9, **missed**"), (3.0, "3, **met**")):
        kept = report(engine, ratio=ratio, targets=[judged(t, {"ratio": ratio}) for t in engine.targets])
        (tmp_path / engine.path.name).write_text(json.dumps(kept))
        assert f"at least 3: {word}" in page(template, tmp_path)
    template.write_text("# T\n{{engine.ratio}} and {{engine.ratio_trl}}\n")
    assert "\n3 and not measured\n" in page(template, tmp_path), "a baseline that this machine did not have"
    template.write_text("# T\n{{engine}}\n")
    with pytest.raises(ValueError, match="no place for agents, async"):
        page(template, tmp_path)


def test_a_target_without_its_figure_is_neither_met_nor_missed() -> None:
    target = Target("load.p99_s", 0.5, "latency")
    assert judged(target, {"load": {"p99_s": 0.5}})["met"] is True
    assert judged(target, {"load": {"p99_s": 0.4}})["met"] is False
    assert [judged(target, found)["met"] for found in ({}, {"load": 3}, {"load": {"p99_s": None}})] == [None] * 3


def test_the_hash_is_of_code_and_not_of_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "x.py").write_text("1")
    seen = [digest(["a"], tmp_path)]
    (folder / "notes.md").write_text("nothing")
    assert digest(["a"], tmp_path) == seen[0] == digest(["a/x.py", "a/*.py"], tmp_path)
    (folder / "x.py").write_text("2")
    seen.append(digest(["a"], tmp_path))
    (folder / "x.py").rename(folder / "y.py")
    assert digest(["a"], tmp_path) == seen[1]
    (folder / "f.lua").write_text("2")
    seen.append(digest(["a"], tmp_path))
    assert len(set(seen)) == 3
    with pytest.raises(FileNotFoundError, match="b/"):
        digest(["b/"], tmp_path)


def test_words_about_code_do_not_change_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text('"""Old."""\nA = "# no comment"  # old\n"""Of A."""\n\n\ndef f():\n    """Old."""\n    return A\n')
    before = digest(["x.py"], tmp_path)
    words = '"""New,\nlonger."""\n\nfrom here import (\n    this,\n)\n\n'
    path.write_text(words + '# more\nA = "# no comment"\n\ndef f():\n    # new\n    return A\n')
    assert digest(["x.py"], tmp_path) == before
    for_types = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import this\n\n"
    path.write_text(for_types + path.read_text())
    assert digest(["x.py"], tmp_path) == before, "imports for types alone"
    for change in (("no comment", "comment"), ("    import this\n", "    B = int\nelse:\n    B = float\n")):
        (tmp_path / "y.py").write_text(path.read_text().replace(*change))
        assert digest(["y.py"], tmp_path) != before


def test_a_figure_is_made_by_its_command_and_kept_with_its_circumstances(tmp_path: Path) -> None:
    made = figures_run.make(VERSION, root=tmp_path, folder=tmp_path / "kept")
    assert made == read(VERSION, tmp_path / "kept") and "torch" in made and made["command"] == "foray version --json"
    assert made["modules"] == {"hash": digest(VERSION.modules), "paths": ["protocol/versions.py"]}
    assert {"date", "commit", "cpu", "load_1m", "load_1m_end"} <= made["machine"].keys()
    assert made["targets"] == [judged(VERSION.targets[0], {})]
    raw = tmp_path / "runs" / "figures" / "packing.out"
    assert "torch" in json.loads(raw.read_text()), "what it printed is kept"


@pytest.mark.parametrize(
    ("argv", "timeout_s", "words"),
    [(("version", "--nonsense"), 60, "exited with code 2"), (("version", "--json"), 0.01, "took more than 0.01 s"),
     (("version",), 60, "printed no report")],
)  # fmt: skip
def test_a_command_that_fails_makes_no_figure(
    argv: tuple[str, ...], timeout_s: float, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ForayError, match=words):
        figures_run.make(Figure("x", argv, ()), root=tmp_path, folder=tmp_path, timeout_s=timeout_s)
    assert not (tmp_path / "x.json").exists()


STOPPED = """
import functools, sys
from pathlib import Path
from benchmarks.figures import __main__ as run
from benchmarks.figures.table import Figure

here = Path(sys.argv[1])
run.figures = lambda: {"long": Figure("long", ("version",), ())}
run.read, run.page, run.PAGES = lambda figure: None, lambda template: "", {here / "page.md": here}
run.make = functools.partial(run.make, root=here, folder=here)
run.STOP_S = float(sys.argv[2])
run.sys.executable = str(here / "command")
sys.exit(run.main(["long"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
@pytest.mark.parametrize(("stubborn", "stop_s"), [(False, 60.0), (True, 0.5)])
def test_a_signal_reaches_the_command_that_makes_a_figure(
    tmp_path: Path, number: signal.Signals, code: int, stubborn: bool, stop_s: float
) -> None:
    """One that ignores it is killed with its children, after STOP_S."""
    command = tmp_path / "command"
    command.write_text(
        f"#!{sys.executable}\nimport os, signal, subprocess, sys, time\nfrom pathlib import Path\n"
        "here = Path(__file__).parent\n"
        + ("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if stubborn else "")
        + "child = subprocess.Popen(['sleep', '300'])\n"
        "(here / 'pids.new').write_text(f'{os.getpid()} {child.pid}')\n(here / 'pids.new').rename(here / 'pids')\n"
        "try: time.sleep(300)\nexcept KeyboardInterrupt: child.kill(); child.wait(); (here / 'asked').touch()\n"
    )
    command.chmod(0o755)
    started = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path), str(stop_s)], cwd=ROOT)
    try:
        wait_until(lambda: (tmp_path / "pids").exists(), "the command runs", 60)
        started.send_signal(number)
        assert started.wait(60) == code
    finally:
        started.kill()
        started.wait()
    assert (tmp_path / "asked").exists() is not stubborn
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: not alive(int(pid)), "nothing is left", 10)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_only_what_is_missing_or_stale_is_made_and_a_failure_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: Figure(name, ("version",), ("protocol/codec.py",)) for name in ("new", "old", "bad", "kept")}
    for name, change in (("old", {"modules": {"hash": "0"}}), ("kept", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps(report(chosen[name], **change)))
    made: list[str] = []

    def make(figure: Figure) -> None:
        made.append(figure.name)
        if figure.name == "bad":
            raise ForayError("broken")
        (tmp_path / figure.path.name).write_text(json.dumps(report(figure)))

    monkeypatch.setattr(figures_run, "figures", lambda: chosen)
    monkeypatch.setattr(figures_run, "read", lambda figure: read(figure, tmp_path))
    monkeypatch.setattr(figures_run, "make", make)
    monkeypatch.setattr(figures_run, "PAGES", {tmp_path / "page.md": tmp_path})
    monkeypatch.setattr(figures_run, "page", lambda template: "the page")
    assert figures_run.make_all([], force=False) == ["bad: broken"] and made == ["new", "old", "bad"]
    made.clear()
    assert figures_run.make_all([], force=False) == ["bad: broken"] and made == ["bad"], "it goes on where it was"
    made.clear()
    figures_run.make_all(["kept"], force=True)
    assert made == ["kept"] and not stale(chosen["kept"], report(chosen["kept"]))


@pytest.mark.skipif(not without_cuda(), reason="a GPU is visible")
def test_the_figures_of_a_gpu_are_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures_run.main(["--gpu"]) == 2
    assert "no GPU for the figures retriever_gpu, transfer, learner-gpu, demo-gpu" in capsys.readouterr().err


def test_a_figure_in_bfloat16_is_skipped_where_that_is_slower(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_run, "cpu_speed", lambda: CpuSpeed("AVX2", native=False, float32=40.0, bfloat16=1.0))
    assert figures_run.make_all(["small_lm"], force=True) == []
    assert "small_lm: skipped, AVX2" in capsys.readouterr().out


def test_gpu_check_runs_tests_that_exist() -> None:
    assert set(NEEDS_GPU) <= set(figures())
    assert len(TESTS) >= 4 and all((ROOT / name).is_file() for name in TESTS)
