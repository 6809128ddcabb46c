"""The machine that a command plans or rehearses for: a GPU by name or description, with rates that were measured on it.

Owns --gpu, --doctor, --attention and --net.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Annotated

from memo.cli.inputs.flag_types import Flag, InputFile
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import UsageError
from memo.mip.activation import read_hardware
from memo.mip.inputs import PRESETS, Hardware, hardware_preset, parse_network, with_measured_rates

Gpu = Annotated[str, Flag(metavar="NAME|FILE", names=tuple(PRESETS))]
_NICS_HELP = "network between nodes: the NICs of a node, such as 8x400Gb, or none for one node (default: the machine's)"
Nics = Annotated[str, Flag(metavar="NICS", help=_NICS_HELP)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """A machine. The fields are flags."""

    gpu: Gpu | None = None
    """GPU: {names}, or a JSON description of a machine."""
    doctor: InputFile | None = None
    """Use the rates that memo doctor --json measured on the machine (default: the rates of --gpu)."""
    attention: Annotated[str | None, Flag(metavar="KERNEL")] = None
    """Kernel of attention whose rates are used, by name: on an H100 cudnn, flashattention2 or flashattention3 (default: the
    one that torch takes there)."""


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


def measured(machine: Hardware, doctor: str | None, net: str | None = None) -> Hardware:
    """A machine with the rates of --doctor and the network of --net, where they are given."""
    if doctor is not None:
        require_kind(doctor, FileKind.MACHINE_REPORT)
        machine = with_measured_rates(machine, doctor)
    return machine if net is None else dataclasses.replace(machine, network=parse_network(net, machine.network))


def machine_of(
    args: argparse.Namespace | MachineOptions, machine: Hardware | None = None, net: str | None = None
) -> Hardware:
    """Hardware of --gpu, or one from elsewhere, with --attention, --doctor and --net.

    Raises:
        UsageError: there is no such GPU or kernel.
        PlanError: a file cannot be read.
    """
    if args.attention is not None and args.doctor is not None:
        raise UsageError(
            "--attention does not go with --doctor, whose file has measured rates of attention; give one of them"
        )
    machine = machine or hardware_named(args.gpu or "")
    if args.attention is not None:
        machine = machine.with_attention(args.attention)
    return measured(machine, args.doctor, net)
