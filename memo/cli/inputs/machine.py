"""The machine that a command plans or rehearses for: a GPU by name or description, with rates that were measured on it.

Owns --gpu, --doctor and --attention.
"""

from __future__ import annotations

import argparse

from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import UsageError
from memo.mip.activation import read_hardware
from memo.mip.inputs import PRESETS, Hardware, hardware_preset, with_measured_rates


def add_machine_flags(group: argparse._ArgumentGroup, *, default: str | None = None) -> None:
    """Adds --gpu, --doctor and --attention; `default` is the GPU where none is given."""
    ending = "" if default is None else f" (default {default})"
    group.add_argument(
        "--gpu",
        default=default,
        metavar="NAME|FILE",
        help=f"GPU: {', '.join(PRESETS)}, or a JSON description of a machine{ending}",
    )
    group.add_argument(
        "--doctor",
        metavar="FILE",
        help="use the rates that memo doctor --json measured on the machine (default: the rates of --gpu)",
    )
    group.add_argument(
        "--attention",
        metavar="KERNEL",
        help="kernel of attention whose rates are used, by name: on an H100 cudnn, flashattention2 or flashattention3 "
        "(default: the one that torch takes there)",
    )


def hardware_named(name: str) -> Hardware:
    """Hardware of a preset, or of a description's path.

    Raises:
        UsageError: there is no such GPU.
        PlanError: the file cannot be read.
    """
    if not (name.endswith(".json") or "/" in name):
        return hardware_preset(name)
    require_kind(name, FileKind.HARDWARE)
    return read_hardware(name)


def measured(machine: Hardware, path: str | None) -> Hardware:
    """A machine with the rates of --doctor, where it is given."""
    if path is None:
        return machine
    require_kind(path, FileKind.MACHINE_REPORT)
    return with_measured_rates(machine, path)


def machine_of(args: argparse.Namespace, machine: Hardware | None = None) -> Hardware:
    """Hardware of --gpu, or one from elsewhere, with --attention and --doctor.

    Raises:
        UsageError: there is no such GPU or kernel.
        PlanError: a file cannot be read.
    """
    if args.attention is not None and args.doctor is not None:
        raise UsageError(
            "--attention does not go with --doctor, whose file has measured rates of attention; give one of them"
        )
    machine = machine or hardware_named(args.gpu)
    if args.attention is not None:
        machine = machine.with_attention(args.attention)
    return measured(machine, args.doctor)
