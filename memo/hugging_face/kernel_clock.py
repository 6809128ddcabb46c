"""Predicted seconds of a step's kernels, counted operator by operator as it runs on tensors without bytes.

Owns where an operator's time counts: in a layer's forward or backward, or at one of the ends. What a kernel takes is
`memo.machine.KernelTimes`'.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from memo.allocator import AllocationSite, LocalTensorMode
from memo.dry_run import COLLECTIVES, collective_of
from memo.gpt.arithmetic import Collective, Ranks
from memo.machine import KernelTimes
from memo.mip.inputs import Hardware

EMBEDDING, HEAD = "embedding", "head"
MOST_OPERATORS = 30_000
"""Most operators of one forward and backward of a few layers; more are a loop over tokens."""


@dataclasses.dataclass(slots=True)
class PassCost:
    """What one pass of a layer or an end does."""

    operators: int = 0
    kernels: int = 0
    seconds: float = 0.0
    """Without attention's kernel."""
    product_flops: float = 0.0
    attention_flops: float = 0.0
    """FLOPs of fused attention's forward, causal where it is."""
    attention_s: float = 0.0
    collectives: tuple[Collective, ...] = ()
    """Collectives of tensor parallelism, which take no time here."""

    def with_attention_s(self, attention_s: float, machine: Hardware) -> float:
        """Seconds of the pass with so many of attention's kernel: no fewer than its kernels take to launch."""
        return max(self.seconds + attention_s, self.kernels * machine.launch_s)


class TooManyOperators(Exception):
    """The step has more operators than it is worth to count."""


class KernelClock(LocalTensorMode):
    """Counts while it is entered. `AllocationSites` tells it which layer runs.

    Args:
        machine: whose kernels run.
        most: operators that may run before `TooManyOperators` is raised; 0: any number.
    """

    def __init__(self, machine: Hardware, *, most: int = 0) -> None:
        super().__init__()
        self.site = AllocationSite()
        self.spent: dict[str, PassCost] = collections.defaultdict(PassCost)
        """Costs by `LAYER.forward`, `LAYER.backward`, and the same of the ends."""
        self._times = KernelTimes(machine)
        self._between = EMBEDDING
        self._phase = "forward"
        self._operators, self._most = 0, most

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator, and counts it."""
        out = func(*args, **kwargs)
        self._operators += 1
        if 0 < self._most < self._operators:
            raise TooManyOperators
        self._count(self.spent[self._place()], func, args, kwargs, out)
        return out

    def _place(self) -> str:
        site = self.site
        if site.phase != self._phase:
            self._phase, self._between = site.phase, HEAD
        if site.group:
            self._between = HEAD if self._phase == "forward" else EMBEDDING
            return site.group
        return f"{self._between}.{self._phase}"

    def _count(self, spent: PassCost, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        spent.operators += 1
        if (call := collective_of(func, args)) is not None:
            spent.collectives += (Collective(kind=call.kind, ranks=Ranks.TENSOR, nbytes=call.nbytes),)
        if func.namespace in COLLECTIVES:
            return
        time = self._times.of(func, args, kwargs, out)
        spent.kernels += time.seconds > 0
        spent.product_flops += time.product_flops
        spent.attention_flops += time.attention_flops
        if time.attends:
            spent.attention_s += time.seconds
        else:
            spent.seconds += time.seconds
