"""`foray data get`: resumed after a cut, verified, unpacked, over plain HTTP and from a hub."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foray.cli import main
from foray.data import catalogue, download
from foray.data.unpack import unpack
from learner.data.questions import load_questions
from protocol.errors import UserError
from protocol.runtime.progress import Progress
from tests.support.file_server import FileServer, file_server

CONTENT = bytes(range(256)) * 4000
HUB = "datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(download, "PAUSE_S", 0.01)
    with file_server() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield served


@pytest.fixture(params=["huggingface_hub", "http"])
def hub(request: pytest.FixtureRequest, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """The server as a hub, with and without the package `huggingface_hub`."""
    if request.param == "http":
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    else:
        pytest.importorskip("huggingface_hub")
    return server


def ranges(server: FileServer) -> list[str]:
    return [given for method, _, given in server.requests if method == "GET"]


def test_a_cut_download_continues_where_it_stopped(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["big.bin"] = CONTENT
    server.cuts = [300_000, 200_000]
    assert main(["data", "get", f"{server.url}/big.bin", "--to", str(tmp_path)]) == 0
    assert (tmp_path / "big.bin").read_bytes() == CONTENT
    assert ranges(server) == ["", "bytes=300000-", "bytes=500000-"]
    assert "closed after 300 kB of 1,024 kB; connecting again" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big.bin", "downloads.json"]


def test_the_next_command_continues_what_the_last_one_left(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.files["big.bin"] = CONTENT
    server.cuts = [300_000, 0, 0, 0]
    argv = ["data", "get", f"{server.url}/big.bin", "--to", str(tmp_path)]
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert "300 kB of big.bin are kept in" in said and "the same command continues" in said
    assert (tmp_path / "big.bin.part").stat().st_size == 300_000 and not (tmp_path / "big.bin").exists()
    server.cuts = []
    assert main(argv) == 0
    assert (tmp_path / "big.bin").read_bytes() == CONTENT and ranges(server)[-1] == "bytes=300000-"


def test_a_file_that_changed_meanwhile_begins_again(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 0)
    server.files["big.bin"] = CONTENT
    server.cuts = [300_000, 0]
    argv = ["data", "get", f"{server.url}/big.bin", "--to", str(tmp_path)]
    assert main(argv) == 1
    server.files["big.bin"], server.cuts = CONTENT[::-1], []
    assert main(argv) == 0
    assert (tmp_path / "big.bin").read_bytes() == CONTENT[::-1]


def test_a_wrong_checksum_is_refused(server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.files["big.bin"] = CONTENT
    argv = ["data", "get", f"{server.url}/big.bin", "--to", str(tmp_path), "--sha256"]
    assert main([*argv, "0" * 64]) == 2
    said = capsys.readouterr().err
    assert "big.bin has the wrong checksum and was deleted" in said and "expected 0000" in said
    assert not list(tmp_path.iterdir())
    assert main([*argv, hashlib.sha256(CONTENT).hexdigest()]) == 0


def test_an_unknown_checksum_is_recorded_and_holds_from_then_on(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["a.bin"] = CONTENT
    argv = ["data", "get", f"{server.url}/a.bin", "--to", str(tmp_path)]
    assert main(argv) == 0
    assert "recorded sha256" in capsys.readouterr().err
    assert catalogue.recorded(tmp_path)["a.bin"]["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    (tmp_path / "a.bin").unlink()
    server.files["a.bin"] = CONTENT[::-1]
    assert main(argv) == 2
    assert "wrong checksum" in capsys.readouterr().err and not (tmp_path / "a.bin").exists()


def test_an_unknown_file_and_an_unknown_name_say_what_to_do(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "get", f"{server.url}/none", "--to", str(tmp_path)]) == 2
    assert "the server has no such file" in capsys.readouterr().err
    assert main(["data", "get", "hotpot", "--to", str(tmp_path)]) == 2
    assert "did you mean 'hotpotqa'?" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x", "ftp://example.org/x", "file:///etc/hostname"])
def test_a_redirect_leads_to_no_private_address_and_no_other_protocol(
    server: FileServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    address: str,
) -> None:
    private = download._is_private
    assert private("127.0.0.1") and private("10.1.2.3") and private("::1") and not private("8.8.8.8")
    port = server.url.rpartition(":")[2]
    monkeypatch.setattr(download, "_is_private", lambda host: host != "localhost" and private(host))
    server.redirects["/x"] = address
    assert main(["data", "get", f"http://localhost:{port}/x", "--to", str(tmp_path)]) == 2
    assert f"redirects to {address}" in (said := capsys.readouterr().err) or "HTTP Error 302" in said
    server.redirects["/x"], server.files["y"] = f"{server.url}/y", b"content"
    assert main(["data", "get", f"{server.url}/x", "--to", str(tmp_path)]) == 0, "both are private"
    assert (tmp_path / "x").read_bytes() == b"content"


def test_an_answer_of_unknown_length_is_bounded(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["x"], server.sized = CONTENT, False
    assert main(["data", "get", f"{server.url}/x", "--to", str(tmp_path)]) == 0
    assert (tmp_path / "x").read_bytes() == CONTENT
    (tmp_path / "x").unlink()
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: SimpleNamespace(free=len(CONTENT)))
    assert main(["data", "get", f"{server.url}/x", "--to", str(tmp_path)]) == 2
    assert "does not say how large the file is" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("end", ["", ".", "..", "..?x=1"])
def test_an_address_without_the_name_of_a_file_is_refused(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    assert main(["data", "get", f"{server.url}/a/{end}", "--to", str(tmp_path / "data")]) == 2
    assert "does not end in a file name" in capsys.readouterr().err and not (tmp_path / "data").exists()


def test_questions_come_from_the_hub_and_are_listed(
    hub: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps({"id": "test_0", "question": "who ?", "golden_answers": ["Ada"]})
    for split in ("train", "dev", "test"):
        hub.files[f"{HUB}/nq/{split}.jsonl"] = f"{line}\n".encode()
    hub.cuts = [20]
    assert main(["data", "get", "nq", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [f"{tmp_path}/nq/{split}.jsonl" for split in ("train", "dev", "test")]
    assert (tmp_path / "nq" / "train.jsonl").read_text() == f"{line}\n"
    assert sorted(path.name for path in (tmp_path / "nq").iterdir()) == ["dev.jsonl", "test.jsonl", "train.jsonl"]
    before = len(hub.requests)
    assert main(["data", "get", "nq", "--to", str(tmp_path)]) == 0 and len(hub.requests) == before
    assert "already in" in capsys.readouterr().err
    assert main(["data", "list", "nq", "--to", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["present"] and row["license"].startswith("CC-BY-NC-SA-4.0 (")
    assert main(["data", "inspect", str(tmp_path / "nq" / "train.jsonl")]) == 0
    assert "format flashrag\nsources: nq 1" in capsys.readouterr().out


def test_a_hub_that_keeps_cutting_is_an_error_that_says_how_to_go_on(
    hub: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.files[f"{HUB}/bamboogle/test.jsonl"] = CONTENT
    hub.cuts = [10] * 60
    assert main(["data", "get", "bamboogle", "--to", str(tmp_path)]) == 1
    assert "the same command continues" in capsys.readouterr().err
    hub.cuts = []
    assert main(["data", "get", "bamboogle", "--to", str(tmp_path)]) == 0
    assert (tmp_path / "bamboogle" / "test.jsonl").read_bytes() == CONTENT


def test_the_hubs_checksum_of_a_large_file_is_verified(
    hub: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files[f"{HUB}/bamboogle/test.jsonl"] = b"{}\n"
    monkeypatch.setattr(download, "_hub_checksum", lambda remote: "1" * 64)
    assert main(["data", "get", "bamboogle", "--to", str(tmp_path)]) == 2
    assert "wrong checksum" in capsys.readouterr().err and not (tmp_path / "bamboogle" / "test.jsonl").exists()


def test_search_r1s_corpus_and_index_are_unpacked_and_joined(hub: FileServer, tmp_path: Path) -> None:
    passage = b'{"id": "0", "contents": "\\"Ada\\"\\nAda wrote."}\n'
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:  # it is one, under the name wiki-18.jsonl.gz
        info = tarfile.TarInfo("somewhere/wiki_dump.jsonl")
        info.size = len(passage)
        archive.addfile(info, io.BytesIO(passage))
    hub.files["datasets/PeterJinGo/wiki-18-corpus/resolve/main/wiki-18.jsonl.gz"] = packed.getvalue()
    for name, part in (("part_aa", CONTENT[:700_000]), ("part_ab", CONTENT[700_000:])):
        hub.files[f"datasets/PeterJinGo/wiki-18-e5-index/resolve/main/{name}"] = part
    hub.cuts = [100]
    assert main(["data", "get", "wiki-18", "wiki-18-e5", "--to", str(tmp_path)]) == 0
    assert (tmp_path / "wiki-18.jsonl").read_bytes() == passage
    assert (tmp_path / "wiki-18-e5" / "e5_Flat.index").read_bytes() == CONTENT
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"wiki-18.jsonl", "wiki-18-e5/e5_Flat.index", "downloads.json"}
    assert main(["data", "inspect", str(tmp_path / "wiki-18.jsonl")]) == 0


def test_strategyqa_is_taken_from_its_archive(server: FileServer, tmp_path: Path) -> None:
    record = {"qid": "s", "question": "is it so?", "answer": True, "facts": [], "decomposition": []}
    files = {"strategyqa_train.json": json.dumps([record]).encode(), "strategyqa_train_filtered.json": b"[]"}
    server.files["strategyqa_dataset.zip"] = archive(tmp_path / "a.zip", files).read_bytes()
    entry = replace(catalogue.entry("strategyqa"), url=f"{server.url}/strategyqa_dataset.zip")
    assert not entry.present(tmp_path)
    (path,) = catalogue.get(entry, tmp_path, Progress(print))
    assert entry.present(tmp_path) and path == tmp_path / "strategyqa" / "train.json"
    (question,) = load_questions(path).questions
    assert (question.answers, question.source) == (("yes",), "strategyqa")


def test_of_a_model_only_weights_and_tokenizer_are_downloaded(hub: FileServer, tmp_path: Path) -> None:
    place = "intfloat/e5-base-v2/resolve/main"
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "vocab.txt", "onnx/config.json",
                 "1_Pooling/config.json"):  # fmt: skip
        hub.files[f"{place}/{name}"] = name.encode()
    hub.large = False
    assert main(["data", "get", "e5-base-v2", "--to", str(tmp_path)]) == 0
    folder = tmp_path / "e5-base-v2"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"config.json", "model.safetensors", "vocab.txt", "1_Pooling/config.json"}


def test_a_login_is_asked_for_and_used(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    server.needs_login = "of-a-user"
    server.files[f"{HUB}/bamboogle/test.jsonl"] = b"{}\n"
    argv = ["data", "get", "bamboogle", "--to", str(tmp_path)]
    assert main(argv) == 2
    assert "export HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "of-a-user")
    assert main(argv) == 0


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def test_the_named_file_of_a_zip_is_taken(tmp_path: Path) -> None:
    files = {"strategyqa_train.json": b"[1]", "__MACOSX/._strategyqa_train.json": b"x", "strategyqa_test.json": b"[2]"}
    packed = archive(tmp_path / "a.zip", files)
    unpack(packed, tmp_path / "train.json", Progress(print), "strategyqa_train.json")
    assert (tmp_path / "train.json").read_bytes() == b"[1]" and not packed.exists()


def test_an_archive_of_several_files_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds several files: a, b"):
        unpack(archive(tmp_path / "a.zip", {"a": b"", "b": b""}), tmp_path / "out", Progress(print))
    (tmp_path / "b.gz").write_bytes(gzip.compress(CONTENT)[:-9])
    with pytest.raises(UserError, match="cannot unpack"):
        unpack(tmp_path / "b.gz", tmp_path / "out", Progress(print))
    assert (tmp_path / "b.gz").exists() and not (tmp_path / "out").exists()
    (tmp_path / "c.gz").write_bytes(gzip.compress(CONTENT))
    unpack(tmp_path / "c.gz", tmp_path / "out", Progress(print))
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_every_entry_has_a_source_and_facts_with_theirs() -> None:
    for entry in catalogue.catalogue().values():
        assert entry.seen and entry.about and bool(entry.hub) != bool(entry.url)
        assert entry.kind in {"questions", "corpus", "index", "model"}
        assert all(fact.endswith(")") for fact in entry.facts.values())
        assert entry.kind == "model" or entry.results()
