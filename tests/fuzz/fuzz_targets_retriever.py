"""Decoders of the retriever: providers' answers, pages, encoders' answers, corpora, manifests, journals, recordings."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
from fuzz_targets import Decoder, scratch
from pydantic import TypeAdapter

from protocol.errors import UserError
from retriever.api.flashrag import ManyQueries
from retriever.api.openai import EmbeddingRequest
from retriever.backends.web.backend import hits_of
from retriever.backends.web.client import _parse, _retry_after_s
from retriever.backends.web.config import WebSettings
from retriever.backends.web.pages import _recorded, decode, page_of_html, page_of_plain
from retriever.backends.web.provider import ProviderHit, ProviderRequest, WebSearchError
from retriever.backends.web.providers import build_provider
from retriever.backends.web.recordings import Recordings
from retriever.corpus.corpus import CorpusScan, parse_line, read_texts, scan_corpus
from retriever.corpus.manifest import MANIFEST, check_manifest, corpus_of, make_manifest, read_manifest, settings_of
from retriever.encoder.base import EncoderUnavailable, NotFinite
from retriever.encoder.config import OpenAIEncoderSettings
from retriever.encoder.openai import OpenAIEncoder
from retriever.index import index_identity
from retriever.index.config import Bm25Settings
from retriever.indexing.input import documents, read_input
from retriever.indexing.workdir import JOURNAL, BuildJournal
from tests.support.web_search import SHAPES, FakeProvider

CHARSETS = (
    "utf-8",
    "latin-1",
    "idna ",
    "unicode escape",
    "utf-7",
    "undefined",
    "hz",
    "utf_16_le",
    "\x00",
    "zlib",
    None,
)


def _provider(kind: str) -> Decoder:
    given = {"type": kind, "answers": True, "base_url": "http://127.0.0.1:9/search", "key_env": "X"}
    given |= {"cx": "c"} if kind == "google_cse" else {}
    given |= {"extra_snippets": True} if kind == "brave" else {}
    settings: Any = TypeAdapter(WebSettings).validate_python(given)
    provider = build_provider(settings)

    def read(raw: bytes) -> object:
        hits = hits_of(provider.parse(_parse(raw.decode("utf-8", "replace"))))
        return [hit.passage.model_dump_json().encode() for hit in hits]

    boxes = [
        ProviderHit("Box", "An &amp; answer", "https://example.org/b", True),
        ProviderHit("Panel", "Text", "", True),
    ]
    pages = [ProviderHit(f"Page <strong>{i}</strong>", "Text &#233;", f"https://example.org/{i}") for i in range(3)]
    reply = SHAPES[kind](FakeProvider(kind, boxes + pages), "q", 10)
    return Decoder(f"online.{kind}", read, (WebSearchError,), (json.dumps(reply).encode(),), "json")


def _page(raw: bytes) -> object:
    charset = CHARSETS[len(raw) % len(CHARSETS)]
    text = decode(raw, charset)
    return page_of_html(text, 2000), page_of_plain(text, 2000)


def _encoder() -> Callable[[bytes], object]:
    settings = OpenAIEncoderSettings(url="http://127.0.0.1:9/v1", model="m", dim=3, retries=0)
    encoder = OpenAIEncoder(settings)
    answer: list[bytes] = []
    encoder._request = lambda body, count: (200, 0.0, answer[-1])  # type: ignore[method-assign]

    def read(raw: bytes) -> object:
        answer[:] = [raw]
        vectors = encoder.encode_queries(["a", "b"])
        assert vectors.shape == (2, 3) and vectors.dtype == np.float32
        return vectors

    return read


def _corpus_file(folder: Path, name: str) -> Callable[[bytes], object]:
    path = folder / name

    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        return list(islice(documents(read_input(path), lambda share, count: None), 10_000))

    return read


def _scan(folder: Path) -> Callable[[bytes], object]:
    path, out = folder / "scanned.jsonl", folder / "scan"
    out.mkdir()

    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        return scan_corpus(path, out), list(read_texts(path))

    return read


def _line(raw: bytes) -> object:
    passage = parse_line(raw)
    return passage.title, passage.model_dump_json().encode()


def _manifest(folder: Path) -> tuple[bytes, Callable[[bytes], object]]:
    folder = folder / "index"
    folder.mkdir()
    corpus = folder / "corpus.jsonl"
    corpus.write_bytes(b'{"id": "a", "contents": "b"}\n')
    index = Bm25Settings()
    source = {"spec": str(corpus), "format": "contents", "words": 0}
    scan = CorpusScan(1, corpus.stat().st_size, "0" * 64)
    made = make_manifest(folder, index=index, scan=scan, corpus="corpus.jsonl", source=source, files=["corpus.jsonl"])
    raw = made.model_dump_json().encode()

    def read(raw: bytes) -> object:
        (folder / MANIFEST).write_bytes(raw)
        manifest = read_manifest(folder)
        settings_of(folder)
        corpus_of(folder, None)
        check_manifest(manifest, folder, index_identity(index), corpus, verify_corpus=False)
        return manifest

    return raw, read


def _build_journal(folder: Path) -> tuple[bytes, Callable[[bytes], object]]:
    folder = folder / "build"
    folder.mkdir()
    journal = BuildJournal(folder)
    journal.scanned({"size": 3}, {"passages": 1, "bytes": 3, "sha256": "0"})
    journal.wrote("vectors.npy", {"corpus": "0"}, 10)
    journal.built({"type": "bm25"})

    def read(raw: bytes) -> object:
        (folder / JOURNAL).write_bytes(raw)
        found = BuildJournal(folder)
        if found.input is None:
            return None
        return CorpusScan(**found.scan), found.index, [found.rows(name) for name in found.vector_files]

    return (folder / JOURNAL).read_bytes(), read


def _recording(folder: Path) -> tuple[bytes, Callable[[bytes], object]]:
    recordings, ask = Recordings(folder / "recordings", "pages", writing=True), ProviderRequest("https://example.org/")
    recordings.save(ask, {"title": "T", "text": "text"})
    path = recordings.path(ask)

    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        return _recorded(recordings.load(ask))

    return path.read_bytes(), read


def decoders() -> tuple[Decoder, ...]:
    folder = scratch()
    manifest, read_manifest_of = _manifest(folder)
    journal, read_journal = _build_journal(folder)
    recording, read_recording = _recording(folder)
    kinds = [get_args(member.model_fields["type"].annotation)[0] for member in get_args(get_args(WebSettings)[0])]
    page = (
        b"<!doctype html><html><head><meta charset='utf-8'><title>T &amp; U</title><script>x</script></head><body>"
        b"<nav>n</nav><main><h1>H</h1><p>Caf&#233; &lt;b&gt; <td>x</td><![if IE]>y<![endif]><!-- c --></p></main>"
    )
    vectors = json.dumps({"data": [{"index": i, "embedding": [0.1, 0.2, i + 0.3]} for i in range(2)]}).encode()
    line = b'{"id": "d1", "contents": "\\"T\\"\\ntext"}\n'
    hotpot = b'[{"question": "q", "context": [["T", ["a", "b"]], ["U", ["c"]]]}, {"question": "r", "context": []}]'
    musique = b'{"paragraphs": [{"title": "T", "paragraph_text": "x"}]}\n'
    table = b'id\ttext\ttitle\n1\tsome text\tT\n2\t"other"\tU\n'
    user = (UserError,)
    return (
        *(_provider(kind) for kind in kinds),
        Decoder(
            "online.retry_after",
            lambda raw: _retry_after_s(raw.decode("latin-1")),
            (),
            (b"120", b"Wed, 21 Oct 2026 07:28:00 GMT"),
            "text",
        ),
        Decoder("pages.html", _page, (WebSearchError,), (page,), "text", share=1, cpu_s=3.0),
        Decoder("pages.recording", read_recording, (WebSearchError,), (recording,), "json", share=0.5),
        Decoder("encoder.openai", _encoder(), (EncoderUnavailable, NotFinite), (vectors,), "json", share=2),
        Decoder(
            "requests.embeddings",
            EmbeddingRequest.model_validate_json,
            (ValueError,),
            (b'{"input": ["a"]}',),
            "json",
            share=2,
        ),
        Decoder(
            "requests.batch_search",
            ManyQueries.model_validate_json,
            (ValueError,),
            (b'{"query": ["a"]}',),
            "json",
            share=2,
        ),
        Decoder("corpus.line", _line, (ValueError,), (line,), "json", share=2),
        Decoder("corpus.scan", _scan(folder), user, (line * 3,), "json", share=0.2),
        Decoder("corpus.lines", _corpus_file(folder, "a.jsonl"), user, (line * 3, musique * 2), "text", share=0.5),
        Decoder("corpus.array", _corpus_file(folder, "b.json"), user, (hotpot, b"[" + line + b"]"), "json", share=0.5),
        Decoder(
            "corpus.gzip", _corpus_file(folder, "c.jsonl.gz"), user, (gzip.compress(line * 50),), "bytes", share=0.5
        ),
        Decoder("corpus.tsv", _corpus_file(folder, "d.tsv"), user, (table,), "text", share=0.5),
        Decoder("index.manifest", read_manifest_of, user, (manifest,), "json", share=0.5),
        Decoder("index.build_journal", read_journal, user, (journal,), "json", share=0.5),
    )
