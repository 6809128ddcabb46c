"""Measures collectives as one rank and prints, on the first, what was found; arguments: seconds, ranks of a node."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

import torch

from memo.machine import measure_collectives
from memo.parallel import join

seconds, per_node = float(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
with join(torch.device("cpu")):
    rates = measure_collectives(torch.device("cpu"), seconds=seconds, node=f"node {rank // per_node}")
if rank == 0:
    print(json.dumps(dataclasses.asdict(rates)))
