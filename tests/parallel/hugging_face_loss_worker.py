"""Runs under torchrun: divided Hugging Face models' losses without their logits, against one process; saves them whole."""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hugging_face_worker import BOUND, model_of, whole, worst
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import memo
from memo.errors import UsageError
from memo.parallel import VocabularyParallel

Done = list[tuple[float, dict[str, Tensor]]]


def model_with(family: str, *, tied: bool) -> nn.Module:
    model = model_of(family, [])
    words, projection = model.get_input_embeddings().weight, model.get_output_embeddings()
    model.config.tie_word_embeddings = tied
    projection.weight = words if tied else nn.Parameter(words.detach() * 1.5)
    return model


def batch(step: int, seq: int = 48) -> tuple[Tensor, Tensor]:
    """Tokens, and for each the next one where it counts."""
    ids = torch.randint(0, 61, (2, seq), generator=torch.Generator().manual_seed(step))
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    targets[0, 3:9] = -100
    return ids, targets


def from_logits(model: nn.Module, step: int) -> Tensor:
    """As a user of one process would have it."""
    ids, targets = batch(step)
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def in_chunks(model: nn.Module, step: int) -> Tensor:
    ids, targets = batch(step)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return memo.linear_cross_entropy(hidden, model.get_output_embeddings(), targets, chunk=20, keep_gradients=step != 1)


def its_own(model: nn.Module, step: int) -> Tensor:
    ids, targets = batch(step)
    output = model(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False)
    assert "computed=False" in repr(output.logits)
    return output.loss


def steps(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> Done:
    """Three steps of AdamW and clipping: loss and whole gradients."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    done = []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        done.append((float(loss), {name: whole(p.grad) for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return done


def save_and_find_again(model: nn.Module) -> None:
    """Whole on rank 0, in the format of the library: what is loaded gives the logits of the divided model, and its words."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    ids, _ = batch(9)
    want = model.eval()(input_ids=ids, use_cache=False).logits
    words = model.generate(ids, max_new_tokens=4, do_sample=False)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, state_dict=state)
            assert list(Path(folder).glob("*.safetensors"))
            again = type(model).from_pretrained(folder, local_files_only=True).eval()
        assert float((again(input_ids=ids).logits - want).abs().max()) <= BOUND
        assert torch.equal(again.generate(ids, max_new_tokens=4, do_sample=False), words)
    dist.barrier()


def check_later_looks(model: nn.Module) -> None:
    """Logits of a divided model are all of them, and are refused once its weights have changed."""
    ids, targets = batch(0)
    want = model(input_ids=ids, use_cache=False).logits
    with memo.loss_without_logits(model), torch.no_grad():
        seen, unseen = (model(input_ids=ids, labels=targets, use_cache=False).logits for _ in range(2))
        assert torch.equal(seen.clone(), want)
        model.get_output_embeddings().weight.mul_(1.5)
        with pytest.raises(UsageError, match="read them before the optimizer's step"):
            unseen.argmax(-1)


def check(family: str, mesh: DeviceMesh, tied: bool) -> float:
    def fresh() -> nn.Module:
        return model_with(family, tied=tied)

    want = steps(fresh(), from_logits)
    off = worst(steps(fresh(), in_chunks), want)
    for sequence in (True, False):
        own = memo.parallelize(fresh(), mesh, sequence_parallel=sequence)
        with memo.loss_without_logits(own, chunk=20):
            off = max(off, worst(steps(own, its_own), want))
        check_later_looks(own)
        model = memo.parallelize(fresh(), mesh, sequence_parallel=sequence)
        off = max(off, worst(steps(model, in_chunks), want))
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert (ends[0] is ends[1]) == tied
    assert all(end.to_local().shape[0] < 61 for end in ends)
    logits = memo.parallelize(fresh(), mesh)
    off = max(off, worst(steps(logits, from_logits), want))
    assert off <= BOUND, f"{family}, tied {tied}: {off:.3g}"
    save_and_find_again(model)
    return off


class WithLoss(nn.Module):
    """What fully_shard wants to wrap: all that uses the model's parameters is in its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return memo.linear_cross_entropy(hidden, self.model.get_output_embeddings(), targets, chunk=20)


def check_replicas() -> None:
    """Two ranks share the rows, two the matrices: gradients are those of one process, or it is refused."""
    ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ids, targets = batch(0)
    targets = targets[1:].repeat(2, 1)  # equally many count in each row: the mean of two means is that of all
    whole_model, model = model_with("gpt2", tied=True), memo.parallelize(model_with("gpt2", tied=True), ranks)
    WithLoss(whole_model)(ids, targets).backward()
    for layer in model.transformer.h:
        fully_shard(layer, mesh=ranks["dp"])
    sharded = fully_shard(WithLoss(model), mesh=ranks["dp"])
    own = slice(ranks.get_local_rank("dp"), ranks.get_local_rank("dp") + 1)
    for refused in (lambda: model.base_model(ids[own]), lambda: in_chunks(model, 0)):
        with pytest.raises(UsageError, match="sharded over replicas and not gathered"):
            refused()
    sharded(ids[own], targets[own]).backward()
    got, want = ({n: whole(p.grad) for n, p in m.named_parameters()} for m in (model, whole_model))
    assert worst([(1.0, got)], [(1.0, want)]) <= BOUND
    check_own_loss_of_replicas(ranks, ids[own], targets[own], want)


def check_own_loss_of_replicas(ranks: DeviceMesh, ids: Tensor, targets: Tensor, want: dict[str, Tensor]) -> None:
    """Within the model's forward its rows are gathered, so that no module around it is needed."""
    model = memo.parallelize(model_with("gpt2", tied=True), ranks)
    for layer in model.transformer.h:
        fully_shard(layer, mesh=ranks["dp"])
    fully_shard(model, mesh=ranks["dp"])
    with memo.loss_without_logits(model, chunk=20):
        model(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False).loss.backward()
    got = {name: whole(p.grad) for name, p in model.named_parameters()}
    assert worst([(1.0, got)], [(1.0, want)]) <= BOUND


def check_own_tokens(mesh: DeviceMesh) -> None:
    """A projection with a bias whose ranks hold different tokens: all logits, one mean; capped, one sum."""
    torch.manual_seed(0)
    projection, hidden, targets = nn.Linear(32, 61), torch.randn(2, 8, 32), torch.randint(61, (2, 8))
    divided = VocabularyParallel(sequence=True)._apply(copy.deepcopy(projection), mesh)
    mine = [part.tensor_split(mesh.size(), 1)[mesh.get_local_rank()].contiguous() for part in (hidden, targets)]
    assert float((divided(mine[0]) - projection(hidden)).abs().max()) <= BOUND
    for done, reduction in (({}, "mean"), ({"scale": 3.0, "soft_cap": 2.0}, "sum")):
        want, got = hidden.clone().requires_grad_(), mine[0].clone().requires_grad_()
        logits = projection(want)
        if done:
            logits = torch.tanh(logits * 3.0 / 2.0) * 2.0
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction).backward()
        memo.linear_cross_entropy(got, divided, mine[1], chunk=4, reduction=reduction, **done).backward()
        own = want.grad.tensor_split(mesh.size(), 1)[mesh.get_local_rank()]
        assert float((got.grad - own).abs().max() / own.abs().max()) <= BOUND
        for name in ("weight", "bias"):
            whole_grad = getattr(projection, name).grad
            assert (
                float((whole(getattr(divided, name).grad) - whole_grad).abs().max()) <= BOUND * whole_grad.abs().max()
            )
        projection.zero_grad()
        divided.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_own_tokens(mesh)
    if mesh.size() == 4:
        check_replicas()
    for argument in sys.argv[1:]:
        family, tied = argument.split(":")
        off = check(family, mesh, tied == "tied")
        if dist.get_rank() == 0:
            print(f"equal {argument} within {off:.2g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
