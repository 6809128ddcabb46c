"""Methods of gradient compression, and the device memory that they take. Needs no torch."""

from __future__ import annotations

import dataclasses
import enum

from memo.errors import UsageError

DEFAULT_RANK = 4
_SCALE_GROUP, _SCALE_BYTES = 128, 4  # of memo.kernels.codec


class CompressionMethod(enum.StrEnum):
    """Form in which gradients pass between data-parallel ranks."""

    INT8 = "int8"  # codes of one byte, one float32 scale for 128 of them; without state
    POWERSGD = "powersgd"  # two factors of low rank for each matrix, with error feedback (Vogels et al. 2019)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientCompression:
    """A method and its rank; `str` gives what `parse` takes.

    Raises:
        UsageError: the rank is out of range, or the method has none.
    """

    method: CompressionMethod
    rank: int | None = None
    """Columns of PowerSGD's factors; None with int8."""

    def __post_init__(self) -> None:
        if self.method is CompressionMethod.INT8 and self.rank is not None:
            raise UsageError(f"int8 has no rank; give int8, or powersgd:{self.rank}")
        if self.method is CompressionMethod.POWERSGD and (self.rank is None or self.rank < 1):
            raise UsageError(f"the rank of powersgd is 1 or more, not {self.rank}")

    @classmethod
    def parse(cls, text: str) -> GradientCompression:
        """Compression of a text: `int8`, `powersgd` or `powersgd:RANK`.

        Raises:
            UsageError: it is none of them.
        """
        name, colon, rank = text.partition(":")
        if name not in tuple(CompressionMethod) or (colon and not (rank.isascii() and rank.isdecimal())):
            raise UsageError(f"{text!r} is none of int8, powersgd and powersgd:RANK; choose one of them")
        method = CompressionMethod(name)
        default = DEFAULT_RANK if method is CompressionMethod.POWERSGD else None
        return cls(method=method, rank=int(rank) if colon else default)

    def __str__(self) -> str:
        return self.method if self.rank is None else f"{self.method}:{self.rank}"

    def device_bytes(self, *, parameters: int, largest: int, ranks: int) -> int:
        """Bytes of device memory that the compression takes at most beside an exact reduce-scatter's.

        Args:
            parameters: of a rank, before they are sharded over data-parallel ranks.
            largest: those of the module with the most, of the modules that are sharded one by one.
            ranks: data-parallel ranks.
        """
        shard = -(-largest // ranks)
        if self.method is CompressionMethod.POWERSGD:
            # Error feedback in float32, that of the step before and that of the step under way; a shard of the result. The
            # factors are less than a byte for each value of matrices with 40 times as many rows and columns as `rank`.
            return 2 * 4 * parameters + 4 * shard + largest
        codes = largest + _SCALE_BYTES * -(-largest // _SCALE_GROUP)
        # Codes that are sent and received. Of one shard in float32: its sum, and what coding it and measuring its error
        # take; the codec's reference for CPUs takes more of that than its kernels for GPUs.
        return 2 * codes + 6 * 4 * shard
