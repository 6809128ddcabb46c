"""The files in docs/launch start what they say: as many processes as the layout has ranks, with flags that exist."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from memo.cli import train
from memo.gpt import preset

LAUNCH = Path(__file__).parents[2] / "docs" / "launch"


def checked(flags: list[str], ranks: int) -> None:
    """Parses the flags and holds the layout against the processes, as a run does first."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    train.configure(parser)
    config = train._config(parser.parse_args(flags))
    config.layout.check_ranks(ranks)
    microbatches = config.training.accumulate
    config.layout.check(preset(config.model), seq=config.seq, batch=config.batch, microbatches=microbatches)


def flags_of(text: str, run: str) -> list[str]:
    """Those that stand after `memo.cli.main train` in a script's last command."""
    tail = text.split("-m memo.cli.main train")[1].replace("\\\n", " ").replace("$run", run).replace('"$@"', "")
    return shlex.split(tail)


def test_the_slurm_example_is_a_layout_of_its_nodes() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    header = re.search(r"sbatch --nodes (\d+) --gpus-per-node (\d+) \S+ (\S+) ((?:.*\\\n#.*)|.*)\n", text)
    assert header is not None
    nodes, gpus, run, rest = header.groups()
    checked(flags_of(text, run) + shlex.split(rest.replace("\\\n#", " ")), int(nodes) * int(gpus))
    subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sbatch")], check=True)


def test_the_one_node_example_is_a_layout_of_eight() -> None:
    text = (LAUNCH / "one-node.sh").read_text()
    header = re.search(r"one-node\.sh (run1) (--.*)\n", text)
    assert header is not None
    checked(flags_of(text, header[1]) + shlex.split(header[2]), 8)


def test_the_kubernetes_job_has_a_rank_for_each_gpu() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(arg[2:].split("=", 1) for arg in container["args"] if arg.startswith("--") and "=" in arg)
    assert spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["nproc-per-node"])
    name = job["metadata"]["name"]
    assert options["rdzv-endpoint"].split(":")[0] == f"{name}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    start = container["args"].index("train") + 1
    checked(container["args"][start:], spec["completions"] * int(options["nproc-per-node"]))


@pytest.mark.parallel
def test_one_node_runs_as_it_is_and_goes_on_when_run_again(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        command = [str(LAUNCH / "one-node.sh"), str(tmp_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 20
    assert "step-00000020" in done.stdout  # the second time it had nothing left to do
