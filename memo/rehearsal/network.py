"""Times of a simulated GPU's collectives, each from its operator, by the network of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memo.dry_run import collective_of
from memo.gpt.arithmetic import CollectiveKind, collective_s
from memo.mip.inputs import Collectives, RankGroup

if TYPE_CHECKING:
    from memo.mip.inputs import Hardware
    from memo.torch_private import OpOverload


class SimulatedNetwork:
    """Network of the GPUs of a job, whose ranks fill one node after the other.

    Args:
        hardware: its links.
        ranks: number of GPUs.
    """

    def __init__(self, hardware: Hardware, ranks: int) -> None:
        self._times = Collectives(hardware)
        self._gpus_per_node = hardware.gpus_per_node
        self._ranks = ranks
        self.send_s = 0.0
        """Seconds of the last message to another pipeline stage."""

    def collective(self, func: OpOverload, args: tuple[Any, ...]) -> tuple[float, tuple[int, ...]] | None:
        """Seconds and ranks of an operator of torch's process groups; None for those that only wait, and for messages.

        Raises:
            RecordError: it is a collective that memo does not know.
            UsageError: its ranks are on nodes that no network connects.
        """
        call = collective_of(func, args)
        if call is None:
            return None
        first, second = (*call.ranks, call.ranks[0] + 1)[:2]
        group = RankGroup.of(
            len(call.ranks), stride=abs(second - first), gpus_per_node=self._gpus_per_node, gpus=self._ranks
        )
        seconds = collective_s(self._times, call.kind, call.nbytes, group)
        if call.kind in (CollectiveKind.SEND, CollectiveKind.RECEIVE):
            self.send_s = seconds or self.send_s
            return None
        return seconds, call.ranks
