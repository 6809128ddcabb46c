"""Rates of kernels as `memo doctor` measures them, here on the CPU, and plans by them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from memo.cli.main import main
from memo.errors import ExitCode, PlanError
from memo.machine import KernelRates, measure_kernels
from memo.mip.inputs import hardware_preset, with_measured_rates


@pytest.fixture(scope="module")
def rates() -> KernelRates:
    return measure_kernels(torch.device("cpu"), seconds=0.02)


def report(rates: KernelRates) -> dict[str, object]:
    return {"gpus": [{"link": None, "kernels": dataclasses.asdict(rates)}], "disks": []}


def test_each_kernel_is_measured_in_both_directions(rates: KernelRates) -> None:
    assert rates.product_flops_per_s > 1e6
    assert rates.copy_bytes_per_s > 1e6
    assert 1e-7 < rates.launch_s < 1e-2
    assert [(one.head, one.tokens) for one in rates.attention] == [(h, t) for h in (64, 128) for t in (128, 256, 512)]
    assert all(one.forward_flops_per_s > 1e6 and one.backward_flops_per_s > 1e6 for one in rates.attention)


def test_a_report_takes_the_place_of_the_presets_rates(
    rates: KernelRates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(report(rates)))
    machine = with_measured_rates(hardware_preset("h100"), path)
    assert machine.product_flops_per_s == pytest.approx(rates.product_flops_per_s)
    assert machine.elementwise_bytes_per_s == pytest.approx(rates.copy_bytes_per_s)
    assert machine.launch_s == rates.launch_s
    usual = next(one for one in rates.attention if (one.head, one.tokens) == (128, 256))
    assert machine.attention_s(1e9, head=128, keys=256) == pytest.approx(1e9 / usual.forward_flops_per_s)
    backward_s = machine.attention_s(1e9, head=128, keys=256, backward=True)
    assert backward_s == pytest.approx(2.5e9 / usual.backward_flops_per_s)
    asked = ["plan", "--model", "7b", "--seq", "8k", "--gpu", "h100", "--gpus", "8", "--doctor", str(path)]
    assert main(asked) == ExitCode.OK
    assert "; attention by torch's own choice, as measured; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [({"attention": []}, "no attention"), ({"product_flops_per_s": 0}, "is not a rate"), ({"launch_s": "x"}, "time")],
)
def test_a_report_without_a_rate_is_refused(
    rates: KernelRates, change: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "doctor.json"
    body = report(rates)
    body["gpus"][0]["kernels"].update(change)  # type: ignore[index]
    path.write_text(json.dumps(body))
    with pytest.raises(PlanError, match=words):
        with_measured_rates(hardware_preset("h100"), path)
