"""Weights as files: `weights/v{epoch}.{step}/`, a directory that Hugging Face's loaders accept.

Written under a temporary name, flushed, manifest last, then renamed: a directory under its final name is complete.
Nodes check the manifest's sha256 before they load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES

from learner.config.learner import KEEP_VERSIONS, FilesSettings
from learner.weights.base import EngineLink
from learner.weights.checks import WeightCheck, WeightChecker
from protocol.messages import INITIAL, Transport, WeightUpdate
from protocol.runtime.files import durable_mkdir, fsync_path, fsync_tree, model_digest, sha256_file
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""File names that nodes accept, and endings that they do not (`rollout_server.node.weights.manifest`)."""
Tensors = dict[str, torch.Tensor]
STORED_AS: dict[torch.dtype, str] = {dtype: name for name, dtype in _TYPES.items()}
"""dtype -> its name in a safetensors file."""
EXACT = {
    "BF16": (torch.bfloat16, torch.float32),
    "F16": (torch.float16, torch.float32),
    "F32": (torch.float32,),
}
"""dtype in a file -> dtypes that represent its values exactly."""


class DiskPublisher:
    """Publishes into `run.weights_dir`. `model_files`: configuration and tokenizer, included in every version."""

    device = "cpu"
    transport: Transport = "disk"
    weights_file = WEIGHTS

    def __init__(
        self, settings: FilesSettings, run: RunSettings, model_files: Sequence[Path], link: EngineLink
    ) -> None:
        self._run, self._settings, self._link = run.id, settings, link
        self._model = run.model
        self.sanity = WeightChecker(settings.max_norm_jump)
        self._last: dict[str, float] = {}
        self._folder = run.weights_dir.absolute()
        durable_mkdir(self._folder)
        for left in self._folder.glob(".v*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        if any(p.name == self.weights_file for p in model_files):
            raise ValueError("weights among the model's files would replace the published ones")
        self._files = {p.name: (p, p.stat().st_size, sha256_file(p)) for p in model_files if _travels(p)}

    def publish(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """Write the version and return what to announce. Raises BadWeights and OSError; neither leaves files."""
        began = time.monotonic()
        inspection = self.sanity.inspection()
        tensors = _gathered(weights)
        made = self._described(tensors)
        final = self._folder / f"v{version.label}"
        part = self._folder / f".v{version.label}.{os.getpid()}.tmp"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            digest = _save(tensors, part / self.weights_file, inspection)
            files = {self.weights_file: {"bytes": (part / self.weights_file).stat().st_size, "sha256": digest}}
            for name, text in made.items():
                (part / name).write_text(text)
                files[name] = {"bytes": (part / name).stat().st_size, "sha256": sha256_file(part / name)}
            for name, (source, size, digest_of_file) in self._files.items():
                _place(source, part / name)
                files[name] = {"bytes": size, "sha256": digest_of_file}
            manifest = {"version": version.label, "digest": digest, "files": files, "tensors": len(tensors)}
            (part / MANIFEST).write_text(json.dumps(manifest, indent=1))
            if self._settings.fsync:
                fsync_tree(part)
            shutil.rmtree(final, ignore_errors=True)  # left by a learner that crashed before the announcement
            part.rename(final)
            if self._settings.fsync:
                fsync_path(self._folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        self.sanity.published(version, inspection)
        num_bytes = int(str(files[self.weights_file]["bytes"]))
        self._last = {"publish_disk_s": time.monotonic() - began, "publish_bytes": num_bytes}
        return WeightUpdate(
            run=self._run,
            epoch=version.epoch,
            step=version.step,
            digest=digest,
            transport=self.transport,
            path=str(final),
            num_bytes=num_bytes,
        )

    def initial(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate | None:
        """Return the announcement of `run.model`, unless its files have other tensors, or a dtype that the policy's
        rounds. Nothing is written or hashed."""
        shapes = dict(weights)
        if not shapes or not _stores(self._model, shapes):
            return None
        return WeightUpdate(
            run=self._run,
            epoch=version.epoch,
            step=version.step,
            digest=INITIAL + model_digest(self._model),
            transport=self.transport,
            path=str(self._model.absolute()),
        )

    def announce(self, update: WeightUpdate, state: str) -> None:
        """Make `update` the target."""
        self._link.target(update, state)

    def send_again(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Do nothing: nodes read the files."""

    def collect(self, in_use: Collection[PolicyVersion]) -> None:
        """Remove versions except the KEEP_VERSIONS newest and those in use."""
        found = {p: v for p in self._folder.glob("v*") if (v := PolicyVersion.parse(p.name[1:])) is not None}
        newest = sorted(found.values())[-KEEP_VERSIONS:]
        for path, version in found.items():
            if version not in newest and version not in in_use:
                shutil.rmtree(path, ignore_errors=True)

    def facts(self) -> Mapping[str, float]:
        """Return the seconds and bytes of the last version."""
        return self._last

    def close(self) -> None:
        """Do nothing: there are no open resources."""

    def _described(self, tensors: Tensors) -> dict[str, str]:
        """Return further files of a version, by name, derived from its tensors."""
        return {}


def _gathered(weights: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Return the tensors in main memory, contiguous."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights}


def _stores(model: Path, shapes: Tensors) -> bool:
    """Return whether the safetensors files of `model` have every tensor, in a dtype that its own represents exactly."""
    found: dict[str, tuple[list[int], str]] = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping: it only has keys()
                stored = file.get_slice(name)
                found[name] = stored.get_shape(), stored.get_dtype()
    return all(
        name in found and found[name][0] == list(tensor.shape) and tensor.dtype in EXACT.get(found[name][1], ())
        for name, tensor in shapes.items()
    )


def read_tensor(model: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of `model`'s safetensors files in `dtype`. Raises KeyError if they do not have it."""
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt", device="cpu") as file:
            if name in file.keys():  # noqa: SIM118  # not a mapping: it only has keys()
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor.to(dtype)
    raise KeyError(name)


def _travels(path: Path) -> bool:
    """Return whether a file is included in every version: nodes accept plain names only, and no pickles."""
    plain = PLAIN.fullmatch(path.name) is not None and not path.name.endswith(PICKLES)
    if not plain and not path.name.startswith("."):
        log.warning("not publishing %s with the weights: nodes would refuse it", path)
    return plain


def _save(tensors: Tensors, path: Path, inspection: WeightCheck) -> str:
    """Write a safetensors file. Return its sha256 in hex. Raises OSError and BadWeights.

    One pass over the bytes: a thread hashes them and another checks the values while they are written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    names, end = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)), 0  # aligned
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        facts = {"dtype": STORED_AS[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = facts | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(start)
    with path.open("wb") as file, ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as checker:
        file.write(start)
        done: list[Future[None]] = []
        for name in names:
            raw = tensors[name].reshape(-1).view(torch.uint8).numpy().data
            done += hasher.submit(digest.update, raw), checker.submit(inspection.add, name, tensors[name])
            file.write(raw)
        for future in done:
            future.result()
    inspection.finish()
    return digest.hexdigest()


def _place(source: Path, target: Path) -> None:
    # Avoid writing a tokenizer of 10 MB again at every step.
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
