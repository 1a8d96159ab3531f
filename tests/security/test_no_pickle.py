"""No reader can execute its input: a check of the syntax of all packages, and loaders with malicious files.

`ALLOWED` names each exception with its reason; a line that is not there fails, and so does a name that is not needed.
"""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "rollout_server", "learner", "retriever", "deploy", "foray")
MODULES = frozenset(
    {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "copyreg"}
    | {"multiprocessing", "tarfile", "zipfile", "xmlrpc", "telnetlib"}
)
"""Modules that execute what they read, or send pickles between processes, or unpack archives to any path."""
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
CALLS = frozenset(
    {"torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load"}
    | {"yaml.load_all", "os.system", "os.popen", "shutil.unpack_archive", "pandas.read_pickle"}
    | {"importlib.import_module", "import_module", "pkgutil.resolve_name", "resolve_name"}
)
COLLECTIVES = frozenset(
    {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
    | {"send_object_list", "recv_object_list"}
)
"""torch's collectives that pickle."""

CONSTANT_TABLES = {"REGISTRY[type(settings)]", "GROUPS[backend]", "STAGING[backend]"}
"""Names from tables in the code, which no input can change."""

ALLOWED = {
    (
        "rollout_server/tools/sandbox/program.py",
        "exec",
    ): "the policy's program, in a sandbox without network and files of the host",
    ("rollout_server/tools/sandbox/program.py", "compile"): "the same",
    ("rollout_server/user_function.py", "importlib.import_module"): "a reward or agent that a person names in settings",
    (
        "learner/observability/trackers/base.py",
        "importlib.import_module",
    ): "a tracker's library, by a name that is a constant",
    (
        "foray/data/unpack.py",
        "tarfile",
    ): "regular files of a known download are copied; no path of the archive is used",
    ("foray/data/unpack.py", "zipfile"): "the same",
    ("deploy/doctor/model.py", "trust_remote_code"): "the doctor looks for the flag, and warns",
    ("foray/__init__.py", "importlib.import_module"): "public names, from a constant table",
    ("foray/cli.py", "importlib.import_module"): "a verb's module, from a constant table",
}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _findings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(what, line) of everything in `tree` that could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module or "", node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "trust-remote-code" in node.value:
            yield "trust_remote_code", node.lineno
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            pairs = zip(keys, node.values, strict=True)
            yield from _flags(((str(key), value) for key, value in pairs if key), node.lineno)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[tuple[str, int]]:
    name = _name(node.func)
    if name == "resolve_name" and ast.unparse(node.args[0]) in CONSTANT_TABLES:
        return
    given = {keyword.arg or "": keyword.value for keyword in node.keywords}
    if name in BUILTINS or name in CALLS or name.rpartition(".")[2] in COLLECTIVES:
        yield name, node.lineno
    yield from _flags(given.items(), node.lineno)


def _flags(pairs: Iterable[tuple[str, ast.expr]], line: int) -> Iterator[tuple[str, int]]:
    for key, value in pairs:
        off = isinstance(value, ast.Constant) and value.value in (False, None)
        if key in ("allow_pickle", "trust_remote_code", "shell") and not off:
            yield key, line


def _all_findings() -> Iterator[tuple[str, str, int]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for what, line in _findings(ast.parse(path.read_text())):
                yield path.relative_to(ROOT).as_posix(), what, line


def test_no_package_can_run_what_it_reads() -> None:
    found = list(_all_findings())
    wrong = [f"{path}:{line}: {what}" for path, what, line in found if (path, what) not in ALLOWED]
    assert not wrong, "\n".join(wrong)
    assert ALLOWED.keys() <= {(path, what) for path, what, _ in found}, "an exception that nothing needs"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("from multiprocessing.connection import Client", "multiprocessing.connection"),
        ("torch.load(path, weights_only=True)", "torch.load"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("Model.from_pretrained(d, trust_remote_code=flag)", "trust_remote_code"),
        ("flags = {'trust_remote_code': True}", "trust_remote_code"),
        ("argv = ['--trust-remote-code']", "trust_remote_code"),
        ("dist.broadcast_object_list(x)", "dist.broadcast_object_list"),
        ("yaml.load(text, Loader)", "yaml.load"),
        ("subprocess.run(line, shell=True)", "shell"),
        ("eval(text)", "eval"),
        ("resolve_name(REGISTRY[settings.type])(settings)", "resolve_name"),
    ],
)
def test_the_walk_sees(source: str, what: str) -> None:
    assert what in {found for found, _ in _findings(ast.parse(source))}


@pytest.mark.parametrize(
    "source",
    [
        *("model.eval()", "np.load(p, mmap_mode='r')", "yaml.safe_load(t)"),
        *("from_pretrained(d, trust_remote_code=False)", "resolve_name(REGISTRY[type(settings)])(settings)"),
    ],
)
def test_the_walk_leaves_alone(source: str) -> None:
    assert not list(_findings(ast.parse(source)))


UNSPOKEN = (
    "update_weights_from_tensor",
    "load_lora_adapter_from_tensors",
    "serialized_named_tensors",
    "send_to_worker",
)
"""Routes and fields of SGLang's that unpickle what they are sent (CVE-2025-10164, CVE-2026-15969, CVE-2026-7304)."""


def test_engines_are_never_sent_what_they_would_unpickle() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            # the CPU engine names them to refuse them, which test_cpu_engine_routes.py shows
            assert path.name == "admin.py" or not [name for name in UNSPOKEN if name in text], path
            # the CPU engine lists it among what it refuses
            assert "custom_logit_processor" not in text or path.name == "validation.py", path


class _Trap:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_pickles_in_the_place_of_every_file_and_message_run_nothing(tmp_path: Path) -> None:
    """First show that the trap works. Then give it to every reader in place of its input."""
    import bm25s
    import faiss
    import numpy as np

    from learner.trainer.distributed.channel import decode as decode_share
    from protocol.codec import decode
    from protocol.errors import ForayError
    from rollout_server.cpu_engine.model.loader import WeightsError, read_tensors

    sprung = tmp_path / "sprung"
    trap = pickle.dumps(_Trap(sprung))
    pickle.loads(trap)
    assert sprung.exists()
    sprung.unlink()
    (tmp_path / "model.safetensors").write_bytes(trap)
    (tmp_path / "data.csc.index.npy").write_bytes(trap)
    np.save(tmp_path / "objects.npy", np.array([_Trap(sprung)], dtype=object), allow_pickle=True)
    with pytest.raises(ForayError):
        decode(trap)
    with pytest.raises((ForayError, ValueError)):
        decode_share(trap, list[int])
    with pytest.raises(WeightsError):
        read_tensors(tmp_path)
    with pytest.raises(ValueError, match="objects"):
        np.load(tmp_path / "objects.npy", mmap_mode="r")
    with pytest.raises((ValueError, OSError)):
        bm25s.BM25.load(tmp_path, mmap=True, show_progress=False)
    with pytest.raises(RuntimeError):
        faiss.read_index(str(tmp_path / "model.safetensors"))
    assert not sprung.exists()
