"""Offload manager of a run: translates the command line's offload options to the arguments of `memo.offload`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from memo.errors import UsageError
from memo.gpt.run_config import OffloadConfig, OffloadMode
from memo.machine import require_host_memory
from memo.manager import Machine, Manager, offload


def open_manager(
    config: OffloadConfig,
    model: nn.Module,
    device: torch.device,
    *,
    layers: Sequence[nn.Module],
    group: ProcessGroup | None = None,
    schedule: Any = None,
) -> Manager | None:
    """Opens the manager; the caller closes it.

    Args:
        config: tiers and budgets.
        model: the module whose activations move.
        device: the device that the model runs on.
        layers: the model's layers, of which there may be one.
        group: process group of the ranks that hold the same layers, as for `memo.offload`.
        schedule: torch's pipeline schedule, as for `memo.offload`.

    Returns:
        The manager, or None for mode none.

    Raises:
        UsageError: the options do not fit the device.
    """
    if config.mode is OffloadMode.NONE:
        return None
    there = Machine(device).total_host_bytes()
    if config.plan is None:
        require_host_memory(config.host or 0, there, argument="--host {}")
    elif (
        config.host is not None
    ):  # the budget of the machine that the plan is for, which may have more than the plan takes
        config = dataclasses.replace(config, host=min(config.host, there))
    return offload(
        model,
        plan=config.plan,
        device=config.device,
        # A named tier means that everything moves there; mode auto makes a plan.
        alpha=1.0 if config.alpha is None and config.mode is not OffloadMode.AUTO else config.alpha,
        codec=config.codec,
        host_pool=config.host_pool,
        disk_budget=config.disk_budget,
        layers=layers,
        trace=config.trace,
        trace_stacks=config.trace_stacks,
        group=group,
        schedule=schedule,
        **_tiers(config, device),
    )


def _tiers(config: OffloadConfig, device: torch.device) -> dict[str, Any]:
    """Arguments `host` and `disk`. On a CPU, host memory is the device, and a tier only with an explicit budget."""
    budget = config.host
    if config.mode is OffloadMode.HOST:
        if budget is None and device.type == "cpu":
            raise UsageError("--offload host on a CPU needs --host, since host memory is the device there")
        return {"host": "auto" if budget is None else budget, "disk": None}
    if config.mode is OffloadMode.DISK:
        return {"host": budget or 0, "disk": config.disk or Path(tempfile.gettempdir())}
    return {"host": "auto" if budget is None else budget, "disk": config.disk}
