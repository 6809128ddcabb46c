"""Weights of a model on one rank: the bytes of them, their gradients and states, and the collectives that exchange them.

Owns what sharding and data parallelism exchange, and when, for each degree of sharding; the collectives' times are
`memo.mip.inputs.Collectives`. Derived and recorded profiles add a rank's weights to activations here alone. Needs no torch.

    zero 3      gathers weights before each pass, reduces gradients once a step
    zero 2, 1   reduces gradients once a step to the ranks that own them, gathers updated weights behind the optimizer
    zero 0      sums gradients once a step
    whole       under zero 2 and 3, gathers once a step and reduces once a step
    hybrid      groups of ranks share one copy; what they have reduced is summed over the groups
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.gpt.arithmetic.collectives import exchange_s
from memo.gpt.optim import GROUP_BYTES, IN_FLIGHT_BYTES
from memo.mip.inputs import Collectives, LayerProfile, StaticBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memo.gpt.arithmetic.collectives import Collective
    from memo.gpt.arithmetic.layout import StepLayout
    from memo.gpt.arithmetic.step_collectives import WeightUnit
    from memo.gpt.arithmetic.training import Training
    from memo.mip.inputs import Hardware, RankGroup

MOST_LINK_SHARE = 0.5  # of a link that both use, each gets half


@dataclasses.dataclass(frozen=True, slots=True)
class RankWeights:
    """Weights on one rank of a layout. Parameters are those of the rank, before they are sharded."""

    machine: Hardware
    layout: StepLayout
    training: Training

    @property
    def shards(self) -> int:
        """Ranks that one copy of what is sharded is divided over."""
        every = self.layout.replicas * self.layout.cp
        return min(self.training.sharded_over or every, every)

    @property
    def _group(self) -> RankGroup:
        return self.layout.data_group(self.machine.gpus_per_node, size=self.shards)

    @property
    def _copies(self) -> RankGroup:
        """Ranks that hold the same shard."""
        return self.layout.copies_group(self.machine.gpus_per_node, shards=self.shards)

    @property
    def gathers_each_pass(self) -> bool:
        """Whether weights are gathered in each microbatch."""
        return not self.training.whole_in_step and self.training.zero == 3

    def gather_s(self, parameters: float) -> float:
        """Seconds to gather sharded weights once; 0 where a rank has them."""
        if not self.gathers_each_pass:
            return 0.0
        return Collectives(self.machine).all_gather_s(self.training.gathered_bytes * parameters, self._group)

    def update_s(self, parameters: float) -> float:
        """Seconds to gather updated weights once a step."""
        if self.training.zero == 0 or self.gathers_each_pass:
            return 0.0
        return Collectives(self.machine).all_gather_s(self.training.gathered_bytes * parameters, self._group)

    def sync_s(self, parameters: float) -> float:
        """Seconds to reduce gradients once a step."""
        collectives, nbytes = Collectives(self.machine), self.training.trained_states.reduced * parameters
        if self.training.zero == 0:
            return collectives.all_reduce_s(nbytes, self.layout.data_group(self.machine.gpus_per_node))
        summed = collectives.all_reduce_s(nbytes / self.shards, self._copies)
        return collectives.reduce_scatter_s(nbytes, self._group) + summed

    # An end's parameters, the embedding's or the head's: torch's FSDP has them whole from forward to backward.

    def end_gather_s(self, parameters: float) -> float:
        """Seconds to gather an end's parameters, once: they stay until backward."""
        return self.gather_s(parameters) if parameters else 0.0

    def end_sync_s(self, parameters: float) -> float:
        """Seconds to reduce the gradients of an end's parameters; 0 where they are frozen."""
        return 0.0 if self.training.lora or not parameters else self.sync_s(parameters)

    def end_static(self, parameters: float) -> StaticBytes:
        """Bytes of an end's parameters on the device all the time; FSDP reduces their gradients last."""
        training = self.training
        gathered, gradients = self.gathered_bytes(parameters), 0.0
        if gathered and not (training.accumulates or training.lora):
            gradients = training.states.gradient * parameters
        trained = 0 if training.lora else parameters
        static = training.static_bytes(parameters, self.shards, trained=trained, of_end=True)
        return static + StaticBytes(gathered=round(gathered), gradients=round(gradients))

    # A layer's parameters: its own, and units apart that other ranks share.

    def gathered_bytes(self, parameters: float, apart: Sequence[WeightUnit] = ()) -> float:
        """Bytes of gathered weights, where they are not on the device all the time."""
        if not self.gathers_each_pass:
            return 0.0
        own = parameters if self.shards > 1 else 0.0
        return self.training.gathered_bytes * (own + sum(unit.elements for unit in apart if unit.shards > 1))

    def apart_s(self, collective: Callable[[WeightUnit], Iterable[Collective]], apart: Sequence[WeightUnit]) -> float:
        """Seconds of a collective over each of some units apart."""
        return sum(exchange_s(collective(unit), self.machine, self.layout) for unit in apart)

    def static(
        self, parameters: float, apart: Sequence[WeightUnit] = (), *, trained: float, coded: float = 0.0
    ) -> StaticBytes:
        """Bytes of a layer's parameters on the device all the time; units apart are trained, too."""
        own = self.training.static_bytes(parameters, self.shards, trained=trained, coded=coded)
        return sum((self.training.static_bytes(unit.elements, unit.shards) for unit in apart), start=own)

    def with_gathered(self, layer: LayerProfile, *, weights: float, gradients: float) -> LayerProfile:
        """A layer with its whole weights on top of its own transients.

        Two layers' are there at a time, the one's that runs and the next one's, which are gathered meanwhile; and in
        backward their whole gradients, until they are reduced. FSDP copies what it gathers into each parameter, and
        gradients into what it reduces, on the compute stream.

        Args:
            layer: without them.
            weights: bytes of its gathered weights.
            gradients: bytes of the gradients of these.
        """
        forward, backward = round(2 * weights), round(2 * weights + 2 * gradients)
        copied = weights if self.training.accumulates else weights + gradients
        return dataclasses.replace(
            layer,
            forward_s=layer.forward_s + 2 * weights / self.machine.elementwise_bytes_per_s,
            backward_s=layer.backward_s + 2 * copied / self.machine.elementwise_bytes_per_s,
            forward_transient_bytes=layer.forward_transient_bytes + forward,
            backward_transient_bytes=layer.backward_transient_bytes + backward,
            forward_gathered_bytes=forward,
            backward_gathered_bytes=backward,
        )

    # A step.

    @property
    def update_shards(self) -> int:
        """Ranks that divide the optimizer's step."""
        return self.shards if self.training.zero else 1

    def optimizer_s(self, trained: float, *, backward_s: float = 0.0, accumulate: int = 1) -> float:
        """Seconds in which the optimizer reads and writes so many parameters and their states.

        On the host: at the rate at which all GPUs of a node write its memory. On one GPU gradients go there beside backward
        and weights come back beside the update; on several, gradients come before it and weights go after it. Published
        runs took several times as long.

        Args:
            trained: parameters.
            backward_s: seconds of a microbatch's backward, beside which gradients go to the host.
            accumulate: microbatches in a step; each but the first brings the earlier ones' sums back beside its backward.
        """
        states, machine, own = self.training.trained_states, self.machine, trained / self.update_shards
        if not self.training.optimizer_offload:
            return states.passes * own / machine.elementwise_bytes_per_s
        ranks = min(self.layout.gpus, machine.gpus_per_node)
        lanes = machine.lanes(ranks)
        if not (lanes.d2h_bytes_per_s and lanes.h2d_bytes_per_s):
            raise UsageError(f"--optimizer-offload: {machine.name} has no link to host memory")
        host_s = states.passes * own * ranks / machine.node_d2h_bytes_per_s
        out_s, back_s = own * states.reduced / lanes.d2h_bytes_per_s, own * states.weight / lanes.h2d_bytes_per_s
        if self.layout.gpus > 1:
            return host_s + out_s + back_s
        fetched_s = (accumulate - 1) * max(own * states.reduced / lanes.h2d_bytes_per_s - backward_s, 0.0)
        last_out_s = min(out_s, IN_FLIGHT_BYTES / lanes.d2h_bytes_per_s)
        last_back_s = min(back_s, GROUP_BYTES / lanes.h2d_bytes_per_s)
        return fetched_s + max(out_s - backward_s, last_out_s) + max(host_s, back_s) + last_back_s

    def in_flight(self, parameters: float, *, largest: float) -> StaticBytes:
        """Gradients on their way to an optimizer on the host of one GPU, and those that backward adds to one another.

        Args:
            parameters: of the model.
            largest: parameters of a layer's largest matrix.
        """
        if not self.training.optimizer_offload or self.layout.gpus > 1:
            return StaticBytes()
        gradient, made = self.training.trained_states.gradient, 3 if self.training.accumulates else 1
        return StaticBytes(gradients=round(min(gradient * parameters, IN_FLIGHT_BYTES + made * gradient * largest)))

    def orthogonalisation_s(self, flops: float) -> float:
        """Seconds of Muon's products in a step: matrices are divided over the ranks that share one copy, each one whole."""
        if self.training.optimizer_offload:
            return 0.0
        return flops / self.update_shards / self.machine.product_flops_per_s

    def link_share(self, layers: Iterable[tuple[LayerProfile, float]], accumulate: int) -> float:
        """Fraction of a GPU's link to the host that collectives of layers' two passes take, in one direction.

        Args:
            layers: each with the bytes that its exchanges within the layer move over that link.
            accumulate: microbatches in a step.
        """
        machine, nbytes, seconds = self.machine, 0.0, 0.0
        rate = Collectives(machine).host_link_bytes_per_s(self.layout.data_group(machine.gpus_per_node))
        for layer, exchanged in layers:
            weights_s = 2 * layer.gather_s + layer.sync_s / accumulate
            nbytes += exchanged + weights_s * rate
            seconds += max(layer.forward_s + layer.backward_s, weights_s)
        link = min(machine.d2h_bytes_per_s, machine.h2d_bytes_per_s)
        return min(nbytes / seconds / link, MOST_LINK_SHARE) if link and seconds else 0.0
