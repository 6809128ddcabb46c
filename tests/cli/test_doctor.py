"""`memo doctor`: true rates, reasons in words, keys with units, and no trace left on the disk."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_file import Faults
from ready_ranks import run_ranks

from memo.cli.doctor import _host_rows
from memo.cli.main import main
from memo.errors import ExitCode, ScratchFull
from memo.machine import HostFacts, KernelRates, LinkRates, doctor, examine, link_bandwidth, sustained_write
from memo.machine.kernel_rates import AttentionRate
from memo.machine.link_bandwidth import measure_disk
from memo.machine.process_memory import HostUser
from memo.mip.activation import read_activation_plan
from memo.mip.inputs import PRESETS, with_measured_rates
from memo.swap.disk import DiskStore, gds_probe, mount_of, obstacles, try_gds
from memo.swap.disk.gds_probe import Mount

SECONDS = 0.02


@pytest.fixture(autouse=True)
def _small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_bandwidth, "_SCRATCH_BYTES", 32 << 20)
    monkeypatch.setattr(link_bandwidth, "_TENSOR_BYTES", 2 << 20)


def no_gpu() -> Any:
    """NVML on a machine without a driver."""
    nvml = types.SimpleNamespace(NVMLError=RuntimeError)

    def init() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    nvml.nvmlInit = init
    return nvml


def one_gpu(*, torch_sees_it: bool = False) -> Any:
    return types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H100",
        nvmlDeviceGetPciInfo=lambda handle: types.SimpleNamespace(busId="00000000:FF:1F.0"),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=80 << 30),
        nvmlDeviceGetCurrPcieLinkGeneration=lambda handle: 4,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetCurrPcieLinkWidth=lambda handle: 16,
        nvmlDeviceGetMaxPcieLinkWidth=lambda handle: 16,
    )


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = main(["doctor", "--seconds", "20ms", *args])
    return code, capsys.readouterr().out


# The command


def test_the_report_names_who_holds_the_rest_of_host_memory() -> None:
    users = [HostUser(pid=7, command="deepspeed", held_bytes=96 << 30, locked_bytes=12 << 30)]
    facts = HostFacts(memory_available_bytes=1 << 40, copy_bytes_per_s=1e10, users=users)
    assert ("  held", "96 GiB by deepspeed, process 7, 12 GiB of it locked") in _host_rows(facts)


def test_json_is_one_object_whose_numbers_carry_their_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--json", "--disk", str(tmp_path))
    assert code == ExitCode.OK
    found = json.loads(out)
    assert found["disks"][0]["directory"] == str(tmp_path)
    assert all(rate > 0 for rate in found["disks"][0]["rates"].values())

    assert found["collectives"] is None
    assert_units(found)


def assert_units(value: Any, key: str = "") -> None:
    units = r"_(bytes|s|generation|generation_max|width|width_max|node|error|size)$|^(index|ranks|nodes)$"
    if isinstance(value, dict):
        for name, inner in value.items():
            assert_units(inner, name)
    elif isinstance(value, list):
        for inner in value:
            assert_units(inner, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        assert re.search(units, key), key


def of_ranks(*args: str) -> subprocess.CompletedProcess[str]:
    return run_ranks(2, Path(__file__).parent / "doctor_worker.py", "--seconds", "50ms", *args, timeout=120)


def test_ranks_measure_collectives_and_the_first_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = of_ranks("--json", "--disk", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert_units(found)
    assert (found["collectives"]["world_size"], found["collectives"]["backend"]) == (2, "gloo")
    assert [fit["collective"] for fit in found["collectives"]["fits"]] == [
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send",
    ]
    report, plan = tmp_path / "doctor.json", tmp_path / "plan.json"
    report.write_text(done.stdout)
    command = ["plan", "--model", "7b", "--seq", "8k", "--gpu", "h100", "--gpus", "8", "--tp", "8"]
    assert main([*command, "--doctor", str(report), "-o", str(plan)]) == ExitCode.OK
    network = read_activation_plan(plan).problem.hardware.network
    fits = found["collectives"]["fits"][:2]
    latency = sum(fit["latency_s"] for fit in fits) / 2
    assert network.launch_s + network.node_latency_s == pytest.approx(latency)


def test_the_table_of_ranks_has_a_line_for_each_collective(tmp_path: Path) -> None:
    done = of_ranks("--disk", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    said = " ".join(done.stdout.split())
    assert "collectives 2 ranks, gloo" in said
    for name in ("all-gather", "reduce-scatter", "all-to-all", "send"):
        assert re.search(rf"{name} in a node [\d.]+ (s|ms|µs) \+ bytes / [\d.e+]+ [kMGT]B/s among 2 ranks, ", said)
    assert said.count("host copy") == 1


def test_the_table_names_each_disk_and_what_it_can_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    code, out = run(capsys, "--disk", str(paths[0]), "--disk", str(paths[1]))
    flat = " ".join(out.split())
    assert code == ExitCode.OK
    for word in ("host memory free", "host copy", "while reading", "while writing", "GPUDirect"):
        assert word in flat
    assert "striped over all write" in flat
    assert len(re.findall(r"^disk ", out, re.M)) == 2


def test_a_sustained_write_is_measured_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sustained_write, "_TENSOR_BYTES", 1 << 20)
    monkeypatch.setitem(DiskStore.__init__.__kwdefaults__, "spare_bytes", 0)
    code, out = run(capsys, "--json", "--disk", str(tmp_path), "--disk-sustained", "33MiB")
    found = json.loads(out)
    assert code == ExitCode.OK
    assert_units(found)
    assert found["sustained"]["written_bytes"] == found["sustained"]["scratch_bytes"] == 64 << 20
    assert len(found["sustained"]["window_bytes_per_s"]) == 32
    _, out = run(capsys, "--disk", str(tmp_path), "--disk-sustained", "1MiB")
    assert re.search(r"^sustained write +[\d.]+ [MG]B/s (over 32 MiB, no fall|after \d+ MiB, )", out, re.M)
    assert list(tmp_path.iterdir()) == []


def test_a_sustained_write_goes_over_the_same_blocks_where_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sustained_write, "_TENSOR_BYTES", 1 << 20)
    faults = Faults().fail("fallocate", 2, errno=errno.ENOSPC, sticky=True)
    faults.install(monkeypatch)
    monkeypatch.setattr("memo.swap.disk.scratch._GROWTH_BYTES", 8 << 20)
    found = sustained_write.measure_sustained([tmp_path], 32 << 20)
    assert (found.written_bytes, found.scratch_bytes) == (32 << 20, 8 << 20)
    assert faults.calls["write"] == 32
    faults.clear()
    faults.fail("fallocate", 1, errno=errno.ENOSPC, sticky=True).calls["fallocate"] = 0
    with pytest.raises(ScratchFull, match=r"does not take a file of .* free the disk"):
        sustained_write.measure_sustained([tmp_path], 32 << 20)
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_drives_cache_is_found() -> None:
    rates = [3e9] * 10 + [2.9e9, 1.6e9] + [0.8e9, 0.9e9, 0.7e9, 0.8e9] * 5
    found = sustained_write.summary(rates, window_bytes=1 << 30, scratch_bytes=32 << 30)
    assert found.fell_after_bytes == 12 << 30
    assert found.steady_bytes_per_s == pytest.approx(0.8e9)
    assert found.first_bytes_per_s == pytest.approx(2.9e9, rel=0.1)
    even = sustained_write.summary([1e9, 0.9e9] * 16, window_bytes=1 << 30, scratch_bytes=0)
    assert even.fell_after_bytes is None
    assert even.first_bytes_per_s == pytest.approx(0.947e9, rel=0.01)


@pytest.mark.parametrize(("nvml", "advises"), [(no_gpu, False), (one_gpu, True)])
def test_advice_on_gpudirect_storage_is_for_machines_with_a_gpu(
    nvml: Callable[[], Any],
    advises: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = examine([tmp_path], seconds=SECONDS, nvml=nvml())
    disk = dataclasses.replace(
        found.disks[0], gds_works=False, gds_obstacles=["kvikio is not installed: pip install it"]
    )
    monkeypatch.setattr("memo.machine.examine", lambda *_, **__: dataclasses.replace(found, disks=[disk]))
    _, out = run(capsys, "--disk", str(tmp_path))
    assert re.search(rf"^  GPUDirect Storage +{'kvikio is not' if advises else 'no GPU *$'}", out, re.M)


def test_an_unusable_directory_is_said_and_the_rest_is_still_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, "--json", "--disk", "/proc/self", "--disk", str(tmp_path))
    first, second = json.loads(out)["disks"]
    assert code == ExitCode.FAILURE
    assert "scratch directory /proc/self: " in first["problem"]
    assert first["rates"] is None
    assert second["problem"] is None
    assert second["rates"]["write_bytes_per_s"] > 0
    assert run(capsys, "--disk", "/proc/self")[0] == ExitCode.FAILURE


def test_a_directory_that_is_missing_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memo.machine.examine", None)
    assert main(["doctor", "--disk", str(tmp_path), "--disk", "/nodir"]) == ExitCode.USAGE
    assert capsys.readouterr().err == "memo doctor: --disk: /nodir is no directory; give one that exists\n"


def test_control_characters_in_a_name_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = tmp_path / "a\x1b[31m[bold]b"
    hostile.mkdir()
    _, out = run(capsys, "--disk", str(hostile))
    assert "\x1b" not in out
    assert "[bold]" in out.replace("\n", "").replace(" ", "")


def test_a_duration_that_means_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--seconds", "soon"]) == ExitCode.USAGE


def test_an_empty_directory_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--disk", ""]) == ExitCode.USAGE
    assert "--disk: an empty name is no directory" in capsys.readouterr().err


def test_the_default_stays_within_half_a_minute_for_any_number_of_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []

    def note(directories: list[Path], *, seconds: float, sustained_bytes: int) -> Any:
        # Six for each directory and once more for all of them, one for the host.
        asked.append(6 * seconds * (len(directories) + (len(directories) > 1)) + seconds)
        return examine([], seconds=0.001, nvml=no_gpu())

    monkeypatch.setattr(doctor, "examine", note)
    for count in (1, 4, 16):
        args = ["--disk", str(tmp_path)] * count
        assert main(["doctor", *args]) == ExitCode.OK
    assert max(asked) < 25


# The measurements


def test_measuring_a_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    rates = measure_disk([tmp_path], seconds=SECONDS)
    assert min(rates.write_bytes_per_s, rates.read_bytes_per_s) > 0
    assert min(rates.write_together_bytes_per_s, rates.read_together_bytes_per_s) > 0
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_fails_while_it_is_measured_is_a_problem_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults().fail("write", 3, errno=errno.EIO, sticky=True).install(monkeypatch)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    found = examine([tmp_path], seconds=SECONDS, nvml=no_gpu())
    assert "EIO" in str(found.disks[0].problem)
    assert found.disks[0].rates is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rate_is_what_the_disk_delivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Faults().fail("write", 1, delay=0.05, sticky=True).install(monkeypatch)
    rates = measure_disk([tmp_path], seconds=0.2)
    at_most = 4 * (2 << 20) / 0.05  # four threads, 2 MiB each, no write faster than its delay
    assert 0 < rates.write_bytes_per_s <= at_most
    assert 0 < rates.write_together_bytes_per_s <= at_most


# GPUs


def test_no_driver_is_a_reason_and_not_an_error() -> None:
    found = examine([], seconds=SECONDS, nvml=no_gpu())
    assert found.gpus == []
    assert found.gpu_driver_version is None
    assert "NVML Shared Library Not Found" in str(found.gpu_problem)


def test_a_gpu_that_torch_cannot_use_is_described_without_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = examine([], seconds=SECONDS, nvml=one_gpu())
    assert found.gpus[0].name == "NVIDIA H100"
    assert found.gpus[0].link is None
    assert (found.gpus[0].pcie_generation, found.gpus[0].pcie_generation_max) == (4, 5)
    assert "cannot use the GPU" in str(found.gpu_problem)


def test_the_table_has_the_rates_of_kernels_and_a_plan_takes_them_from_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = tuple(
        AttentionRate(head=head, tokens=tokens, forward_flops_per_s=forward, backward_flops_per_s=forward - 50e12)
        for head, forward in ((64, 400e12), (128, 600e12))
        for tokens in (4096, 16384, 65536)
    )
    kernels = KernelRates(product_flops_per_s=650e12, copy_bytes_per_s=2.999e12, launch_s=5e-6, attention=attention)
    (gpu,) = examine([], seconds=SECONDS, nvml=one_gpu()).gpus
    found = dataclasses.replace(
        examine([], seconds=SECONDS, nvml=no_gpu()), gpus=[dataclasses.replace(gpu, kernels=kernels)]
    )
    monkeypatch.setattr("memo.machine.examine", lambda *_, **__: found)
    assert main(["doctor"]) == ExitCode.OK
    table = " ".join(capsys.readouterr().out.split())
    assert "GPU 0 kernels matrix product 650 TFLOP/s, copy 3 TB/s, read and written, launch 5 µs" in table
    assert "attention, heads of 128 600 forward, 550 backward TFLOP/s at 16k tokens" in table
    assert main(["doctor", "--json"]) == ExitCode.OK
    (tmp_path / "doctor.json").write_text(capsys.readouterr().out)
    machine = with_measured_rates(PRESETS["h100"], tmp_path / "doctor.json")
    assert 1e12 / machine.attention_s(1e12, head=64, keys=16384) == pytest.approx(400e12)
    assert machine.product_flops_per_s == pytest.approx(650e12)


def test_a_link_is_measured_on_the_gpu_at_the_same_bus_address(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = LinkRates(
        d2h_bytes_per_s=1.0, h2d_bytes_per_s=2.0, d2h_together_bytes_per_s=3.0, h2d_together_bytes_per_s=4.0
    )
    measured: list[int] = []

    def measure(device: Any, *, seconds: float) -> LinkRates:
        measured.append(device.index)
        return rates

    buses = [0x01, 0xFF]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda index: types.SimpleNamespace(pci_domain_id=0, pci_bus_id=buses[index], pci_device_id=0x1F),
    )
    monkeypatch.setattr(doctor, "measure_link", measure)
    monkeypatch.setattr(doctor, "measure_kernels", lambda device, *, seconds: None)
    found = examine([], seconds=SECONDS, nvml=one_gpu())
    assert measured == [1]
    assert found.gpus[0].link == rates
    assert found.gpu_problem is None


# Why GPUDirect Storage does not work


CUFILE = """{
    // NOTE : comments start lines, as in "gds.ini"
    "properties": {
            // allow compat mode
            "allow_compat_mode": true,
            "use_pci_p2pdma": %s  // since CUDA 12.8
    }
}
"""


def machine(
    root: Path,
    *,
    kind: str = "ext4",
    options: str = "rw,data=ordered",
    device: str = "nvme0n1",
    partition: bool = True,
    driver: bool = True,
    nvidia_fs: bool = True,
    container: bool = False,
    udev: bool = True,
    cufile: str | None = None,
) -> Path:
    """A /proc and /sys as they look on some machine; GDS works on the default one. Returns a directory on its disk."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        "21 1 0:5 / / rw - ext4 /dev/root rw\n"
        f"30 21 259:2 / {root}/data rw,relatime shared:1 - {kind} /dev/{device} {options}\n"
        f"31 21 0:6 / {root} rw - tmpfs tmpfs rw\n"
    )
    disk = root / "sys/devices/pci0000:00/block" / device
    (disk / f"{device}p2").mkdir(parents=True)
    (disk / f"{device}p2/partition").write_text("2")
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/259:2").symlink_to(disk / f"{device}p2" if partition else disk)
    for present, name in ((driver, "nvidia"), (nvidia_fs, "nvidia-fs")):
        if present:
            (root / "proc/driver" / name).mkdir(parents=True)
            (root / "proc/driver" / name / "version").write_text("1")
    if container:
        (root / ".dockerenv").touch()
    if udev:
        (root / "run/udev").mkdir(parents=True)
    if cufile is not None:
        (root / "etc").mkdir()
        (root / "etc/cufile.json").write_text(cufile)
    (root / "data/scratch").mkdir(parents=True)
    return root / "data/scratch"


@pytest.fixture
def _kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds_probe.importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("_kvikio")
@pytest.mark.parametrize("partition", [True, False])
def test_the_machine_for_it_has_no_obstacle(tmp_path: Path, partition: bool) -> None:
    directory = machine(tmp_path, partition=partition)
    assert mount_of(directory, root=tmp_path) == Mount(
        source="/dev/nvme0n1", kind="ext4", options="rw,relatime,rw,data=ordered", block_device="nvme0n1"
    )
    assert obstacles(directory, root=tmp_path) == []


@pytest.mark.usefixtures("_kvikio")
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"driver": False}, "no NVIDIA driver"),
        ({"nvidia_fs": False}, "modprobe nvidia-fs"),
        ({"nvidia_fs": False, "container": True}, "container"),
        ({"nvidia_fs": False, "cufile": CUFILE % "false"}, "set properties.use_pci_p2pdma in "),
        ({"nvidia_fs": False, "cufile": "no json"}, "modprobe nvidia-fs"),
        ({"nvidia_fs": False, "cufile": "[]"}, "modprobe nvidia-fs"),
        (
            {"cufile": '{"properties": {"force_compat_mode": true}}'},
            "cufile.json has force_compat_mode: set it to false",
        ),
        ({"udev": False}, "-v /run/udev:/run/udev:ro"),
        ({"options": "rw"}, "data=ordered"),
        ({"options": "rw,data=writeback"}, "data=ordered"),
        ({"kind": "overlay"}, "overlay"),
        ({"kind": "tmpfs"}, "is memory"),
        ({"kind": "btrfs"}, "btrfs"),
        ({"device": "vda"}, "virtio"),
        ({"device": "dm-0"}, "device-mapper"),
        ({"device": "sda"}, "not an NVMe"),
    ],
    ids=lambda value: str(value),
)
def test_each_obstacle_is_named_alone(tmp_path: Path, setting: dict[str, Any], reason: str) -> None:
    found = obstacles(machine(tmp_path, **setting), root=tmp_path)
    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.usefixtures("_kvikio")
def test_peer_to_peer_needs_no_kernel_module(tmp_path: Path) -> None:
    assert obstacles(machine(tmp_path, nvidia_fs=False, cufile=CUFILE % "true"), root=tmp_path) == []


@pytest.mark.usefixtures("_kvikio")
def test_xfs_needs_no_mount_option(tmp_path: Path) -> None:
    assert obstacles(machine(tmp_path, kind="xfs", options="rw"), root=tmp_path) == []


def test_a_missing_kvikio_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds_probe.importlib.util, "find_spec", lambda name: None)
    assert obstacles(machine(tmp_path), root=tmp_path) == ["kvikio is not installed: pip install kvikio-cu13"]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('{\"equal\": true}')", None),
        ("print('{\"equal\": false}')", "did not come back"),
        ("raise SystemExit('cuFileDriverOpen failed')", "cuFileDriverOpen failed"),
        ("import time; time.sleep(60)", "hangs"),
        ("import os; print('{\"equal\": %s}' % os.environ['CUFILE_ALLOW_COMPAT_MODE'])", "did not come back"),
    ],
)
def test_a_trial_says_what_happened_and_never_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, expected: str | None
) -> None:
    monkeypatch.setattr(gds_probe, "_TRIAL_LIMIT_S", 2.0)
    real = subprocess.run

    def replaced(command: list[str], **options: Any) -> Any:
        assert command[0] == sys.executable
        assert command[-1] == str(tmp_path)
        return real([sys.executable, "-S", "-c", program], **options)

    monkeypatch.setattr(subprocess, "run", replaced)
    found = try_gds(tmp_path)
    assert found == [] if expected is None else expected in found[0]
