"""`memo.parallelize`: an unmodified decoder of transformers over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from memo.errors import NoRepeatedLayers, UsageError
from memo.parallel.decoders import tensor
from memo.parallel.decoders.calls import calls_of
from memo.swap import find_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> nn.Module:
    """Divides the layers and the vocabulary of a model of transformers over `mesh`, in place.

        mesh = init_device_mesh("cuda", (8,))
        model = memo.parallelize(AutoModelForCausalLM.from_pretrained(name), mesh)
        manager = memo.offload(model)

    Every rank passes the whole model, or the same one on the meta device, and keeps its part; nothing is communicated. A
    forward takes the same (batch, tokens) on every rank and returns the same loss and logits on every rank; gradients are
    those of one process. With `memo.loss_without_logits` logits are neither computed in full nor gathered.

    Args:
        model: unmodified, from a configuration or a checkpoint, of any dtype.
        mesh: one-dimensional, or with a dimension named "tp", over which the model is divided.
        sequence_parallel: divides the tokens, too, between the matrices, so that a layer saves 1 / ranks of what it saves
            on one rank. The number of tokens must then be a multiple of the ranks. Not for `generate`.

    Returns:
        `model` itself, whose parameters are DTensors. Call `memo.offload` and `fully_shard` after this.

    Raises:
        UsageError: `mesh` is no DeviceMesh or has no dimension "tp"; the model's layers are not known to divide; heads,
            widths or words do not divide over the ranks; fused projections on torch before 2.13. The model is then
            unchanged. A forward raises it on every rank for batches of different shapes, and for tokens that do not divide.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise UsageError(f"mesh: {mesh!r} is no DeviceMesh; make one with torch.distributed.init_device_mesh")
    if mesh.ndim > 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise UsageError(f"mesh: of its dimensions {mesh.mesh_dim_names} none is named 'tp'")
        mesh = mesh["tp"]
    try:
        layers = [layer.module for layer in find_layers(model)]
    except NoRepeatedLayers as error:
        raise UsageError(str(error)) from error
    ranks = mesh.size()
    tensor.check_sizes(model, ranks)
    if ranks == 1:
        return model
    calls = calls_of(model, layers, tokens=tensor.tokens_to_trace(ranks))
    divisions = tensor.find_divisions(model, calls, ranks=ranks, sequence=sequence_parallel)
    tensor.apply(model, calls, divisions, mesh, sequence=sequence_parallel)
    return model
