"""Building: whole or not at all, and never served with what it was not built for."""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from protocol.runtime.progress import Progress
from retriever.backends.index import open_searcher
from retriever.config import RetrieverSettings
from retriever.corpus.manifest import MANIFEST, read_manifest
from retriever.encoder.base import Vectors
from retriever.encoder.hashed import HashedEncoder
from retriever.index import write_index
from retriever.index.base import PassageSource
from retriever.index.config import Bm25Settings, IndexSettings, MemoryIndexSettings
from retriever.indexing import build as indexing_build
from retriever.indexing import input as indexing_input
from retriever.indexing.build import build_index, showing_index_log
from retriever.indexing.cli import main
from retriever.indexing.workdir import BuildDirectory

Settings = Callable[..., RetrieverSettings]


def quiet(_line: str) -> None:
    """Discarded progress."""


@pytest.mark.parametrize("kind", ["bm25", "faiss_flat", pytest.param("memory", marks=pytest.mark.slow)])
def test_the_command_builds_what_the_service_opens(
    corpus: Path, settings: Settings, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "index"
    assert main(["--corpus", str(corpus), "--out", str(out), "--index", kind]) == 0
    assert f"built {kind} over 40 passages" in capsys.readouterr().err
    manifest = read_manifest(out)
    assert (manifest.type, manifest.passages, manifest.corpus_bytes) == (kind, 40, corpus.stat().st_size)
    searcher = open_searcher(settings(index={"type": kind}, index_dir=out, build_limit_mb=0))
    assert searcher.info()["index_fingerprint"] == manifest.fingerprint
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
        build_index(corpus, tmp_path / "index", MemoryIndexSettings(), progress=quiet)
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_rebuild_leaves_the_old_index_in_service(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    old = build_index(corpus, out, Bm25Settings(), progress=quiet)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(corpus.read_text() + "{}\n")
    with pytest.raises(UserError):
        build_index(broken, out, Bm25Settings(), overwrite=True, progress=quiet)
    assert read_manifest(out) == old


@pytest.mark.slow
def test_a_killed_build_goes_on_where_it_was_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    out, size = tmp_path / "index", 8000
    often = "import retriever.indexing.build as s; s.JOURNAL_ROWS = 1; from retriever.indexing.cli import main; main()"
    command = [sys.executable, "-c", often, "--corpus", f"synthetic:{size}", "--index", "memory"]
    command += ["--out", str(out), "encoder.type=hashed", "encoder.dim=32"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    journal = tmp_path / ".index.building" / "journal.json"
    try:
        deadline = time.monotonic() + 60
        while not journal.exists() or "vectors.npy" not in journal.read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    rows = json.loads(journal.read_text())["vectors"]["vectors.npy"]["rows"]
    assert 0 < rows < size
    said: list[str] = []
    settings = MemoryIndexSettings.model_validate({"encoder": {"type": "hashed", "dim": 32}})
    resumed = build_index(f"synthetic:{size}", out, settings, progress=said.append)
    assert f"resuming at row {rows:,} of {size:,} of vectors.npy" in said
    whole = build_index(f"synthetic:{size}", tmp_path / "whole", settings, progress=quiet)
    assert resumed == whole
    for name in [MANIFEST, *whole.files]:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


class Interrupted(Exception):
    """Simulates the end of a build."""


class Interrupting(HashedEncoder):
    """Ends the build at its third chunk."""

    chunks = 0

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        self.chunks += 1
        if self.chunks == 3:
            raise Interrupted
        return super().encode_passages(texts)


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of 300 passages whose build into `tmp_path / "index"` ended after 128 vectors."""
    monkeypatch.setattr(indexing_build, "JOURNAL_ROWS", 1)
    monkeypatch.setattr(indexing_build, "ENCODE_CHUNK", 64)
    path = tmp_path / "corpus.jsonl"
    indexing_input.write_corpus(indexing_input.read_input("synthetic:300"), path, lambda share, passages: None)
    with monkeypatch.context() as patch:
        patch.setattr("retriever.indexing.build.build_encoder", Interrupting)
        with pytest.raises(Interrupted):
            build_index(path, tmp_path / "index", small_memory(), progress=quiet)
    assert not (tmp_path / "index").exists()
    return path


def small_memory(**encoder: Any) -> MemoryIndexSettings:
    return MemoryIndexSettings.model_validate({"encoder": {"type": "hashed", "dim": 16, **encoder}})


def build_after(path: Path, out: Path, index: MemoryIndexSettings, **options: Any) -> str:
    """What a build says; its files must be those of a build that was never interrupted."""
    said: list[str] = []
    build_index(path, out, index, progress=said.append, **options)
    manifest = build_index(path, out.with_name("whole"), index, progress=quiet)
    assert all((out / name).read_bytes() == (out.with_name("whole") / name).read_bytes() for name in manifest.files)
    assert read_manifest(out) == manifest
    return "\n".join(said)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left"),
        (OSError("898195 requested and 158688 written"), "the disk is full"),  # numpy
    ],
)
def test_a_full_disk_is_said_in_words_and_what_was_done_is_kept(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, why: str
) -> None:
    def full(fd: int, block: Any) -> None:
        raise error

    said: list[str] = []
    with monkeypatch.context() as patch, pytest.raises(UserError, match="cannot write the index") as caught:
        patch.setattr(indexing_build, "_write", full)
        build_index(interrupted, tmp_path / "index", small_memory(), progress=said.append)
    assert why in caught.value.why and "same command" in caught.value.todo
    assert "progress is kept" in said[-1]
    assert "resuming at row 128 of 300" in build_after(interrupted, tmp_path / "index", small_memory())


def test_an_interrupted_build_goes_on(interrupted: Path, tmp_path: Path) -> None:
    assert "resuming at row 128 of 300" in build_after(interrupted, tmp_path / "index", small_memory())


def test_a_corpus_that_was_only_touched_is_gone_on_with(interrupted: Path, tmp_path: Path) -> None:
    os.utime(interrupted, ns=(1, 1))
    assert "resuming at row 128" in build_after(interrupted, tmp_path / "index", small_memory())


def test_a_changed_corpus_starts_afresh(interrupted: Path, tmp_path: Path) -> None:
    interrupted.write_bytes(interrupted.read_bytes().replace(b"a", b"o"))
    said = build_after(interrupted, tmp_path / "index", small_memory())
    assert "used another corpus: starting from the beginning" in said
    assert "resuming" not in said


def test_a_changed_encoder_starts_the_vectors_afresh(interrupted: Path, tmp_path: Path) -> None:
    said = build_after(interrupted, tmp_path / "index", small_memory(ngram=5))
    assert "discarding 128 rows of vectors.npy (encoder changed): starting from the beginning" in said


def test_fresh_forgets_what_was_done(interrupted: Path, tmp_path: Path) -> None:
    assert "resuming" not in build_after(interrupted, tmp_path / "index", small_memory(), fresh=True)


def test_rows_that_were_never_made_durable_are_made_again(interrupted: Path, tmp_path: Path) -> None:
    vectors = tmp_path / ".index.building" / "vectors.npy"
    content = bytearray(vectors.read_bytes())
    beyond = 128 + 128 * 16 * 4
    content[beyond:] = b"\x7f" * (len(content) - beyond)
    vectors.write_bytes(content)
    (tmp_path / ".index.building" / "half_written.faiss").write_bytes(b"x")
    assert "resuming at row 128" in build_after(interrupted, tmp_path / "index", small_memory())
    assert not (tmp_path / "index" / "half_written.faiss").exists()


def test_an_existing_index_is_replaced_only_on_request(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    build_index(corpus, out, Bm25Settings(), progress=quiet)
    with pytest.raises(UserError, match="already exists"):
        build_index(corpus, out, Bm25Settings(k1=1.2), progress=quiet)
    build_index(corpus, out, Bm25Settings(k1=1.2), overwrite=True, progress=quiet)
    assert read_manifest(out).index["k1"] == 1.2
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_of_builders_that_race_for_one_directory_one_builds_and_all_succeed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Barrier(4, timeout=20)
    built: list[int] = []
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "waiting for it" in line:
            waiting.wait()

    def slow(settings: IndexSettings, source: PassageSource, directory: Path) -> None:
        built.append(1)
        waiting.wait()  # until the other three have found the directory taken
        write_index(settings, source, directory)

    monkeypatch.setattr("retriever.indexing.build.write_index", slow)
    manifests = []
    builds = [
        threading.Thread(
            target=lambda: manifests.append(
                build_index(corpus, tmp_path / "index", MemoryIndexSettings(), progress=say)
            )
        )
        for _ in range(4)
    ]
    for thread in builds:
        thread.start()
    for thread in builds:
        thread.join()
    assert built == [1]
    assert sum(f"(process {os.getpid()} on " in line for line in said) == 3
    assert [manifest.fingerprint for manifest in manifests] == [read_manifest(tmp_path / "index").fingerprint] * 4
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_builder_that_waited_for_another_index_gets_an_error(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    with BuildDirectory(out, quiet) as site, ThreadPoolExecutor(1) as other:
        said: queue.Queue[str] = queue.Queue()
        waiting = other.submit(build_index, corpus, out, MemoryIndexSettings(), progress=said.put)
        assert "waiting for it" in said.get(timeout=20)
        made = build_index(corpus, tmp_path / "made", Bm25Settings(), progress=quiet)
        for name in [MANIFEST, *made.files]:
            (tmp_path / "made" / name).rename(site.directory / name)
        site.publish(without="journal.json")
        with pytest.raises(UserError, match="already exists"):
            waiting.result(timeout=20)
    assert read_manifest(out) == made


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
    with pytest.raises(UserError, match="has no passages"):
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
        (_other_settings, "k1: built with 1.5, configured 1.2"),
        (_other_type, "type: built with bm25, configured memory"),
        (_other_corpus, "built from another corpus"),
        (_longer_corpus, "built from another corpus"),
        (_truncated_file, "missing or damaged"),
        (_missing_file, "missing or damaged"),
        (_later_format, "format 99"),
        (_no_manifest, "not a built index"),
        (_garbled_manifest, "cannot read"),
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
    with pytest.raises(UserError, match="no index found"):
        open_searcher(settings(build_limit_mb=0))
    assert open_searcher(settings()).num_passages == 40
    assert (corpus.parent / "corpus.jsonl.bm25.index" / MANIFEST).is_file()
    open_searcher(settings(build_limit_mb=0))


@pytest.mark.parametrize("kind", ["folder", "synthetic"])
def test_a_service_takes_every_corpus_that_a_build_takes(corpus: Path, settings: Settings, kind: str) -> None:
    folder = corpus.parent / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(corpus.read_bytes())
    given = folder if kind == "folder" else "synthetic:40"
    made = settings(corpus=given, index_dir=corpus.parent / "index")
    with pytest.raises(UserError, match="no index found"):
        open_searcher(made.model_copy(update={"build_limit_mb": 0}))
    assert indexing_input.first_passages(made.corpus, 5) == 5
    assert open_searcher(made).num_passages == 40


def test_what_an_index_logs_becomes_a_task() -> None:
    now, said = [1000.0], list[str]()
    log = logging.getLogger("retriever.index.some")
    with showing_index_log(Progress(said.append, every_s=3.0, clock=lambda: now[0])):
        log.info("training %d lists", 7)
        log.info("%d of %d passages have a list", 100, 1000)
        now[0] += 4.0
        log.info("%d of %d passages have a list", 500, 1000)
        log.info("%d of %d passages are in their lists", 10, 1000)
    log.info("%d of %d passages have a list", 900, 1000)
    assert said == [
        "training 7 lists",
        "index: have a list: 500 of 1,000 passages, 50%, 125 passages/s, about 4.0 s left",
        "index: have a list: 500 passages in 4.0 s, 125 passages/s",
    ]
