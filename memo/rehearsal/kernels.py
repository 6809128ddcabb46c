"""Operators on a simulated GPU: shapes by BytelessMode, seconds by the work of each call, memory by its storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memo.allocator import BytelessMode
from memo.swap import Rates, Work, is_attention, picoseconds_of, work_of
from memo.torch_private import OpOverload

if TYPE_CHECKING:
    from memo.mip.inputs import Hardware
    from memo.rehearsal.clock import Clock
    from memo.rehearsal.memory import SimulatedDeviceMemory

__all__ = ["SimulatedKernels"]

_ATEN = torch.ops.aten
_READS = frozenset({_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default})
"""The host waits for their results."""
_FORWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
MEMORY_SHARE = 0.9
"""Share of a GPU's memory bandwidth that element-wise kernels reach (memo.swap.recompute.tape.work has its source)."""
FP32_SHARE = 67 / 989
"""Peak of float32 products without tensor cores, as a share of that in bfloat16: the data sheet of an H100."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward over its forward's: five products for two."""


class SimulatedKernels(BytelessMode):
    """Dispatch mode in which operators take time and memory of a device that is not here.

    Args:
        hardware: rates of the device.
        clock: is moved on by each kernel.
        memory: counts each storage.
        assume: as of BytelessMode.
    """

    def __init__(
        self, hardware: Hardware, clock: Clock, memory: SimulatedDeviceMemory, *, assume: float | None = None
    ) -> None:
        super().__init__(assume=assume)
        flops = int(hardware.peak_flops * hardware.matmul_efficiency)
        by_bytes = int(hardware.hbm_bytes_per_s * MEMORY_SHARE)
        self._half = Rates(flops_per_s=flops, bytes_per_s=by_bytes, launch_ps=0)
        self._single = Rates(flops_per_s=int(flops * FP32_SHARE), bytes_per_s=by_bytes, launch_ps=0)
        attention = int(hardware.peak_flops * hardware.attention_efficiency)
        self._attention = Rates(flops_per_s=attention, bytes_per_s=by_bytes, launch_ps=0)
        self._clock = clock
        self._memory = memory
        self._known_ns: dict[Any, int] = {}

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

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Makes a storage that the device's memory counts."""
        made = super().storage(nbytes)
        self._memory.add(made)
        return made

    def _kernel_ns(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Nanoseconds of a call's kernel; -1 for what launches none."""
        name = func.overloadpacket.__name__
        if "attention" in name and "backward" in name:
            forward = work_of(_FORWARD, args[1:4], {"is_causal": _is_causal(func, args)}, args[4:6])
            work = Work(flops=int(ATTENTION_BACKWARD * forward.flops), nbytes=2 * forward.nbytes)
            return picoseconds_of(work, self._attention) // 1000
        work = work_of(func, args, kwargs, out)
        if not work.flops and not work.nbytes:
            return -1
        if is_attention(func):
            return picoseconds_of(work, self._attention) // 1000
        dtype = next((one.dtype for one in (*args, out) if isinstance(one, torch.Tensor)), torch.float32)
        return picoseconds_of(work, self._half if dtype.itemsize <= 2 else self._single) // 1000


def _is_causal(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Argument `is_causal` of attention's backward."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("is_causal") if "is_causal" in names else len(args)
    return bool(args[at]) if at < len(args) else True
