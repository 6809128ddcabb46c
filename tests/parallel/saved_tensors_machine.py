"""A device that holds nothing but saved tensors. Shared by the workers here whose memo makes plans for a budget."""

from __future__ import annotations

import torch

from memo.autoplan import DeviceBudget
from memo.manager import Machine


class SavedTensorsMachine(Machine):
    """This CPU, whose budget is for saved tensors alone: on a CPU memo else counts all memory of the process."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def device_budget(self, nbytes: int | None) -> DeviceBudget:
        return DeviceBudget(
            total_bytes=1 << 40 if nbytes is None else nbytes, peak_bytes=lambda: 0, restart=lambda: None
        )
