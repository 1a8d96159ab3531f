"""Building: whole or not at all, and never served with what it was not built for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from retriever.build import build_index, main
from retriever.config import RetrieverSettings
from retriever.config_index import Bm25Settings, MemorySettings
from retriever.index.base import Source
from retriever.manifest import MANIFEST, read_manifest
from retriever.searcher import open_searcher

Settings = Callable[..., RetrieverSettings]


def quiet(_line: str) -> None:
    """Progress that nobody reads."""


@pytest.mark.parametrize("kind", ["bm25", "faiss_flat", "memory"])
def test_the_command_builds_what_the_service_opens(
    corpus: Path, settings: Settings, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "index"
    assert main(["--corpus", str(corpus), "--out", str(out), "--index", kind]) == 0
    assert f"built {kind} over 40 passages" in capsys.readouterr().err
    manifest = read_manifest(out)
    assert (manifest.type, manifest.passages, manifest.corpus_bytes) == (kind, 40, corpus.stat().st_size)
    searcher = open_searcher(settings(index={"type": kind}, index_dir=out, build_limit_mb=0))
    assert searcher.info()["fingerprint"] == manifest.fingerprint
    assert b'"id": "d7"' in searcher.search(["number7"], 1)[0].documents[0]


def test_the_fingerprint_follows_settings_and_corpus_and_nothing_else(corpus: Path, tmp_path: Path) -> None:
    def fingerprint(name: str, **fields: Any) -> str:
        return build_index(corpus, tmp_path / name, Bm25Settings(**fields), progress=quiet).fingerprint

    first = fingerprint("a")
    assert fingerprint("b") == first
    assert fingerprint("c", k1=1.2) != first
    corpus.write_text(corpus.read_text().replace("number7", "number07"))
    assert fingerprint("d") != first


def test_a_build_that_fails_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text() + "not json\n")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="line 41"):
        build_index(corpus, tmp_path / "index", MemorySettings(), progress=quiet)
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_rebuild_leaves_the_old_index_in_service(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    old = build_index(corpus, out, Bm25Settings(), progress=quiet)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(corpus.read_text() + "{}\n")
    with pytest.raises(UserError):
        build_index(broken, out, Bm25Settings(), overwrite=True, progress=quiet)
    assert read_manifest(out) == old


def test_a_killed_build_leaves_no_index(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text("".join(json.dumps({"id": i, "contents": f"w{i} v{i} " * 30}) + "\n" for i in range(60_000)))
    process = subprocess.Popen(
        [sys.executable, "-m", "retriever.build", "--corpus", corpus, "--out", out, "--index", "memory"],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size > 0 for path in tmp_path.glob(".index.building-*/vectors.raw")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    corpus.write_text('{"id": "1", "contents": "small"}\n')
    assert build_index(corpus, out, MemorySettings(), progress=quiet).passages == 1


def test_an_existing_index_is_replaced_only_when_asked(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    build_index(corpus, out, Bm25Settings(), progress=quiet)
    with pytest.raises(UserError, match="exists already"):
        build_index(corpus, out, Bm25Settings(k1=1.2), progress=quiet)
    build_index(corpus, out, Bm25Settings(k1=1.2), overwrite=True, progress=quiet)
    assert read_manifest(out).index["k1"] == 1.2
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_builders_that_race_for_one_directory_all_succeed(corpus: Path, tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=20)

    class Waiting(MemorySettings):
        def build(self, source: Source, directory: Path) -> None:
            super().build(source, directory)
            together.wait()  # so that nobody has renamed when the last one begins to

    manifests = []
    builds = [
        threading.Thread(
            target=lambda: manifests.append(build_index(corpus, tmp_path / "index", Waiting(), progress=quiet))
        )
        for _ in range(4)
    ]
    for thread in builds:
        thread.start()
    for thread in builds:
        thread.join()
    assert [manifest.fingerprint for manifest in manifests] == [read_manifest(tmp_path / "index").fingerprint] * 4
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_replicas_that_start_together_without_an_index_all_open_it(settings: Settings) -> None:
    found: list[int] = []
    starts = [threading.Thread(target=lambda: found.append(open_searcher(settings()).num_passages)) for _ in range(8)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert found == [40] * 8


def test_an_empty_corpus_and_a_missing_one_are_user_errors(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(UserError, match="holds no passage"):
        build_index(empty, tmp_path / "index", Bm25Settings(), progress=quiet)
    with pytest.raises(UserError, match="cannot read the corpus"):
        build_index(tmp_path / "absent", tmp_path / "index", Bm25Settings(), progress=quiet)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--index", "bm52"], "bm52"), (["k2=1"], "unknown key 'retriever.index.bm25.k2'"), (["k1"], "key=value")],
)
def test_wrong_arguments_are_explained(
    corpus: Path, tmp_path: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--corpus", str(corpus), "--out", str(tmp_path / "index"), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def _other_settings(directory: Path, corpus: Path) -> dict[str, Any]:
    return {"index": {"type": "bm25", "k1": 1.2}}


def _other_type(directory: Path, corpus: Path) -> dict[str, Any]:
    return {"index": {"type": "memory"}}


def _other_corpus(directory: Path, corpus: Path) -> dict[str, Any]:
    corpus.write_text(corpus.read_text().replace("number7", "number9"))  # of the same size
    return {}


def _longer_corpus(directory: Path, corpus: Path) -> dict[str, Any]:
    corpus.write_text(corpus.read_text() + '{"id": "x", "contents": "y"}\n')
    return {"verify_corpus": False}


def _truncated_file(directory: Path, corpus: Path) -> dict[str, Any]:
    os.truncate(directory / "offsets.npy", 200)
    return {}


def _missing_file(directory: Path, corpus: Path) -> dict[str, Any]:
    (directory / "vocab.index.json").unlink()
    return {}


def _later_format(directory: Path, corpus: Path) -> dict[str, Any]:
    record = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps({**record, "format": 99}))
    return {}


def _no_manifest(directory: Path, corpus: Path) -> dict[str, Any]:
    (directory / MANIFEST).unlink()
    return {}


def _garbled_manifest(directory: Path, corpus: Path) -> dict[str, Any]:
    (directory / MANIFEST).write_text("{")
    return {}


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_other_settings, "k1: built with 1.5, asked for 1.2"),
        (_other_type, "type: built with bm25, asked for memory"),
        (_other_corpus, "built from another corpus"),
        (_longer_corpus, "built from another corpus"),
        (_truncated_file, "missing or damaged"),
        (_missing_file, "missing or damaged"),
        (_later_format, "format 99"),
        (_no_manifest, "not a built index"),
        (_garbled_manifest, "cannot be understood"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    corpus: Path, settings: Settings, spoil: Callable[[Path, Path], dict[str, Any]], complaint: str, tmp_path: Path
) -> None:
    out = tmp_path / "index"
    build_index(corpus, out, Bm25Settings(), progress=quiet)
    fields = spoil(out, corpus)
    with pytest.raises(UserError) as caught:
        open_searcher(settings(index_dir=out, **fields))
    assert complaint in caught.value.render()
    assert caught.value.todo


def test_a_missing_index_is_built_beside_a_small_corpus_only(corpus: Path, settings: Settings) -> None:
    with pytest.raises(UserError, match="there is no index"):
        open_searcher(settings(build_limit_mb=0))
    assert open_searcher(settings()).num_passages == 40
    assert (corpus.parent / "corpus.jsonl.bm25.index" / MANIFEST).is_file()
    open_searcher(settings(build_limit_mb=0))
