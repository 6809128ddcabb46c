"""Prices of layouts: seconds of a step of other layouts of the same ranks, predicted with the rates that were measured.

Owns what is measured and the search over layouts. On a CPU one matrix product, one copy and the collectives are the whole
machine; a GPU's kernels have the rates of its preset. Predictions count by their ratio to that of the layout that runs.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from memo.adapt.choices import LayoutChoice
from memo.allocator import memory_stats
from memo.autoplan import device_budget_of
from memo.errors import PlanError, UsageError
from memo.gpt import EmbeddingGradients, OffloadMode, Precision
from memo.gpt.arithmetic import RecomputeMethod, StepLayout
from memo.machine import AUTO_HOST_SHARE, measure_collectives, rss_bytes, run_peak_rss_bytes
from memo.mip.activation import Budgets, find_plan
from memo.mip.inputs import (
    AttentionKernel,
    Hardware,
    Network,
    hardware_of,
    with_measured_collectives,
)
from memo.search import Request, Space, runs_under_memo_train, search_layouts
from memo.swap import available_host_bytes, total_host_bytes

if TYPE_CHECKING:
    from memo.gpt.train import EndedStep
    from memo.machine import CollectiveRates
    from memo.mip.activation import ActivationPlan

SIZES = (4 << 10, 4 << 20)
"""Bytes of the collectives that are measured, three times each after one call: less than a second on most links."""
ATTENTION_SHARE = 0.5
"""Share of a CPU's matrix products that its attention reaches."""
_SIDE, _COPIED, _ROUNDS = 512, 16 << 20, 3
_LANES = [f"{lane}_bytes_per_s" for lane in ("hbm", "d2h", "h2d", "duplex", "node_d2h", "node_h2d")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Figures that ranks measure each for itself; of all of them the worst count."""

    step_s: float
    limit_bytes: int
    """Device memory that training may use."""
    peak_bytes: int
    """The most that it has used."""
    product_s: float
    copy_s: float
    launch_s: float

    @classmethod
    def take(cls, ended: EndedStep, *, step_s: float, device_bytes: int | None) -> Readings:
        """The worst of all ranks. A collective call.

        Args:
            ended: the last step.
            step_s: of a step on this rank.
            device_bytes: limit of the run's device memory; None: the machine's.
        """
        device = ended.device
        has_gpu = device.type == "cuda"
        if has_gpu:
            limit = device_budget_of(device, device_bytes).total_bytes
        else:
            limit = device_bytes or rss_bytes() + available_host_bytes() // _ranks_per_node()
        dtype = torch.float32 if ended.precision is Precision.FP32 else torch.bfloat16
        product, copied, few = (
            torch.ones(size, dtype=dtype) for size in ((_SIDE, _SIDE), _COPIED // dtype.itemsize, 8)
        )
        target = torch.empty_like(copied)
        own = cls(
            step_s=step_s,
            limit_bytes=limit,
            peak_bytes=memory_stats(device).peak_device_bytes if has_gpu else run_peak_rss_bytes(),
            product_s=_least_s(lambda: product @ product),
            copy_s=_least_s(lambda: target.copy_(copied)),
            launch_s=_least_s(lambda: few.add_(1.0)),
        )
        every: list[Readings] = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
        names = (field.name for field in dataclasses.fields(cls))
        worst = {name: (min if name == "limit_bytes" else max)(getattr(one, name) for one in every) for name in names}
        return cls(**worst)

    def machine(self, device: torch.device, rates: CollectiveRates) -> Hardware:
        """Hardware of these rates and those of collectives."""
        line = min((fit.bytes_per_s for fit in rates.fits), default=1.0)
        if device.type == "cuda":
            machine = hardware_of(torch.cuda.get_device_name(device))
        else:
            lanes: dict[str, Any] = dict.fromkeys(_LANES, 2 * _COPIED / self.copy_s)
            machine = Hardware(
                name="cpu",
                peak_flops=2 * _SIDE**3 / self.product_s,
                matmul_efficiency=1.0,
                attention=(AttentionKernel.alike(ATTENTION_SHARE),),
                device_bytes=self.limit_bytes,
                **lanes,
                nvlink_bytes_per_s=line,
                gpus_per_node=1,
                host_bytes=total_host_bytes(),
                launch_s=self.launch_s,
                network=Network(node_efficiency=1.0),
            )
        ranks, network = _ranks_per_node(), machine.network
        if ranks < rates.world_size and not network.nics_per_node:
            network = dataclasses.replace(network, nics_per_node=1, nic_bytes_per_s=line * ranks)
        machine = dataclasses.replace(machine, gpus_per_node=ranks, network=network)
        return with_measured_collectives(machine, dataclasses.asdict(rates))


def _ranks_per_node() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def _least_s(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls; what other processes take is no property of the machine."""
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measured_links(device: torch.device) -> CollectiveRates:
    """Rates of the collectives of all ranks, and of those of each node. A collective call."""
    return measure_collectives(device, sizes=SIZES, node=os.environ["GROUP_RANK"])  # nodes are torchrun's


class Prices:
    """Predicted steps of a run's model on a machine, in layouts of the same ranks and the same sequences.

    Args:
        ended: a step of the run.
        machine: the measured hardware.
        readings: the worst of all ranks.
    """

    def __init__(self, ended: EndedStep, machine: Hardware, readings: Readings) -> None:
        config, ranks = ended.config, machine.gpus_per_node
        keeps_all = config.offload.mode is OffloadMode.NONE
        host = config.offload.host or 0
        if config.offload.host is None and ended.device.type == "cuda" and not keeps_all:
            host = int(AUTO_HOST_SHARE * total_host_bytes())
        request = Request(
            config=ended.shape,
            model=config.model,
            precision=ended.precision,
            tiles=(ended.shape.mlp_tiles,),
            layout=StepLayout(tokens=config.seq, gpus=config.layout.ranks),
            profile=None,
            machine=machine,
            budgets=Budgets(device_bytes=readings.limit_bytes, host_bytes=host, ranks_per_node=ranks),
            accumulate=1,
            schedule=config.layout.schedule,
            chunks=None,
            recompute=RecomputeMethod.NONE if keeps_all else None,
            embedding=EmbeddingGradients.DENSE,
            codec=config.offload.codec,
        )
        self._shape = ended.shape
        self._accumulate = config.training.accumulate
        self._space = Space(
            request=request,
            nodes=config.layout.ranks // ranks,
            global_batch=config.batch * config.training.accumulate,
            fixed={"zero": 3},
        )
        self.here = self._plan(LayoutChoice.of_run(config))
        """The plan of the layout that runs; None where none fits."""
        if self.here is not None:  # what it holds beyond its prediction others will hold, too
            beyond = max(readings.peak_bytes - max(stage.peak_device_bytes for stage in self.here.stages), 0)
            left = dataclasses.replace(request.budgets, device_bytes=max(readings.limit_bytes - beyond, 0))
            self._space = dataclasses.replace(self._space, request=dataclasses.replace(request, budgets=left))

    def step_s(self, choice: LayoutChoice) -> float | None:
        """Predicted seconds of a step; None where no plan fits."""
        plan = self._plan(choice)
        return None if plan is None else plan.step_s

    def best(self, without: Collection[str]) -> tuple[LayoutChoice, float] | None:
        """The layout with the shortest predicted step, and that; None where no other fits.

        With experts one of as many microbatches: a router's loss is of the choices of a microbatch.

        Args:
            without: words of choices that are left out.
        """
        space = self._space
        candidates = [
            candidate
            for shape in space.shapes
            if shape.gpus == space.request.layout.gpus
            for setting in space.settings(shape)
            if self._shape.moe is None or setting.accumulate == self._accumulate
            for candidate in space.candidates(shape, setting)
            if runs_under_memo_train(candidate) and LayoutChoice.of_candidate(candidate).words not in without
        ]
        found = search_layouts(space, candidates=candidates, wanted=1).best
        return (LayoutChoice.of_candidate(found[0].candidate), found[0].step_s) if found else None

    def _plan(self, choice: LayoutChoice) -> ActivationPlan | None:
        try:
            return find_plan(self._space.problem(choice.candidate(self._shape), self._shape.mlp_tiles))
        except (PlanError, UsageError):
            return None
