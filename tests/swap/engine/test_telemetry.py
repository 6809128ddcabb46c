"""The counting of times that are known later."""

from __future__ import annotations

import threading
import time

from memo.swap.backends import CpuBackend
from memo.swap.backends.protocol import HostStamp
from memo.swap.engine.telemetry import Telemetry

EACH = 200


class Asked(HostStamp):
    """Lets other threads run while it is asked, as the driver does."""

    __slots__ = ()

    def ns(self) -> int:
        time.sleep(0)
        return super().ns()


class Counting(Telemetry):
    """Counts recomputes."""

    counted = 0

    def _recomputed(self, begin_ns: int, end_ns: int) -> None:
        self.counted += 1


def test_recomputes_of_several_threads_are_each_counted_once() -> None:
    account = Counting(None, CpuBackend())
    failed: list[BaseException] = []

    def recompute() -> None:
        try:
            for _ in range(EACH):
                account.recomputed(Asked(), "layer")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=recompute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert account.counted == 4 * EACH
