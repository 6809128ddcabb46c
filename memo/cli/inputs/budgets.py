"""Budgets of device, host and disk for `memo plan`: their flags, and their defaults on a machine."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

from memo.cli.inputs.flag_types import Flag, Size
from memo.errors import UsageError
from memo.mip.activation import Budgets
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.mip.inputs import Hardware

DEVICE_SHARE, HOST_SHARE = 0.95, 0.8
"""Fractions of device and host memory that are the default budgets; the CUDA context, the program and the page cache need
the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """Budgets as they are asked for. The fields are flags."""

    device: Size | None = None
    """Memory of one GPU, such as 80GiB (default: 95 % of it)."""
    host: Size | None = None
    """Host memory of one node, for all its ranks; 0 is none (default: 80 % of it; of fewer GPUs than the node has their
    share)."""
    disk_budget: Size | None = None
    """Disk space of one node; 0 is none (default 0)."""
    wear: Annotated[float | None, Flag(metavar="TB")] = None
    """Terabytes per day that may be written to the disks (default: no limit)."""


def budgets_of(args: argparse.Namespace, machine: Hardware) -> Budgets:
    """Budgets of one rank's device, and of the host and the disks of one node.

    Args:
        args: the parsed flags, with --gpus and --recompute.
        machine: what the defaults are fractions of.

    Raises:
        UsageError: --wear is negative, or the device budget is nothing or more than the GPU has. A host budget above
            what the machine is described with is warned about, since hosts of one GPU differ.
    """
    ranks = min(max(args.gpus, 1), machine.gpus_per_node)
    own = 1.0 if args.search or args.cluster is not None else ranks / machine.gpus_per_node
    device = int(DEVICE_SHARE * machine.device_bytes) if args.device is None else args.device
    host = args.host
    if host is None:
        host = int(HOST_SHARE * machine.host_bytes * own) if args.recompute is None else 0
    if device == 0:
        raise UsageError("--device 0: a plan needs memory of the GPU; write for instance --device 40GiB")
    if device > machine.device_bytes:
        given, most = format_bytes(device, up=True), format_bytes(machine.device_bytes, down=True)
        raise UsageError(
            f"--device: {given} are more than the {most} of {machine.name}; give no more, or another --gpu"
        )
    if host > machine.host_bytes:
        given, most = format_bytes(host, up=True), format_bytes(machine.host_bytes, down=True)
        print(
            f"memo plan: warning: --host: {given} are more than the {most} that a node of {machine.name} is described "
            "with; the plan is for a node that has it",
            file=sys.stderr,
        )
    if args.wear is not None and not args.wear >= 0:
        raise UsageError(f"--wear {args.wear} is not zero or a positive number; give terabytes per day")
    return Budgets(
        device_bytes=device,
        host_bytes=host,
        disk_bytes=args.disk_budget or 0,
        disk_wear_bytes_per_day=None if args.wear is None else args.wear * 1e12,
        ranks_per_node=ranks,
    )
