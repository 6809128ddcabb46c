"""Measures collectives as one rank and prints, on the first, what was found; arguments: seconds, ranks of a node, sizes."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

import torch

from memo.machine import measure_collectives
from memo.parallel import join

seconds, per_node, sizes = float(sys.argv[1]), int(sys.argv[2]), [int(size) for size in sys.argv[3:]]
rank = int(os.environ["RANK"])
with join(torch.device("cpu")):
    rates = measure_collectives(torch.device("cpu"), seconds=seconds, sizes=sizes, node=f"node {rank // per_node}")
if rank == 0:
    print(json.dumps(dataclasses.asdict(rates)))
