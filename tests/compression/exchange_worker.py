"""Runs on some ranks: compressed exchanges of FSDP2 and DistributedDataParallel against exact sums, checked by name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memo.compression import GradientCompression, compress_gradients
from memo.compression.int8_sum import Int8ReduceScatter
from memo.compression.powersgd import PowerSgdReduceScatter
from memo.compression.traffic import GradientTraffic
from memo.errors import UsageError
from memo.kernels import Codec
from memo.parallel import join

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from code_bounds import error_bound
from live_bytes import LiveBytes

CPU = torch.device("cpu")
SUM = dist.ReduceOp.SUM


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    # Sizes that neither the ranks nor groups of 128 divide.
    return nn.Sequential(nn.Linear(33, 45), nn.LayerNorm(45), nn.Linear(45, 31, bias=False)).to(dtype)


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module, seed: int, *, poison: float | None = None) -> dict[str, torch.Tensor]:
    """Whole gradients after one backward over this rank's input."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 33, generator=generator).to(dtype)
    scale = torch.ones((), dtype=dtype)
    if poison is not None and dist.get_rank() == dist.get_world_size() - 1:
        scale.fill_(poison)
    model.zero_grad()
    (model(x).square().mean() * scale).backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name.removeprefix("module.")] = whole.detach().clone()
    return found


def equal_on_all_ranks(tensors: dict[str, torch.Tensor]) -> bool:
    flat = torch.cat([tensor.flatten().double() for tensor in tensors.values()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return all(torch.equal(flat, other) for other in others)


def exact_and_largest(seed: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], float]:
    """Mean gradients in float64 of gradients of `dtype`, and the largest magnitude of any rank's."""
    own = gradients(model_of(dtype), seed)
    largest = torch.stack([grad.abs().max().double() for grad in own.values()]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    means = {}
    for name, grad in own.items():
        total = grad.double()
        dist.all_reduce(total)
        means[name] = total / dist.get_world_size()
    return means, float(largest)


def int8_is_within_the_bound() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = sharded(model_of(dtype))
        compressed = compress_gradients(model, "int8")
        found = gradients(model, 1)
        means, largest = exact_and_largest(1, dtype)
        # A value is off by 1/254 of a group's largest on every rank, and the mean by the mean of that; bfloat16 rounds it.
        last = torch.finfo(dtype).eps
        bound = error_bound(torch.tensor([largest]), Codec.INT8).item() + 2 * last * largest
        off = max(float((found[name].double() - mean).abs().max()) for name, mean in means.items())
        assert 0 < off <= bound, (dtype, off, bound)
        assert equal_on_all_ranks(found)
        figures = compressed.take_figures(CPU)
        assert 0 < figures.largest_error <= 1 / 254 * (1 + 2**-13)


def int8_does_not_overflow() -> None:
    """Where all ranks have the largest value of int8 for every element, the sum is theirs together."""
    model = sharded(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False)))
    compress_gradients(model, "int8")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model(torch.ones(1, 16)).sum().backward()
    ranks, (first, _) = dist.get_world_size(), model.parameters()
    assert ranks * first.grad.full_tensor().min() == ranks * 4  # type: ignore[union-attr]


def hook_of_ddp_gives_all_ranks_the_same_bits() -> None:
    model = DistributedDataParallel(model_of())
    compressed = compress_gradients(model, "int8")
    found = gradients(model, 2)
    assert equal_on_all_ranks(found)
    means, largest = exact_and_largest(2, torch.float32)
    off = max(float((found[name].double() - mean).abs().max()) for name, mean in means.items())
    assert 0 < off <= 2.01 * largest / 254, "rounded twice: before the sum and behind it"
    assert compressed.take_figures(CPU).largest_error <= 1 / 254 * (1 + 2**-13)
    with pytest.raises(UsageError, match="torch's own powerSGD_hook"):
        compress_gradients(model, "powersgd")
    with pytest.raises(UsageError, match="no module of fully_shard"):
        compress_gradients(model_of(), "int8")


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that a rank hands to collectives, as a ring sends them."""
    ranks, sent = dist.get_world_size(), []
    kinds = {"all_to_all_single": 1, "all_reduce": 2, "reduce_scatter_single": 1, "reduce_scatter_tensor": 1}
    former = {name: getattr(dist, name) for name in kinds if hasattr(dist, name)}
    from memo.parallel import collectives

    alias = collectives._reduce_scatter

    def counting(call: Callable[..., Any], often: int, at: int) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            tensor = options.get("input", args[at] if len(args) > at else None)
            sent.append(often * (ranks - 1) * tensor.numel() * tensor.itemsize // ranks)  # type: ignore[union-attr]
            return call(*args, **options)

        return wrapped

    for name, call in former.items():
        setattr(dist, name, counting(call, kinds[name], 0 if name == "all_reduce" else 1))
    collectives._reduce_scatter = counting(alias, 1, 1)
    try:
        yield sent
    finally:
        collectives._reduce_scatter = alias
        for name, call in former.items():
            setattr(dist, name, call)


def bytes_are_those_counted() -> None:
    ranks, sent, exact = dist.get_world_size(), {}, {}
    for method in (None, "int8", "powersgd:1"):
        model = sharded(model_of())
        compressed = None if method is None else compress_gradients(model, method)
        with counted() as seen:
            gradients(model, 1)
        sent[method] = sum(seen)
        if compressed is not None:
            figures = compressed.take_figures(CPU)
            assert figures.sent_bytes == sent[method], (method, figures, sent)
            exact[method] = figures.exact_bytes
            assert compressed.take_figures(CPU).sent_bytes == 0
    assert set(exact.values()) == {sent[None]}, (exact, sent)
    rows = [-(-size // ranks) for size in (45, 45, 45, 45, 31)]
    shards = [rows[0] * 33 + rows[1], rows[2] + rows[3] + rows[4] * 45]  # of the two modules that are sharded
    assert sent[None] == (ranks - 1) * 4 * sum(shards)
    blocks = [-(-shard // 16) * 16 + -(-4 * -(-shard // 128) // 16) * 16 for shard in shards]
    assert sent["int8"] == (ranks - 1) * sum(blocks)
    factors = [4 * (ranks * rows[0] + 33), 4 * (ranks * rows[4] + 45)]
    vectors = (ranks - 1) * 4 * (rows[1] + rows[2] + rows[3])
    each = [4 * ranks * rows[0], 4 * 33, 4 * ranks * rows[4], 4 * 45]
    assert sum(each) == sum(factors)
    assert sent["powersgd:1"] == vectors + sum(2 * (ranks - 1) * nbytes // ranks for nbytes in each)


def values_that_are_not_finite_stay_visible() -> None:
    for method in ("int8", "powersgd:1"):
        for poison in (float("nan"), float("inf")):
            model = sharded(model_of())
            compressed = compress_gradients(model, method)
            clean = gradients(model, 1)
            assert all(torch.isfinite(grad).all() for grad in clean.values())
            compressed.commit()
            before = {name: tensor.clone() for name, tensor in compressed.state().items()}
            found = gradients(model, 2, poison=poison)
            assert all(not torch.isfinite(grad).all() for name, grad in found.items()), method
            assert equal_on_all_ranks({name: torch.isfinite(grad) for name, grad in found.items()})
            assert compressed.take_figures(CPU).largest_error < 1, "an error that is a number"
            compressed.drop()
            after = compressed.state()
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
            assert all(torch.isfinite(grad).all() for grad in gradients(model, 3).values())
    ddp = DistributedDataParallel(model_of())
    compress_gradients(ddp, "int8")
    assert not any(torch.isfinite(grad).all() for grad in gradients(ddp, 2, poison=float("nan")).values())


def memory_is_that_of_the_formula() -> None:
    """What an exchange holds at most beside FSDP's own buffers."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    shape = torch.Size([256, 512])
    parameters = ranks * shape.numel()
    grads, own = torch.randn(parameters), torch.empty(shape.numel())
    for method in ("int8", "powersgd:4"):
        formula = GradientCompression.parse(method).device_bytes(parameters=parameters, largest=parameters, ranks=ranks)
        traffic = GradientTraffic()
        with LiveBytes() as counted_bytes:
            if method == "int8":
                exchange: Any = Int8ReduceScatter(traffic)
            else:
                sizes: Any = {"members": range(ranks), "rank": 4, "itemsize": 4, "device": CPU, "traffic": traffic}
                exchange = PowerSgdReduceScatter("test", {"matrix": shape}, **sizes)
            exchange(own, grads, group, SUM)
        assert 0.8 * formula < counted_bytes.peak <= formula, (method, counted_bytes.peak, formula)


def low_rank_is_kept_and_errors_are_fed_back() -> None:
    """A sum of rank r is kept; what steps leave out is in the errors, to the rounding of float32."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    rows, columns = 12, 40
    exchange = PowerSgdReduceScatter(
        "test",
        {"matrix": torch.Size([rows, columns]), "vector": torch.Size([5])},
        members=range(ranks),
        rank=2,
        itemsize=4,
        device=CPU,
        traffic=GradientTraffic(),
    )
    assert exchange.counts == (1, 1)

    def exchanged(matrix: torch.Tensor, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = torch.cat([matrix.view(ranks, -1), vector.view(ranks, 5)], dim=1)
        own = torch.empty(parts.shape[1])
        exchange(own, parts.flatten(), group, SUM)
        whole = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(whole, own)
        return torch.stack(whole)[:, :-5].reshape(ranks * rows, columns), torch.stack(whole)[:, -5:]

    generator = torch.Generator().manual_seed(rank)
    common = torch.Generator().manual_seed(99)
    left = torch.randn(ranks * rows, 2, generator=common)
    matrix = left @ torch.randn(2, columns, generator=generator)
    vector = torch.randn(ranks, 5, generator=generator)
    total, totals = matrix.clone(), vector.clone()
    dist.all_reduce(total)
    dist.all_reduce(totals)
    found, vectors = exchanged(matrix, vector)
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vectors, totals)
    exchange.commit()
    sent, given = found.double(), total.double()
    for step in range(4):
        matrix = torch.randn(ranks * rows, columns, generator=generator)
        sent += exchanged(matrix, vector)[0].double()
        exchange.commit()
        dist.all_reduce(matrix)
        given += matrix.double()
        errors = exchange.state()["matrix.error"].double()
        dist.all_reduce(errors)
        assert float((given - sent).norm()) > 1, step
        torch.testing.assert_close(sent + errors, given, rtol=0, atol=1e-4)
    # One value of one rank is the whole matrix's; so is a product that overflows, whose values are all finite.
    for bad in (torch.nan, torch.inf, 3e38):
        matrix = torch.randn(ranks * rows, columns, generator=generator)
        matrix[-1, :3] = bad if rank == ranks - 1 else 0
        found, vectors = exchanged(matrix, vector)
        exchange.drop()
        assert bool(torch.isnan(found).all()), bad
        assert bool(torch.isfinite(vectors).all())
    with pytest.raises(UsageError, match="powersgd needs a gradient of each parameter"):
        exchange(torch.empty(7), torch.empty(7 * ranks), group, SUM)


def ranks_that_exchange_nothing_are_left_alone() -> None:
    """FSDP over one rank with a divide factor, which it would apply twice in a sum, and DistributedDataParallel of one."""
    ranks = dist.get_world_size()
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "one"))["one"]
    found = {}
    for method in (None, "int8", "powersgd:1"):
        model: Any = fully_shard(model_of(), mesh=alone)
        model.set_gradient_divide_factor(2.0)
        compressed = None if method is None else compress_gradients(model, method)
        found[method] = gradients(model, 1)
        if compressed is not None:
            assert compressed.state() == {}
            assert compressed.take_figures(CPU).exact_bytes == 0
            assert str(compressed)
    ddp = DistributedDataParallel(model_of(), process_group=alone.get_group())
    compress_gradients(ddp, "int8")
    plain, exact = gradients(model_of(), 1), gradients(ddp, 1)
    for name, grad in plain.items():
        assert torch.equal(grad, exact[name]), name
        for halved in found.values():
            assert torch.equal(halved[name], grad / 2), name


def hybrid_shards_are_compressed_and_replicas_summed_exactly() -> None:
    ranks = dist.get_world_size()
    if ranks % 2:
        return
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))
    means, largest = exact_and_largest(1, torch.float32)
    model: Any = fully_shard(model_of(), mesh=mesh)
    compressed = compress_gradients(model, "int8")
    found = gradients(model, 1)
    off = max(float((found[name].double() - mean).abs().max()) for name, mean in means.items())
    rounding = 2 * torch.finfo(torch.float32).eps * largest
    bound = error_bound(torch.tensor([largest]), Codec.INT8).item() if ranks > 2 else 0.0
    assert off <= bound + rounding, (off, bound)
    assert (compressed.take_figures(CPU).sent_bytes > 0) == (ranks > 2)
    assert equal_on_all_ranks(found)


def states_of_other_sums_have_other_digests() -> None:
    """A checkpoint's error feedback is read by its digest: same shapes are not enough."""
    ranks = dist.get_world_size()
    if ranks % 2:
        return
    digests = []
    for dims in ((2, ranks // 2), (ranks // 2, 2)):
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=("outer", "inner"))
        for name, size in zip(("outer", "inner"), dims, strict=True):
            if size == 2:
                model = fully_shard(model_of(), mesh=mesh[name])
                digests.append(compress_gradients(model, "powersgd:1").state_digest())
    same = compress_gradients(fully_shard(model_of(), mesh=mesh["inner"]), "powersgd:1").state_digest()
    assert same == digests[-1]
    assert len(set(digests)) == (2 if ranks == 4 else 1), digests


def other_trained_parameters_than_at_first_are_refused() -> None:
    """Two matrices of one shape, of which one trains at first and then the other: its error is not the other's."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 33))
    model[1].requires_grad_(False)
    sharded_model: Any = fully_shard(model)
    compressed = compress_gradients(sharded_model, "powersgd:1")
    assert [name.partition(".")[2] for name in compressed.state()] == [
        f"{matrix}.weight.{tensor}" for tensor in ("error", "factor") for matrix in (0, 2)
    ]
    x = torch.randn(8, 64)
    sharded_model(x).square().mean().backward()
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    with pytest.raises(UsageError, match="call compress_gradients again after changing them"):
        sharded_model(x).square().mean().backward()


def replicas_of_torch_are_refused() -> None:
    """`replicate` of FSDP2's kind, whose gradients no reduce-scatter sees."""
    module = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("copies",))
    for method in ("int8", "powersgd"):
        model = module.replicate(model_of(), mesh=mesh)
        with pytest.raises(UsageError, match="is of replicate, which sums whole gradients"):
            compress_gradients(model, method)


CHECKS = {
    check.__name__: check
    for check in (
        int8_is_within_the_bound,
        int8_does_not_overflow,
        hook_of_ddp_gives_all_ranks_the_same_bits,
        bytes_are_those_counted,
        values_that_are_not_finite_stay_visible,
        memory_is_that_of_the_formula,
        low_rank_is_kept_and_errors_are_fed_back,
        ranks_that_exchange_nothing_are_left_alone,
        hybrid_shards_are_compressed_and_replicas_summed_exactly,
        replicas_of_torch_are_refused,
        states_of_other_sums_have_other_digests,
        other_trained_parameters_than_at_first_are_refused,  # last: its backward ends in the middle
    )
}


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with join(CPU):
        for name, check in CHECKS.items():
            check()
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{name}: held", flush=True)


if __name__ == "__main__":
    sys.exit(main())
