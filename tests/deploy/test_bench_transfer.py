"""`foray bench transfer` over gloo: a transfer, a receiver that is killed, one that hangs."""

from __future__ import annotations

import json

import pytest
import torch

from foray.cli import main


@pytest.mark.slow
def test_faults_of_the_receiver_are_noticed_and_survived(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--quick", "--backend", "gloo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["value"] > 0 and report["baseline"]["gb_per_s"] > 0
    killed, hangs = report["faults"]["killed"], report["faults"]["hangs"]
    assert killed["error"] and killed["survived"] == 1
    assert hangs["error"] and hangs["survived"] == 1 and hangs["noticed_s"] > 1
    assert [target["met"] for target in report["targets"]] == [True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_nccl_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--quick"]) == 2
    assert "NCCL needs a GPU" in capsys.readouterr().err
