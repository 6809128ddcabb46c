"""PowerSGD for the sharded gradients of one FSDP module (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2).

A rank's gradient of a matrix is M, of rows x columns, with the error of the step before added. With Q of columns x r:

    P = sum over ranks of M Q, orthonormal columns      all-reduce of rows x r
    Q = sum over ranks of M^T P                         all-reduce of columns x r
    the sum of M is taken as P Q^T, of which a rank makes its own rows
    error = M - P (M^T P)^T, of this rank's M; Q is where the next step begins

Vectors, and matrices whose factors would be no fewer bytes, are reduced exactly. All sums are float32. A matrix in which any
rank has a value that is not finite is NaN on all of them.

A step that is not applied must leave no trace, so error and Q of the step under way stand beside the former ones until
`commit`, and `drop` forgets them.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memo.compression.traffic import GradientTraffic
from memo.errors import UsageError
from memo.parallel import reduce_scattered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A parameter in the buffer that FSDP reduces: each rank's shard is a row of it."""

    name: str
    offset: int
    """Values before it in a shard."""
    rows: int
    """Rows of a shard, padding of FSDP included; the matrix has as many for each rank."""
    columns: int

    def of(self, parts: torch.Tensor) -> torch.Tensor:
        """View of (ranks, values of a shard) as (ranks, rows, columns)."""
        return parts[:, self.offset : self.offset + self.rows * self.columns].view(-1, self.rows, self.columns)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What one step leaves for the next: for each matrix its error, (rows of all ranks, columns), and Q; float32."""

    errors: list[torch.Tensor]
    factors: list[torch.Tensor]


class PowerSgdReduceScatter:
    """Reduce-scatter of one FSDP module (`FSDPModule.set_custom_reduce_scatter`), and its state on this rank.

    Args:
        name: of the module; Q is drawn by it at first, alike on all ranks.
        shards: shape of a rank's shard of each parameter by its name, padding included, in FSDP's order.
        members: ranks of the reduce-scatter.
        rank: columns of the factors.
        itemsize: bytes of a value of the gradients.
        device: of the state.
        traffic: counts.
        trained: names of the parameters that require a gradient now; None where these never change.
    """

    def __init__(
        self,
        name: str,
        shards: Mapping[str, torch.Size],
        *,
        members: Sequence[int],
        rank: int,
        itemsize: int,
        device: torch.device,
        traffic: GradientTraffic,
        trained: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self._name = name
        self.members, ranks = tuple(members), len(members)
        """Ranks of the reduce-scatter."""
        self._traffic = traffic
        self._names, self._trained = list(shards), trained
        self._values = sum(shape.numel() for shape in shards.values())
        self._matrices: list[_Part] = []
        self._exact: list[_Part] = []
        offset = 0
        for parameter, shape in shards.items():
            columns = shape[-1] if len(shape) > 1 else 1
            part = _Part(
                name=parameter, offset=offset, rows=shape.numel() // columns if columns else 0, columns=columns
            )
            offset += shape.numel()
            rows = ranks * part.rows
            # An all-reduce sends a byte twice as often as a reduce-scatter does.
            is_less = 2 * 4 * rank * (rows + columns) < rows * columns * itemsize
            (self._matrices if len(shape) > 1 and is_less else self._exact).append(part)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self._state = _State(
            errors=[torch.zeros(ranks * part.rows, part.columns, device=device) for part in self._matrices],
            factors=[
                torch.randn(part.columns, rank, generator=generator, device="cpu").to(device) for part in self._matrices
            ],
        )
        self._next: _State | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory for FSDP's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Writes this rank's shard of the sum. A collective call."""
        assert op == dist.ReduceOp.SUM, "compress_gradients has FSDP sum, and divide afterwards"
        parts, own = input_tensor.view(group.size(), -1), output_tensor.view(1, -1)
        if self._trained is not None and list(self._trained()) != self._names:
            raise UsageError(
                f"{self._name or 'the model'}: other parameters require a gradient than when powersgd began; call "
                "compress_gradients again after changing them"
            )
        if parts.shape[1] != self._values:
            raise UsageError(
                f"{self._name or 'the model'}: gradients of {parts.numel()} values, and its parameters are of "
                f"{group.size() * self._values}; powersgd needs a gradient of each parameter, use int8"
            )
        self._reduce_exactly(parts, own, group)
        if self._matrices:
            with torch.autocast(parts.device.type, enabled=False):
                self._reduce_matrices(parts, own, group)
        self._traffic.add_bytes(0, exact=(group.size() - 1) * self._values * parts.itemsize)

    def _reduce_exactly(self, parts: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        if not self._exact:
            return
        sizes = [part.rows * part.columns for part in self._exact]
        whole = torch.cat([part.of(parts).flatten(1) for part in self._exact], dim=1)
        shard = reduce_scattered(whole, group, 0)
        for part, values in zip(self._exact, shard.split(sizes, dim=1), strict=True):
            part.of(own).copy_(values.view(1, part.rows, part.columns))
        self._traffic.add_bytes((group.size() - 1) * sum(sizes) * parts.itemsize, exact=0)

    def _reduce_matrices(self, parts: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        former = self._next or self._state
        matrices = [
            error.clone().view(-1, part.rows, part.columns).add_(part.of(parts)).view(error.shape)
            for part, error in zip(self._matrices, former.errors, strict=True)
        ]
        norms = [torch.linalg.vector_norm(matrix) for matrix in matrices]
        left = [matrix @ factor for matrix, factor in zip(matrices, former.factors, strict=True)]
        left = self._summed(left, group)
        finite = [torch.isfinite(product).all() for product in left]
        left = [torch.linalg.qr(torch.nan_to_num(product, posinf=0.0, neginf=0.0)).Q for product in left]
        right = [matrix.T @ product for matrix, product in zip(matrices, left, strict=True)]
        total = self._summed(right, group)
        for index, part in enumerate(self._matrices):
            begin = group.rank() * part.rows
            rows = left[index][begin : begin + part.rows] @ total[index].T
            part.of(own).copy_(rows.masked_fill_(~finite[index], torch.nan).view(1, part.rows, part.columns))
            matrices[index].addmm_(left[index], right[index].T, alpha=-1)
            self._traffic.note_error(torch.linalg.vector_norm(matrices[index]) / norms[index])
        self._next = _State(errors=matrices, factors=total)

    def _summed(self, products: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Sum of each product over the ranks, by one all-reduce."""
        flat = torch.cat([product.flatten() for product in products])
        dist.all_reduce(flat, group=group)
        self._traffic.add_bytes(2 * (group.size() - 1) * flat.numel() * flat.itemsize // group.size(), exact=0)
        sizes = [product.numel() for product in products]
        return [values.view_as(product) for values, product in zip(flat.split(sizes), products, strict=True)]

    def commit(self) -> None:
        """Keeps what the step left, once it is applied."""
        self._state, self._next = self._next or self._state, None

    def drop(self) -> None:
        """Forgets what the step left, which is not applied."""
        self._next = None

    def state(self) -> dict[str, torch.Tensor]:
        """State of the last step applied; a checkpoint is read into the same tensors."""
        names = [part.name for part in self._matrices]
        errors = {f"{name}.error": error for name, error in zip(names, self._state.errors, strict=True)}
        return errors | {f"{name}.factor": factor for name, factor in zip(names, self._state.factors, strict=True)}

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of parameters that are compressed, and of those that are exact."""
        return len(self._matrices), len(self._exact)
