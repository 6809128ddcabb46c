"""One pipeline stage of a problem: its layers, the ends of the model that it has, its machine, and sums over them.

Made by `ActivationProblem.stages`, once for each stage. Owns what a stage is, under any plan of its layers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.mip.inputs.profile import StaticBytes

if TYPE_CHECKING:
    from memo.mip.activation.plan import ActivationProblem, Pipeline, StageMachine
    from memo.mip.inputs.profile import EmbeddingOrHeadProfile, LayerProfile


@dataclasses.dataclass(frozen=True)
class StageView:
    """One stage of a problem."""

    problem: ActivationProblem
    number: int

    def __reduce__(self) -> tuple[object, ...]:
        return StageView, (self.problem, self.number)

    @property
    def pipeline(self) -> Pipeline:
        """The problem's."""
        return self.problem.pipeline

    @functools.cached_property
    def machine(self) -> StageMachine:
        """Its machine."""
        return self.problem.machine_of(self.number)

    @functools.cached_property
    def chunks(self) -> tuple[range, ...]:
        """Layer indices, by chunk."""
        pipeline, count = self.pipeline, len(self.problem.profile.layers)
        if pipeline.own is not None:
            sizes: Sequence[int] = pipeline.own.layers
        elif pipeline.layers:
            sizes = pipeline.layers
        else:
            share, more = divmod(count, pipeline.stages * pipeline.chunks)
            sizes = [share + (place < more) for place in range(pipeline.stages * pipeline.chunks)]
        ends = list(itertools.accumulate(sizes))
        return tuple(range(ends[place] - sizes[place], ends[place]) for place in pipeline.chunk_positions(self.number))

    @functools.cached_property
    def indices(self) -> tuple[int, ...]:
        """Layer indices, chunk after chunk."""
        return tuple(itertools.chain.from_iterable(self.chunks))

    @functools.cached_property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Its layers, chunk after chunk."""
        known = self.problem.profile.layer_profiles()
        return tuple(known[index] for index in self.indices)

    @functools.cached_property
    def numbers(self) -> tuple[range, ...]:
        """Layers of each chunk, counted within the stage."""
        stops = [0, *itertools.accumulate(map(len, self.chunks))]
        return tuple(itertools.starmap(range, itertools.pairwise(stops)))

    @property
    def has_embedding(self) -> bool:
        """Whether the model's first layer is its own, and so the embedding."""
        return self.indices[0] == 0

    @property
    def has_head(self) -> bool:
        """Whether the model's last layer is its own, and so the head."""
        return self.indices[-1] == len(self.problem.profile.layers) - 1

    @property
    def ends(self) -> list[EmbeddingOrHeadProfile]:
        """The embedding and the head, as far as it has them."""
        profile = self.problem.profile
        return [profile.embedding] * self.has_embedding + [profile.head] * self.has_head

    def ends_s(self, index: int) -> tuple[float, float]:
        """Forward and backward seconds of the embedding and the head, where this is the first or last layer."""
        profile = self.problem.profile
        ends = [profile.embedding] * (index == 0) + [profile.head] * (index == len(profile.layers) - 1)
        return sum(end.forward_s for end in ends), sum(end.backward_s for end in ends)

    def splits(self, chunk: int) -> bool:
        """Whether a chunk's backward is split into two halves."""
        return self.pipeline.splits(self.number, chunk)

    @functools.cached_property
    def compute_s(self) -> float:
        """Seconds of a microbatch's passes, without recompute, stalls and collectives beside them."""
        parts = [layer.forward_s + layer.backward_s for layer in self.layers]
        return sum(parts) + sum(sum(self.ends_s(index)) for index in self.indices)

    @property
    def exchange_s(self) -> float:
        """Seconds of a microbatch in which compute waits for collectives of tensor and context parallelism."""
        parts = [layer.forward_exchange_s + layer.backward_exchange_s for layer in self.layers]
        return sum(parts) + sum(end.forward_exchange_s + end.backward_exchange_s for end in self.ends)

    @functools.cached_property
    def static(self) -> StaticBytes:
        """Bytes of parameters, gradients, optimizer state and messages of one rank."""
        statics = collections.Counter(layer.static for layer in self.layers)
        found = sum((each * count for each, count in statics.items()), StaticBytes())
        for end in self.ends:
            found += end.static
        return found + StaticBytes(messages=self.problem.message_bytes(self.number))
