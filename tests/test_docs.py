"""What the pages say of the repository is so: links, paths, and the walk of a question."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from functools import cache
from pathlib import Path
from signal import SIGTERM

import pytest

import foray
from foray import cli
from foray.cli import EXIT_INTERRUPTED
from foray.watch.status import BUCKETS
from learner.config.algorithm import REGISTRY as ALGORITHMS
from learner.observability.metrics import Meter
from protocol.errors import ForayError
from protocol.messages import NodeState, Owner, Status
from protocol.runtime.service_cli import NOT_RESTARTED
from protocol.settings import Settings
from protocol.staleness import issue_limit
from rollout_server.rewards import REGISTRY as REWARDS
from tests.support.settings_keys import every_key

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
PAGES = sorted(name for name in TRACKED if name.endswith(".md"))
FOLDERS = {name.partition("/")[0] for name in TRACKED if "/" in name}
COMING_FROM = "docs/coming-from.md"
PACKAGES = ("protocol", "learner", "rollout_server", "retriever", "deploy", "foray")
HISTORY = {"CHANGELOG.md"}
"""Pages that speak of files as they were."""
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(r"(?<![\w/.$<{-])((?:[\w.-]+/)+[\w.*-]+\.(?:py|lua|yaml|toml|txt|lock|md|json|svg))(?![\w/])")
_MODULE = re.compile(r"`(\w[\w/]*/\w+\.py)`")
_FOLDER = re.compile(r"`((?:[a-z_]+/){2,})`")
_KEY = re.compile(
    r"(?<![\w./-])((?:run|rollout|engine|learner|retriever|launch|sft|reward)(?:\.[a-z][a-z0-9_]*)+)(?![\w/(-]|\.\w)"
)
"""A setting: not part of a path, no file, no call."""
_FREE = re.compile(r"(learner|retriever|rollout)\.[A-Z]|(run|engine|sft|reward)\.(yaml|json|key|sh|lock|py)$")
"""What looks like a setting and is none: files of a run directory."""
_WALK = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| (.+) \|$", re.M)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_path_of_a_page_is_there(page: str) -> None:
    text = re.sub(r"\n## Old and new places\n.*?(?=\n## )", "", (ROOT / page).read_text(), flags=re.DOTALL)
    links = [link for link in _LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    lost = [link for link in links if not ((ROOT / page).parent / link).exists()]
    if page not in HISTORY:
        ours = [path for path in _PATH.findall(text) if path.partition("/")[0] in FOLDERS]
        lost += [path for path in ours if not (list(ROOT.glob(path)) or (ROOT / "tests" / path).exists())]
        lost += [name for name in _FOLDER.findall(text) if not (ROOT / name).is_dir()]
        lost += [path for path in _MODULE.findall(text) if not any(f"/{name}".endswith(f"/{path}") for name in TRACKED)]
    assert not lost


@cache
def functions(path: str) -> frozenset[str]:
    """`name` and `Class.name` of every function and class of a file."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{item.name}" for item in inside)
    return frozenset(found)


def test_every_function_of_the_walk_is_there() -> None:
    steps = _WALK.findall(ARCHITECTURE)
    assert [int(number) for number, *_ in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 30
    assert not [(path, name) for _, path, name, _ in steps if name not in functions(path)]
    assert sum("**up**" in what for *_, what in steps) <= 2, "a question goes back up at most twice"


def test_every_folder_of_the_product_has_its_line() -> None:
    table = ARCHITECTURE.partition("## Folders")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+)`", table))
    folders = {str(Path(name).parent) for name in TRACKED if name.startswith(PACKAGES) and name.endswith(".py")}
    top = {folder for folder in folders if folder.count("/") == 1}
    short = {f"{package}/{name}" for package in PACKAGES for name in named}
    assert not top - named - short, "docs/architecture.md has no line for it"


def test_every_page_and_heading_that_the_code_names_is_there() -> None:
    named = [
        (path, page, heading)
        for path in TRACKED
        if path.endswith((".py", ".yaml", ".yml"))
        and not path.startswith((".github/", "tests/", "docs/", "foray/data/catalogue"))
        for page, heading in re.findall(r'(?<![\w/])(docs/[\w/-]+\.md)(?:, "([^"\n]+)")?', (ROOT / path).read_text())
    ]
    assert len(named) > 50
    lost = [(path, page) for path, page, _ in named if not (ROOT / page).is_file()]
    assert not lost
    headings = {page: re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M) for _, page, _ in named}
    assert not [(path, page, name) for path, page, name in named if name and name not in headings[page]]


def keys_of(text: str) -> set[str]:
    """Return what is written like a setting in code: `run.steps`, `learner.kl.type: k3`, `foray up x learner.a.b=1`."""
    spans = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    return {key for span in spans for key in _KEY.findall(span)}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    if page == COMING_FROM:
        text = "\n".join(line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| "))
    known = every_key()
    assert not {key for key in keys_of(text) if key not in known and not _FREE.match(key)}


def test_coming_from_maps_to_many_settings() -> None:
    rows = re.findall(r"^\| (.+) \| ([^|]+) \|$", (ROOT / COMING_FROM).read_text(), re.M)
    keys = {key for _, ours in rows for key in keys_of(ours)}
    assert len(rows) > 60 and len(keys) > 45


def test_a_key_that_is_no_setting_is_found() -> None:
    assert keys_of("`run.stepz=3` and `learner/main.py`, not run.x\n```sh\nforay up learner.lr=1\n```\n") == {
        "run.stepz",
        "learner.lr",
    }


def test_the_glossary_has_the_words_of_the_wire() -> None:
    """The values that a person meets in status, metrics and logs."""
    words = set(re.findall(r"\w+", (ROOT / "docs" / "glossary.md").read_text()))
    met = {*NodeState, *Status, *Owner, *(word for bucket in BUCKETS for word in bucket.split("_"))}
    assert not {str(word) for word in met} - words


FIGURES = ROOT / "docs" / "figures"
LONGEST = 240
GENERATED = (
    *("docs/api.md", "docs/benchmarks-raw.md", "docs/presets.md", "docs/recipes.md"),
    *("docs/figures/", "docs/settings/"),
)
PLAIN = [page for page in PAGES if page not in HISTORY and not page.startswith(GENERATED)]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
_TERM = re.compile(r"^\| (\*\*.+?) \|", re.M)
_SPAN = re.compile(r"`([^`\n]+)`")


def section_of(text: str, title: str) -> str:
    """Return what is below a heading of the second level."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_a_word_with_one_meaning_is_explained_once_and_a_setting_that_has_it_means_that() -> None:
    several = section_of(GLOSSARY, "Words with several meanings")
    once = [word for row in _TERM.findall(GLOSSARY.replace(several, "")) for word in re.findall(r"\*\*(.+?)\*\*", row)]
    assert len(once) > 70 and not {word for word in once if once.count(word) > 1}
    rows = {row[1]: row[0] for row in re.finditer(r"^\| \*\*(\w+)\*\* .+$", several, re.M)}
    for word, row in rows.items():
        keys = {key for key in every_key() if re.search(rf"(^|_){word}s?(_|$)", key.rpartition(".")[2])}
        shown = set(_SPAN.findall(row)) | {span.rpartition(".")[2] for span in _SPAN.findall(row)}
        assert not {key for key in keys if not {key, key.rpartition(".")[2]} & shown}, f"glossary: {word}"
        assert not {key for key in keys if key.endswith("epochs") and key not in shown}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_a_status_that_a_page_names_exists_and_only_an_invalid_one_has_a_cause(page: str) -> None:
    text = (ROOT / page).read_text()
    for status, cause in re.findall(rf"`({'|'.join(Status)}): ?(\w+)`", text):
        assert not Status(status).is_valid and cause not in set(Status), f"`{status}: {cause}`"
    named = re.findall(r"(?<![\w`])status ((?:`\w+`(?:, | or | and )?)+)", text)
    assert not {span for spans in named for span in _SPAN.findall(spans)} - set(Status)


def test_the_exit_codes_of_the_pages_are_those_of_the_code() -> None:
    codes = {0, ForayError.exit_code, *NOT_RESTARTED, EXIT_INTERRUPTED, 128 + SIGTERM}
    table = re.findall(r"^\| (\d+) \|", section_of(TROUBLESHOOTING, "Exit codes"), re.M)
    assert {int(code) for code in table} == codes
    assert {int(code) for code in re.findall(r"\b\d+\b", (cli.__doc__ or "").partition("Exit codes")[2])} == codes
    commands = (ROOT / "docs" / "design" / "commands.md").read_text()
    assert f"{', '.join(map(str, NOT_RESTARTED[:-1]))} and {NOT_RESTARTED[-1]} are not restarted" in commands


def test_the_causes_of_waiting_in_the_glossary_are_those_that_the_learner_measures() -> None:
    row = re.search(r"^\| `seconds/CAUSE` .+$", GLOSSARY, re.M)
    assert row and set(_SPAN.findall(row[0])) == {"seconds/CAUSE", "wait", *Meter().seconds()}


@pytest.mark.parametrize(
    ("page", "title", "registry"),
    [("rewards", "Reward types", REWARDS), ("algorithms", "Algorithms", ALGORITHMS)],
)
def test_a_table_of_types_has_every_type(page: str, title: str, registry: dict[type[Settings], str]) -> None:
    table = section_of((ROOT / "docs" / f"{page}.md").read_text(), title).strip().partition("\n\n")[0]
    shown = re.findall(r"^\| `(\w+)`", table, re.M)
    assert sorted({*shown} - {"type"}) == sorted(kind.model_fields["type"].default for kind in registry)


def test_the_algorithms_page_names_every_preset() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    assert not [path.stem for path in (ROOT / "foray" / "presets").glob("*.yaml") if path.stem not in text]


def test_the_credit_in_the_example_is_what_the_gate_gives() -> None:
    table = section_of((ROOT / "docs" / "design" / "delivery.md").read_text(), "Tasks").partition("### Credit")[2]
    shown = [int(row) for row in re.findall(r"^\| .+? \| (\d+) \|", table, re.M)]
    states = [(0, 0), (16, 16), (100, 19), (200, 19)]
    assert shown == [
        issue_limit(settled=settled, watermark=watermark, max_lag=2, groups_per_step=16)
        for settled, watermark in states
    ]


def test_what_troubleshooting_says_of_every_preset_is_so() -> None:
    assert "every preset has false" in TROUBLESHOOTING
    for preset in (ROOT / "foray" / "presets").glob("*.yaml"):
        assert preset.read_text().count("fp32_lm_head: false") == 2, preset.name


def test_a_page_that_compares_runs_names_those_of_other_lengths() -> None:
    steps = {
        path.stem.partition("-")[2]: json.loads(path.read_text())["steps"] for path in FIGURES.glob("compare-*.json")
    }
    for page in ("docs/algorithms.md", "docs/benchmarks-raw.md"):
        text = (ROOT / page).read_text()
        assert "--set run.steps=120" in text and len(steps) > 15
        assert not [name for name, number in steps.items() if number != 120 and f"{name}: {number} steps" not in text]


def test_the_readme_is_short_and_its_results_are_those_of_the_figures() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    commits = set()
    for start, row in (("demo", "`foray demo`"), ("demo-hard", "`foray demo --hard`")):
        found = [json.loads((FIGURES / f"{start}-{seed}.json").read_text()) for seed in range(5)]
        before, after = ([f"{one[key]:.2f}".lstrip("0") for one in found] for key in ("em_before", "em_after"))
        cells = f"| {min(before)} to {max(before)} | {min(after)} to {max(after)} |"
        assert re.search(rf"^\| {row}, 5 seeds.+{re.escape(cells)}$", text, re.M), cells
        commits |= {one["machine"]["commit"] for one in found}
    control = json.loads((FIGURES / "demo-hard-control.json").read_text())
    assert f"| .{control['em_before']:.2f} | .{control['em_after']:.2f} |".replace(".0.", ".") in text
    assert all(commit in text for commit in commits)


@pytest.mark.parametrize("page", PLAIN)
def test_prose_lines_can_be_read(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    assert not [line for line in prose.splitlines() if len(line) > LONGEST and not line.startswith(("|", "    ", "<"))]


def test_python_in_a_page_imports_the_public_api_alone() -> None:
    lines = [line for page in PAGES for line in (ROOT / page).read_text().splitlines()]
    imports = [line for line in lines if re.match(rf"\s*(from|import) ({'|'.join(PACKAGES)})\b", line)]
    assert imports and not [line for line in imports if not re.match(r"\s*(import foray|from foray import )", line)]
    named = {name.strip() for line in imports for name in line.partition(" import ")[2].split(",")} - {""}
    assert named <= set(foray.__all__)
