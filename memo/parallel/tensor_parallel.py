"""Tensor- and sequence-parallel layers: what a rank saves for backward is its share, 16 / tp units of b·s·h.

Owns the division of one module's parameters over a tensor-parallel group, and its computation with the local part.
Does not own the choice of modules (memo.parallel.decoders, memo.gpt). Parameters become DTensors, so that FSDP and
checkpoints know the whole; activations stay ordinary tensors.

    between layers   (b, s/tp, h)         with sequence parallelism; (b, s, h) on every rank without
    Entry            gathers tokens       saves nothing
    ColumnParallel   (b, s, .../tp)       saves the *shard* of what Entry gathered, and gathers it again in backward,
                                          once for all projections of one input
    RowParallel      sums over the group  saves its input, which is divided already

torch's own ColwiseParallel saves the gathered input once for each projection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from memo.errors import UsageError
from memo.parallel.collectives import (
    Pending,
    begin_scatter_sum,
    begin_sum_out,
    copy_in,
    join,
    scatter_sum,
    split,
    sum_out,
)
from memo.parallel.gathered_input import begin_enter, enter, gathered_linear, token_dim
from memo.swap import keep

Group = dist.ProcessGroup


class _Divided(nn.Module):
    """Mixin of modules that the styles below divided."""

    _tp_group: Group
    _tp_sequence: bool
    _tp_transposed: bool
    _tp_once: dict[str, torch.Tensor] | None = None
    """Parameters as all calls within `parameters_once` use them."""

    def _once(self, name: str, made: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._tp_once is None:
            return made()
        if name not in self._tp_once:
            self._tp_once[name] = made()
        return self._tp_once[name]

    def _shared(self, name: str) -> torch.Tensor | None:
        """A parameter that every rank has whole; its gradient is summed where ranks see different tokens."""
        part = self._part(name)
        if part is None or not self._tp_sequence:
            return part
        return self._once(name, lambda: copy_in(part, self._tp_group))

    def _part(self, name: str) -> torch.Tensor | None:
        parameter = getattr(self, name, None)
        if not isinstance(parameter, DTensor):
            return parameter
        # Of a frozen one autograd knows nothing that tells it from an activation, and FSDP frees its memory.
        return parameter.to_local() if parameter.requires_grad else keep(parameter.to_local())

    def _matrix(self) -> torch.Tensor:
        """This rank's weight, (outputs, inputs)."""
        part = self._part("weight")
        assert part is not None
        kind = part.device.type
        if self._tp_once is not None and torch.is_autocast_enabled(kind):
            low = torch.get_autocast_dtype(kind)
            return self._once("weight", lambda: part.to(low))
        return part.t() if self._tp_transposed else part


class _ColumnParallel(_Divided):
    _tp_pieces: int
    _tp_gathers: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = gathered_linear(x, self._matrix(), self._own_bias())
        return join(own, self._tp_group, own.ndim - 1) if self._tp_gathers else own

    def _own_bias(self) -> torch.Tensor | None:
        """Bias of this rank's outputs."""
        bias = self._part("bias")
        if bias is None or self._tp_pieces == 1:
            return bias
        return _own_blocks(copy_in(bias, self._tp_group), 0, self._tp_pieces, self._tp_group)


class _RowParallel(_Divided):
    _tp_splits: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._tp_splits:
            x = split(x, self._tp_group, x.ndim - 1)
        return self._summed(F.linear(x, self._matrix()))

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        group = self._tp_group
        if self._tp_sequence:
            return self._biased(scatter_sum(partial, group, token_dim(partial)))
        return self._biased(sum_out(partial, group))

    def _begin_sum(self, partial: torch.Tensor) -> Pending:
        group = self._tp_group
        if self._tp_sequence:
            pending = begin_scatter_sum(partial, group, token_dim(partial))
        else:
            pending = begin_sum_out(partial, group)
        return lambda: self._biased(pending())

    def _biased(self, summed: torch.Tensor) -> torch.Tensor:
        bias = self._shared("bias")
        return summed if bias is None else summed + bias


def own_parts(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's weight (outputs, inputs) of a divided linear layer, and the bias (outputs) of its outputs.

    None for the bias of a RowParallel, which is added to the sum over the ranks (`row_sum`).

    Raises:
        UsageError: the layer is not divided by ColumnParallel or RowParallel (torch's own styles, for instance).
    """
    if not isinstance(linear, (_ColumnParallel, _RowParallel)):
        raise UsageError(f"a {type(linear).__name__} is divided over ranks, but not by memo's own tensor parallelism")
    return linear._matrix(), linear._own_bias() if isinstance(linear, _ColumnParallel) else None


def row_sum(linear: nn.Module, partial: torch.Tensor) -> torch.Tensor:
    """Output of a RowParallel, from this rank's part of its product, (..., outputs): summed over the ranks, with bias."""
    assert isinstance(linear, _RowParallel)
    return linear._summed(partial)


def begin_row_sum(linear: nn.Module, partial: torch.Tensor) -> Pending:
    """Begins `row_sum`; what is computed before its result is asked for runs beside the sum, also in backward."""
    assert isinstance(linear, _RowParallel)
    return linear._begin_sum(partial)


def begin_entry(linear: nn.Module, x: torch.Tensor) -> Pending:
    """Begins to give a ColumnParallel, and others that read the same `x` (batch, tokens, inputs), all tokens of it.

    As `Entry` does, but what is computed before the result is asked for runs beside the gather, also in backward.
    """
    assert isinstance(linear, _ColumnParallel)
    return begin_enter(x, linear._tp_group, sequence=linear._tp_sequence)


@contextlib.contextmanager
def parameters_once(module: nn.Module) -> Iterator[None]:
    """Context in which each divided part of `module` casts its weight once, and sums a shared parameter's gradient once.

    For parts that are called several times, with some rows each.
    """
    parts = [part for part in module.modules() if isinstance(part, _Divided)]
    for part in parts:
        part._tp_once = {}
    try:
        yield
    finally:
        for part in parts:
            part._tp_once = None


class _Replicated(_Divided):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = self._parameters
        self._parameters = cast("Any", {name: self._shared(name) for name in held})
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters = held


class _Experts(_Divided):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        held, group = self._parameters, self._tp_group
        args = tuple(_copied_in(one, group) for one in args)
        kwargs = {name: _copied_in(one, group) for name, one in kwargs.items()}
        self._parameters = cast("Any", {name: self._part(name) for name in held})
        try:
            return sum_out(super().forward(*args, **kwargs), group)
        finally:
            self._parameters = held


def _copied_in(given: Any, group: Group) -> Any:
    return copy_in(given, group) if isinstance(given, torch.Tensor) and given.is_floating_point() else given


_classes: dict[tuple[type, type], type] = {}


def _mix_in(module: nn.Module, kind: type[_Divided], mesh: DeviceMesh, *, sequence: bool) -> None:
    """Changes the module's class to one with the forward of `kind`, a subclass of its own."""
    cls = type(module)
    if (kind, cls) not in _classes:
        _classes[kind, cls] = type(f"{kind.__name__.lstrip('_')}{cls.__name__}", (kind, cls), {})
    module.__class__ = _classes[kind, cls]
    divided = cast("_Divided", module)
    divided._tp_group = mesh.get_group()
    divided._tp_sequence = sequence
    divided._tp_transposed = cls.__name__ == "Conv1D"  # Hugging Face's GPT-2: (inputs, outputs)


def _divide(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, pieces: int = 1) -> None:
    """Replaces a parameter by a DTensor of this rank's part; does not communicate."""
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    local = parameter.detach()
    if isinstance(placement, Shard):
        dim = placement.dim
        local = _own_blocks(local, dim, pieces, mesh.get_group()).clone()  # a view would keep the whole alive
        if pieces > 1:
            placement = _in_pieces(dim, pieces)
    whole = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _own_blocks(x: torch.Tensor, dim: int, pieces: int, group: Group) -> torch.Tensor:
    """This rank's part of each of the `pieces` fused in `x` along `dim`."""
    blocks = x.unflatten(dim, (pieces, group.size(), -1))
    own: torch.Tensor = blocks.select(dim + 1, group.rank()).flatten(dim, dim + 1)
    return own


def _in_pieces(dim: int, pieces: int) -> Placement:
    """Placement that divides each of `pieces` fused blocks over the ranks (q, k, v of GPT-2)."""
    from memo.torch_private import StridedShard

    return cast("Placement", StridedShard(dim, split_factor=pieces))


class ColumnParallel(ParallelStyle):
    """Parallel style that divides a linear layer's outputs.

    Args:
        sequence: sequence parallelism, with `Entry` before it.
        pieces: projections fused in the layer. The bias of more than one stays whole on every rank: divided in pieces, and
            then by fully_shard along the same dimension, it would have no DTensor placement.
        gather_output: gives all outputs on every rank, which use them in the same way.
    """

    def __init__(self, *, sequence: bool, pieces: int = 1, gather_output: bool = False) -> None:
        self.sequence, self.pieces, self.gather_output = sequence, pieces, gather_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mix_in(module, _ColumnParallel, device_mesh, sequence=self.sequence)
        outputs = 1 if cast("_Divided", module)._tp_transposed else 0
        _divide(module, "weight", device_mesh, Shard(outputs), self.pieces)
        _divide(module, "bias", device_mesh, Shard(0) if self.pieces == 1 else Replicate())
        column = cast("_ColumnParallel", module)
        column._tp_pieces, column._tp_gathers = self.pieces, self.gather_output
        return module


class RowParallel(ParallelStyle):
    """Parallel style that divides a linear layer's inputs, the outputs of a ColumnParallel.

    Args:
        sequence: the sum over the ranks is reduce-scattered by tokens, else all-reduced.
        split_input: takes its part of inputs that are whole on every rank.
    """

    def __init__(self, *, sequence: bool, split_input: bool = False) -> None:
        self.sequence, self.split_input = sequence, split_input

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mix_in(module, _RowParallel, device_mesh, sequence=self.sequence)
        inputs = 0 if cast("_Divided", module)._tp_transposed else 1
        _divide(module, "weight", device_mesh, Shard(inputs))
        _divide(module, "bias", device_mesh, Replicate())
        cast("_RowParallel", module)._tp_splits = self.split_input
        return module


class DividedExperts(ParallelStyle):
    """Parallel style that divides the columns and rows of every expert, in a module of fused experts.

    Its forward takes hidden states, and weights of tokens, that are whole on every rank, and sums over the ranks.

    Args:
        tables: parameter to the dimension that is divided, and the matrices fused along it.
    """

    def __init__(self, tables: Mapping[str, tuple[int, int]]) -> None:
        self.tables = tables

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mix_in(module, _Experts, device_mesh, sequence=False)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                dim, pieces = self.tables[name]
                _divide(module, name, device_mesh, Shard(dim % parameter.ndim), pieces)
        return module


class Replicated(ParallelStyle):
    """Parallel style that replicates all parameters.

    Args:
        sequence: each rank sees its own tokens only, so gradients are summed over the ranks.
    """

    def __init__(self, *, sequence: bool) -> None:
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mix_in(module, _Replicated, device_mesh, sequence=self.sequence)
        for name in list(module._parameters):
            _divide(module, name, device_mesh, Replicate())
        return module


class Entry(ParallelStyle):
    """Parallel style that gives a module all tokens of its first argument, or of `hidden_states`.

    Args:
        sequence: gathers the tokens; else they are whole, and backward sums their gradient over the ranks.
    """

    def __init__(self, *, sequence: bool) -> None:
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(_entering(device_mesh.get_group(), self.sequence), with_kwargs=True)
        return module


def _entering(group: Group, sequence: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    def gather_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group, sequence=sequence)}
        return (enter(args[0], group, sequence=sequence), *args[1:]), kwargs

    return gather_tokens


def divide_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces parameters (experts, ...) of a module by DTensors of this rank's experts; does not communicate.

    Args:
        module: the experts, whose number divides by the ranks.
        mesh: the expert-parallel ranks, one dimension.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            own = parameter.detach().chunk(mesh.size(), 0)[mesh.get_local_rank()].clone()
            whole = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            setattr(part, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def own_experts(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's experts, (experts of a rank, ...), of a parameter; the whole of one that is not divided.

    Backward divides the gradient by the number of expert-parallel ranks. It has the rows of all of them in it, so its mean
    over ranks with the same experts would else be that many times the mean over all data-parallel ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    local, ranks = parameter.to_local(), parameter.device_mesh.size()
    if local.requires_grad:
        local.register_hook(lambda grad: grad / ranks)  # on the parameter's own memory, which memo knows not to move
    return local
