"""Operators on a simulated GPU: shapes by BytelessMode, seconds by the work of each call, memory by its storages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from memo.allocator import BytelessMode
from memo.machine import KernelTimes
from memo.torch_private import OpOverload

if TYPE_CHECKING:
    from memo.mip.inputs import Hardware
    from memo.rehearsal.clock import Clock
    from memo.rehearsal.memory import SimulatedDeviceMemory
    from memo.rehearsal.network import SimulatedNetwork

_ATEN = torch.ops.aten
_READS = frozenset({_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default})
"""The host waits for their results."""
_UPDATES = frozenset({_ATEN._fused_adamw_.default})
"""Run on the host where the parameters are there."""


class SimulatedKernels(BytelessMode):
    """Dispatch mode in which operators take time and memory of a device that is not here.

    Args:
        hardware: rates of the device.
        clock: is moved on by each kernel.
        memory: counts each storage.
        network: times collectives.
        assume: as of BytelessMode.
        host_bytes_per_s: rate of an optimizer's step on tensors in host memory.
    """

    def __init__(
        self,
        hardware: Hardware,
        clock: Clock,
        memory: SimulatedDeviceMemory,
        network: SimulatedNetwork,
        *,
        assume: float | None = None,
        host_bytes_per_s: float = math.inf,
    ) -> None:
        super().__init__(assume=assume)
        self._host_bytes_per_s = host_bytes_per_s
        self._times = KernelTimes(hardware)
        self._clock = clock
        self._memory = memory
        self._network = network
        self._known_ns: dict[Any, int] = {}
        self._awaited: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        """Results of functional collectives that nothing has waited for, with the ends of these."""

    def compute(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Runs one operator, and moves the clock on by what its kernel takes."""
        if func in _READS:
            self._clock.finish()
        out = super().compute(func, args, kwargs, key, tensors)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._communicate(func, args, out)
            return out
        if func in _UPDATES and not self._memory.holds(args[0][0]):
            # Parameters, gradients and moments are read, and all but gradients written.
            moved = 2 * sum(one.nbytes for one in tensors) - sum(one.nbytes for one in args[1])
            self._clock.wait(self._clock.host_ns + round(moved / self._host_bytes_per_s * 1e9))
            return out
        try:
            known = self._known_ns.get(key)
        except TypeError:  # an argument that has no hash
            known, key = None, None
        if known is None:
            known = self._kernel_ns(func, args, kwargs, out)
            if key is not None:
                self._known_ns[key] = known
        if known >= 0:
            self._clock.run(known)
        return out

    def _communicate(self, func: OpOverload, args: tuple[Any, ...], out: Any) -> None:
        """A functional collective is waited for by an operator of its own, others by the stream that launched them."""
        found = self._network.collective(func, args)
        if found is not None:
            end_ns = self._clock.communicate(int(found[0] * 1e9), found[1])
            if func.namespace == "_c10d_functional":
                self._awaited[out.untyped_storage()] = end_ns
            else:
                self._clock.await_until(end_ns)
        elif func is torch.ops._c10d_functional.wait_tensor.default:
            self._clock.await_until(self._awaited.pop(args[0].untyped_storage(), 0))

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Makes a storage that the device's memory counts."""
        made = super().storage(nbytes)
        self._memory.add(made)
        return made

    def _kernel_ns(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Nanoseconds of a call's kernel; -1 for what launches none."""
        seconds = self._times.of(func, args, kwargs, out).seconds
        return int(seconds * 1e9) if seconds else -1
