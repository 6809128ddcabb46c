"""Budgets of device, host and disk for `memo plan`: their flags, and their defaults on a machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.mip.activation import Budgets
from memo.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memo.mip.inputs import Hardware

DEVICE_SHARE, HOST_SHARE = 0.95, 0.8
"""Fractions of device and host memory that are the default budgets; the CUDA context, the program and the page cache need
the rest."""


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --device, --host, --disk-budget and --wear."""
    within = parser.add_argument_group("budgets")
    within.add_argument("--device", metavar="SIZE", help="memory of one GPU, such as 80GiB (default: 95 %% of it)")
    within.add_argument(
        "--host",
        metavar="SIZE",
        help="host memory of one node, for all its ranks; 0 is none (default: 80 %% of it; of fewer GPUs than the node has "
        "their share)",
    )
    within.add_argument(
        "--disk-budget",
        dest="disk_budget",
        default="0",
        metavar="SIZE",
        help="disk space of one node; 0 is none (default 0)",
    )
    within.add_argument(
        "--wear",
        type=float,
        metavar="TB",
        help="terabytes per day that may be written to the disks (default: no limit)",
    )


def budgets_of(args: argparse.Namespace, machine: Hardware) -> Budgets:
    """Parses the budgets of one rank's device, and of the host and the disks of one node.

    Args:
        args: the parsed flags, with --gpus and --recompute.
        machine: what the defaults are fractions of.

    Raises:
        UsageError: a size or a rate cannot be read, or the device budget is more than the GPU has. A host budget above
            what the machine is described with is warned about, since hosts of one GPU differ.
    """
    ranks = min(max(args.gpus, 1), machine.gpus_per_node)
    own = 1.0 if args.search or args.cluster is not None else ranks / machine.gpus_per_node
    device, host = int(DEVICE_SHARE * machine.device_bytes), int(HOST_SHARE * machine.host_bytes * own)
    if args.recompute is not None:
        host = 0
    if args.device is not None:
        device = parse_bytes(args.device, what="--device")
        if device == 0:
            raise UsageError("--device 0: a plan needs memory of the GPU; write for instance --device 40GiB")
        if device > machine.device_bytes:
            most = format_bytes(machine.device_bytes, down=True)
            raise UsageError(
                f"--device {args.device} is more than the {most} of {machine.name}; give no more, or another --gpu"
            )
    if args.host is not None:
        host = parse_bytes(args.host, what="--host")
        if host > machine.host_bytes:
            most = format_bytes(machine.host_bytes, down=True)
            print(
                f"memo plan: warning: --host {args.host} is more than the {most} that a node of {machine.name} is "
                "described with; the plan is for a node that has it",
                file=sys.stderr,
            )
    if args.wear is not None and not args.wear >= 0:
        raise UsageError(f"--wear {args.wear} is not zero or a positive number; give terabytes per day")
    return Budgets(
        device_bytes=device,
        host_bytes=host,
        disk_bytes=parse_bytes(args.disk_budget, what="--disk-budget"),
        disk_wear_bytes_per_day=None if args.wear is None else args.wear * 1e12,
        ranks_per_node=ranks,
    )
