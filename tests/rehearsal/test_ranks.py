"""Several GPUs, one of which is rehearsed: FSDP2's streams, the network's times, and a node's host memory among its GPUs."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import memo
from memo.cli.main import main
from memo.gpt import Precision, preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.inputs import hardware_preset
from memo.parallel import Layout
from memo.record import Step
from memo.rehearsal import Rehearsal, SimulatedMachine, Way, gpt_step_of_rank, hugging_face_step
from memo.rehearsal.streams import streams_on

H100 = hardware_preset("h100")
LAYERS, WIDTH, TOKENS = 8, 4096, 16384


def linear_layers(*, sharded: bool = True) -> Step:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)])
    model.to(torch.bfloat16)
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    return Step(model=model, loss=lambda: model(x).sum(), layers=list(model))


def kept(ranks: int, *, link: float = H100.nvlink_bytes_per_s) -> Rehearsal:
    hardware = dataclasses.replace(H100, nvlink_bytes_per_s=link)
    machine = SimulatedMachine(hardware, ranks=ranks)
    build = functools.partial(linear_layers, sharded=ranks > 1)
    return memo.rehearse(build, machine, way=Way.KEEP, optimizer=None, steps=2)


def seconds(found: Rehearsal) -> float:
    assert found.step_s is not None
    return found.step_s


def test_gathers_of_a_fast_link_hide_behind_compute_and_of_a_slow_one_take_its_time() -> None:
    nbytes = LAYERS * WIDTH * WIDTH * 2  # of all weights, gathered for forward and for backward, and of their gradients
    alone, fast = seconds(kept(1)), seconds(kept(8))
    assert alone < fast < 1.1 * alone
    slow_link = 3e9 / 0.82
    exchanged = 3 * nbytes * 7 / 8 / 3e9
    assert exchanged > 3 * alone
    assert seconds(kept(8, link=slow_link)) == pytest.approx(exchanged, rel=0.1)  # the last layers stay gathered


def test_parameters_take_their_share_of_the_device() -> None:
    inputs = TOKENS * WIDTH * 2
    assert kept(8).static_bytes - inputs == (kept(1).static_bytes - inputs) // 8


def test_a_gathered_layer_counts_while_it_is_gathered() -> None:
    found = kept(8)
    activations = LAYERS * TOKENS * WIDTH * 2  # those of ReLU; products are not saved
    layer = WIDTH * WIDTH * 2
    assert found.steps[-1].device_bytes - found.static_bytes - activations < LAYERS / 2 * layer + 2 * TOKENS * WIDTH * 2


def test_a_node_s_gpus_share_its_host_memory() -> None:
    build = functools.partial(hugging_face_step("llama-3.2-1b", layers=2), batch=1, tokens=1024)
    budgets = {
        ranks: memo.rehearse(build, SimulatedMachine("h100", ranks=ranks), steps=1, host=host).host_budget
        for ranks, host in ((1, "64GiB"), (8, "64GiB"), (16, "64GiB"))
    }
    assert budgets == {1: 64 << 30, 8: 8 << 30, 16: 8 << 30}
    assert memo.rehearse(build, SimulatedMachine("h100", ranks=2), steps=1).host_budget == pytest.approx(
        H100.host_bytes / 8 * 0.7, rel=1e-3
    )


@pytest.mark.parametrize("layout", [Layout(cp=4), Layout(tp=4), Layout(dp=2, cp=2, tp=2)], ids=str)
def test_memo_s_gpt_is_divided_as_memo_train_does_and_settles(layout: Layout) -> None:
    build = functools.partial(
        gpt_step_of_rank(preset("125m", layers=4, max_seq=131072), layout), batch=1, tokens=131072
    )
    found = memo.rehearse(build, SimulatedMachine("h100", ranks=layout.ranks), device="2.5GiB")
    assert found.fits, (found.failure, found.violations)
    assert found.settled
    assert found.plan is not None
    assert found.plan.declined is None
    predicted = found.plan.stages[0].microbatch_s
    assert found.step_s == pytest.approx(predicted, rel=0.05)
    assert not dist.is_initialized()


def test_overlapped_collectives_shorten_a_rehearsed_step_as_they_do_the_predicted_one() -> None:
    steps, config = [], preset("llama3-8b", layers=2, vocab_size=1024, max_seq=16384)
    for overlap in (False, True):
        build = functools.partial(gpt_step_of_rank(config, Layout(tp=4, tp_overlap=overlap)), batch=2, tokens=16384)
        steps.append(seconds(memo.rehearse(build, SimulatedMachine("h100", ranks=4), way=Way.KEEP, steps=2)))
    layout = StepLayout(tokens=16384, batch=2, gpus=4, tp=4)
    plain, halves = (
        derive_profile(
            config, H100, dataclasses.replace(layout, tp_overlap=overlap), precision=Precision.BF16_AUTOCAST
        ).layer_profiles()[0]
        for overlap in (False, True)
    )
    # Exposed collectives alone: products of half the rows take a rehearsal no longer.
    hidden = [2 * (each.forward_exchange_s + each.backward_exchange_s) for each in (plain, halves)]
    assert steps[0] - steps[1] == pytest.approx(hidden[0] - hidden[1], rel=0.25)


def test_layers_that_ranks_compute_together_are_recomputed_where_the_host_is_full() -> None:
    """Kept on the device they took 10 % more than its budget here, and an 8B at a million tokens ran out of memory."""
    layout, tokens = Layout(cp=8), 262144
    config = preset("llama3-8b", layers=16, max_seq=tokens)
    build = functools.partial(gpt_step_of_rank(config, layout), batch=1, tokens=tokens)
    found = memo.rehearse(build, SimulatedMachine("h100", ranks=8), device="21.5GiB", host="1GiB")
    assert found.failure is None
    assert found.settled
    assert max(step.device_bytes for step in found.steps) < 1.03 * found.device_budget
    assert found.steps[-1].device_bytes <= found.device_budget
    assert found.plan is not None
    assert found.plan.declined is None
    assert found.step_s == pytest.approx(found.plan.stages[0].microbatch_s, rel=0.05)


def test_adapters_of_a_sharded_model_settle_within_the_budget() -> None:
    pytest.importorskip("peft")
    build = functools.partial(
        hugging_face_step("llama-3.2-1b", lora=8, layers=4, without_logits=True), batch=1, tokens=16384
    )
    found = memo.rehearse(build, SimulatedMachine("h100", ranks=8), device="6GiB")
    assert found.fits, (found.failure, found.violations)
    assert found.settled


def test_torch_has_its_own_streams_again() -> None:
    before = torch.cpu.Stream, torch.cpu.Event, torch.cpu.stream, torch.cpu.current_stream
    with streams_on(SimulatedMachine("h100").clock):
        assert torch.cpu.Stream is not before[0]
    assert (torch.cpu.Stream, torch.cpu.Event, torch.cpu.stream, torch.cpu.current_stream) == before


def test_the_command_rehearses_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--model", "tiny", "--seq", "4k", "--gpus", "8", "--cp", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [("--tp", "2"), ("--cp", "2"), ("--tp", "2", "--cp", "2"), ()], ids=" ".join)
def test_a_model_of_transformers_takes_what_is_planned(
    sizes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", "qwen3-0.6b", "--layers", "6", "--seq", "16k", "--loss-without-logits", "--gpus", "4", *sizes)
    assert main(["rehearse", *model, "--gpu", "h100", "--json"]) == 0
    rehearsed = json.loads(capsys.readouterr().out)
    assert main(["plan", *model, "--gpu", "h100", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert rehearsed["step_s"] == pytest.approx(planned["step_s"], rel=0.05)
    peak = max(step["device_peak_nbytes"] for step in rehearsed["steps"])
    assert 0.85 < peak / planned["stages"][0]["peak_device_bytes"] < 1.01


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "tiny", "--gpus", "6", "--cp", "4"], "--gpus 6 is no multiple of --tp 1 times --cp 4"),
        (
            ["--model", "gpt-oss-20b", "--gpus", "8", "--cp", "2"],
            "cannot be divided over cp=2 ranks: its attention has s_aux",
        ),
        (["--model", "llama-3.2-1b", "--gpus", "6", "--tp", "6"], "6 ranks do not divide the model's 32 heads"),
        (["--model", "tiny", "--gpus", "8", "--lengths", "1k,2k"], "--lengths applies to one GPU"),
        (["--model", "tiny", "--gpus", "3", "--tp", "3"], "--tp 3 does not divide the model's 2 heads"),
        (["--model", "tiny", "--gpus", "16", "--net", "none"], "network"),
    ],
)
def test_what_does_not_divide_is_one_line(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *flags]) != 0
    said = capsys.readouterr().err
    assert says in said
    assert len(said.strip().splitlines()) == 1
