"""Machines of the published tables: memo's presets, and kinds of GPU that have none."""

from __future__ import annotations

import dataclasses
import functools

from memo.mip.inputs import Hardware, Network, hardware_preset

__all__ = ["machine_of"]

GIB = 1 << 30


@functools.cache
def machine_of(name: str) -> Hardware:
    """Machine of this name.

    Sources: NVIDIA's data sheets of the A100 (40 GB: HBM2 at 1.555 TB/s) and H100; torchtitan's report of December 2024
    for its H100 with 96 GB of HBM2e at 500 W, whose memory is taken as five stacks at 3.2 Gb/s; MosaicML's tables for
    NICs of 1600 Gb/s a node; AWS's p5 for ALST (EFA, 3200 Gb/s; 1.9 TB of host memory).
    """
    a100, h100 = hardware_preset("a100-80g"), hardware_preset("h100")
    match name:
        case "a100-40g":
            return dataclasses.replace(a100, name=name, device_bytes=40 * GIB, hbm_bytes_per_s=1.555e12)
        case "h100-96g":
            return dataclasses.replace(h100, name=name, device_bytes=96_000_000_000, hbm_bytes_per_s=2.4e12)
        case "gb200":
            network = Network(nics_per_node=4, nic_bytes_per_s=50e9)
            b200 = hardware_preset("b200")
            return dataclasses.replace(b200, name=name, gpus_per_node=4, network=network)
        case _:
            return hardware_preset(name)
