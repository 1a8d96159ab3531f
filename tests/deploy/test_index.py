"""`foray index`, used by a user and by a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foray.cli import main
from retriever.indexing import plan as indexing_plan


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing_plan, "PROBE_S", 0.02)


@pytest.fixture
def index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A flat index of 200 synthetic passages, built by the command."""
    out = tmp_path / "index"
    arguments = ["--corpus", "synthetic:200:1", "--index", "memory", "--out", str(out), "encoder.dim=64"]
    assert main(["index", "build", *arguments]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "memory over 200 passages" in said.err and "built memory over 200 passages" in said.err
    return out


def test_info_says_what_it_was_built_from(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "info", str(index)]) == 0
    shown = capsys.readouterr().out
    assert "memory over 200 passages" in shown and "synthetic:200:1" in shown and '"dim": 64' in shown
    assert main(["index", "info", str(index), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fingerprint"] in shown
    assert facts["bytes"] == sum(facts["files"].values())
    assert facts["index"]["encoder"] == {"type": "hashed", "dim": 64, "ngram": 4}


def test_a_passage_is_found_by_its_words(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((index / "corpus.jsonl").read_text().splitlines()[42])
    text = record["contents"].partition("\n")[2]
    assert main(["index", "search", str(index), text, "zurda", "-k", "2", "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["hits"][0]["id"] == record["id"] == "42"
    assert (len(first["hits"]), len(second["hits"]), second["query"]) == (2, 2, "zurda")
    assert main(["index", "search", str(index), text]) == 0
    assert "(id 42)" in capsys.readouterr().out


def test_verify_answers_by_its_exit_code(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "verify", str(index), "--full"]) == 0
    assert "200 of 200 vectors x 64" in capsys.readouterr().out
    with (index / "vectors.npy").open("r+b") as file:
        file.seek(1000)
        file.write(b"xxxx")
    assert main(["index", "verify", str(index)]) == 2
    assert "vectors.npy" in capsys.readouterr().err


def test_a_plan_needs_no_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["index", "estimate", "--passages", "21000000", "--index", "faiss_ivfpq", "encoder.dim=768"]
    assert main([*plan, "--encode-rate", "1000", "dtype=float16"]) == 0
    shown = capsys.readouterr().out
    assert "21,000,000 passages" in shown and "768 x float16" in shown and "vectors 5 h 50 min" in shown
    assert main([*plan, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["need"]["disk"] > 21e6 * 768 * 4
    assert facts["constants"]["scan"] > 0


def test_the_width_of_a_model_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["index", "estimate", "--passages", "1000", "--index", "faiss_flat", "encoder.type=transformer"]
    assert main(plan) == 2
    assert "--dim" in capsys.readouterr().err
    assert main([*plan, "--dim", "768"]) == 0
    assert "768 x float32" in capsys.readouterr().out


def test_a_corpus_is_sampled_for_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps({"id": i, "contents": f"word{i} " * 50}) + "\n" for i in range(100)))
    assert main(["index", "estimate", "--corpus", str(corpus), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert (facts["passages"], facts["words"], facts["distinct"], facts["converted"]) == (100, 50, 1, False)


def test_what_is_too_large_is_refused_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(indexing_plan, "memory_available", lambda: 1000)
    build = ["index", "build", "--corpus", "synthetic:50", "--out", str(tmp_path / "index")]
    assert main(build) == 2
    assert "not enough memory" in capsys.readouterr().err
    assert not (tmp_path / "index").exists()
    assert main([*build, "--force"]) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["build"], "no corpus or no output directory"),
        (["build", "--corpus", "synthetic:9", "--out", "x", "--words", "0"], "must be at least 1"),
        (["estimate"], "no corpus is given"),
        (["estimate", "--passages", "-5"], "not an integer of at least 1"),
        (["estimate", "--corpus", "synthetic:9", "--words", "-3"], "--words is -3"),
        (["search", "here", "q", "-k", "0"], "not an integer of at least 1"),
        (["info"], "no index directory is given"),
        (["info", "here", "there"], "takes one directory"),
        (["search", "here"], "no query is given"),
        (["verify", "nowhere"], "not a built index"),
        (
            ["build", "--corpus", "synthetic:9", "--out", "x", "encoder.dims=3", "--index", "memory"],
            "did you mean 'dim'",
        ),
    ],
)
def test_mistakes_are_explained(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_an_index_of_another_corpus_is_not_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = tmp_path / "c.jsonl", tmp_path / "index"
    corpus.write_text("".join(f'{{"id": "{n}", "contents": "word {n}"}}\n' for n in range(9)))
    assert main(["index", "build", "--corpus", str(corpus), "--out", str(out)]) == 0
    assert main(["index", "search", str(out), "word"]) == 0
    corpus.write_text('{"id": "0", "contents": "x"}\n')
    assert main(["index", "search", str(out), "word"]) == 2
    assert "was built from another corpus" in capsys.readouterr().err


def test_a_run_names_its_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, config = tmp_path / "c.jsonl", tmp_path / "run.yaml"
    corpus.write_text("".join(json.dumps({"id": i, "contents": f"word{i} here"}) + "\n" for i in range(10)))
    config.write_text(f"retriever:\n  corpus: {corpus}\n")
    assert main(["index", "build", "--config", str(config)]) == 0
    out = tmp_path / "c.jsonl.bm25.index"
    assert capsys.readouterr().out == f"{out}\n"
    assert main(["index", "search", "--config", str(config), "word7"]) == 0
    assert "(id 7)" in capsys.readouterr().out
    assert main(["index", "build", "--config", str(config), "--out", str(out)]) == 2
    assert "--config already sets" in capsys.readouterr().err
