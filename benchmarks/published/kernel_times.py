"""Times of a GPU's kernels by their sizes: matrix products, attention, element-wise passes.

Owns a model with a handful of rates for each kind of GPU, shared by all products that it runs:

    product of (m, k) and (k, n)   2 m n k FLOPs at  peak x efficiency x m/(m+c) x n/(n+c) x k/(k+c)
                                   or its operands' bytes at the memory's rate, whichever takes longer
    attention                      its FLOPs at peak x attention's efficiency; a causal mask halves them
    element-wise                   bytes read and written, at the share of the memory's rate that kernels reach

c is the size at which half of a dimension is lost to the edges of tiles and to filling the pipeline. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memo.mip.inputs import Hardware


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """Efficiencies of kernels on one kind of GPU."""

    matmul_efficiency: float
    """Fraction of the peak that matrix products without edges reach."""
    half_size: float = 0.0
    """Size of a dimension at which a product is half as fast."""
    attention_efficiency: float
    """Fraction of the peak that fused attention reaches, forward and backward."""
    memory_share: float = 1.0
    """Fraction of the memory's rate that element-wise kernels reach."""
    fp8_gain: float = 1.0
    """Factor by which a product in 8 bits is faster, with the casts that it needs."""

    @classmethod
    def of(cls, machine: Hardware) -> KernelRates:
        """Rates of a machine's description."""
        return cls(matmul_efficiency=machine.matmul_efficiency, attention_efficiency=machine.attention[0].share(128))


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTimes:
    """Seconds of kernels on one machine."""

    machine: Hardware
    rates: KernelRates

    def product_s(self, m: float, n: float, k: float, *, fp8: bool = False) -> float:
        """Seconds of a matrix product, its operands and its result in 16 bits.

        Args:
            m: rows of the left operand.
            n: columns of the right operand.
            k: the dimension that is summed over.
            fp8: whether the operands are cast to 8 bits.
        """
        c, rates = self.rates.half_size, self.rates
        edges = m / (m + c) * n / (n + c) * k / (k + c)
        gain = rates.fp8_gain if fp8 else 1.0
        compute_s = 2.0 * m * n * k / (self.machine.peak_flops * rates.matmul_efficiency * edges * gain)
        return max(compute_s, self.passes_s(2 * (m * n + n * k + m * k)))

    def three_products_s(self, m: float, n: float, k: float, *, fp8: bool = False) -> tuple[float, float]:
        """Seconds of a linear layer's product in forward, and of its two in backward: for the input, for the weight."""
        backward = self.product_s(m, k, n, fp8=fp8) + self.product_s(k, n, m, fp8=fp8)
        return self.product_s(m, n, k, fp8=fp8), backward

    def products_s(self, flops: float) -> float:
        """Seconds of matrix products' FLOPs, without what their edges lose."""
        return flops / (self.machine.peak_flops * self.rates.matmul_efficiency)

    def attention_s(self, flops: float) -> float:
        """Seconds of fused attention's FLOPs."""
        return flops / (self.machine.peak_flops * self.rates.attention_efficiency)

    def passes_s(self, nbytes: float) -> float:
        """Seconds to read and write bytes in element-wise kernels."""
        return nbytes / (self.machine.hbm_bytes_per_s * self.rates.memory_share)
