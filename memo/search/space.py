"""Space of a search: every way to run a step of a given size on a cluster, and the reasons why others are left out.

Owns the dimensions, what divides what, and what a placement on groups of nodes that are not alike changes: the problem of a
candidate, whose stages have machines of their own, numbers of layers, hybrid sharding and the bound by work.

    shape        pp x dp x cp x tp ranks, on all GPUs of the cluster or on fewer: whole nodes, or a part of one; with
                 experts, how many of the dp ranks divide them
    setting      sequences of a microbatch, and microbatches of a step, which follow from the shape's dp
    candidate    a shape and a setting, with a schedule and its chunks, what data-parallel ranks shard, and whether they
                 exchange the embedding's gradient as rows, which is tried where that is fewer bytes whatever the tokens are

Tensor parallelism beyond a node takes whole nodes. Context parallelism exchanges heads for tokens (Ulysses), whose ranks
divide the query heads and may share key/value heads, or passes keys and values around (a ring), which takes any number of
ranks. Pipeline stages have equal numbers of layers, or those with which the slowest run of layers, embedding and head
included, has least work; divisions.py has others, which a search tries beside the space. Schedules, chunks and
microbatches are those that `memo train` runs.

On a cluster of several groups of nodes every candidate is tried on every placement of its shape. Shapes are those of as
many equal nodes as divide each node of the groups. Numbers of layers by each stage's speed and memory are tried beside equal
ones. With M microbatches, and t(s) the shortest work of one layer on the machine of stage s, e(s) that of the embedding and
the head there, without collectives, a step of n layers takes at least

    M (n + sum_s e(s) / t(s)) / sum_s 1 / t(s)        on the placement where that is least, however layers are divided
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memo.errors import UsageError
from memo.gpt import EmbeddingGradients, GPTConfig, Precision
from memo.gpt.arithmetic import EmbeddingTraffic, reason_not_sparse
from memo.mip.cluster import (
    ClusterPlacement,
    Crossing,
    StageCosts,
    balanced_layers,
    divide_equal_layers,
    divide_layers,
    problem_inputs,
)
from memo.mip.inputs import PipelineSchedule
from memo.search.bounds import Bound, BoundSequence, work_bounds
from memo.search.candidates import Candidate, Setting, Shape
from memo.search.sizes import ModelSizes, divisors_of

if TYPE_CHECKING:
    from memo.mip.activation import ActivationProblem, Budgets
    from memo.mip.cluster import Cluster, NodeGroup, ProfileOf, StagePlace
    from memo.mip.inputs import EmbeddingOrHeadProfile, Hardware, LayerProfile, Profile
    from memo.search.request import Request

DIMENSIONS = ("pp", "dp", "cp", "tp", "ep", "ring", "zero", "schedule", "chunks", "batch", "accumulate")
"""Dimensions that may be fixed."""
MOST_CHUNKS = 4
"""Chunks of a pipeline rank that are tried."""
MOST_TURNS = 1 << 17
"""Most turns of all ranks of a pipeline with several chunks, which the planner follows turn by turn."""
MOST_PLACEMENTS = 256
"""Most placements of a shape that are searched, in the order of `Cluster.placements`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """Candidates for a step of `global_batch` sequences on a cluster.

    Raises:
        UsageError: a fixed dimension is not positive.
    """

    request: Request
    """Model, length, machine with its number of GPUs per node, budgets of a node; its layout is replaced."""
    nodes: int
    global_batch: int
    """Sequences in a step of all ranks."""
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Values of dimensions that are not searched, by name."""
    cluster: Cluster | None = None
    """Groups of nodes that are not alike, whose nodes each have a multiple of the request's GPUs per node; None: all nodes
    are the request's machine."""
    budgets: Mapping[str, Budgets] = dataclasses.field(default_factory=dict)
    """Budgets of a node by the name of its group, where there are groups."""
    _known: dict[Shape, tuple[tuple[StagePlace, ...], ...]] = dataclasses.field(default_factory=dict, init=False)
    """Placements of shapes that were asked for."""

    def __post_init__(self) -> None:
        for name, value in self.fixed.items():
            assert name in DIMENSIONS, name
            if isinstance(value, int) and name != "ring" and value < (0 if name == "zero" else 1):
                raise UsageError(f"--{name} {value} is less than 1")

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node."""
        return self.request.machine.gpus_per_node

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.nodes * self.gpus_per_node

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the model that ranks divide."""
        return ModelSizes.of(self.request, tp=self.fixed.get("tp"))

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes that divide the model and the step, those with most GPUs first."""
        found = [shape for shape in self._divisors() if self._is_whole(shape.gpus) and self._why_not(shape) is None]
        return tuple(sorted(found, key=lambda shape: (-shape.gpus, shape)))

    @functools.cached_property
    def left_out(self) -> dict[str, int]:
        """Reasons for which shapes on all GPUs of the cluster are left out, with their numbers."""
        counts: collections.Counter[str] = collections.Counter()
        for tp in divisors_of(self.gpus):
            for cp in divisors_of(self.gpus // tp):
                for pp in divisors_of(self.gpus // (tp * cp)):
                    shape = Shape(pp, self.gpus // (tp * cp * pp), cp, tp)
                    asked = self.fixed.get("ep", 1)
                    shape = dataclasses.replace(shape, ep=asked if isinstance(asked, int) else 1)
                    for ring in self._attentions(shape) or (False,):
                        shape = dataclasses.replace(shape, ring=ring)
                        why = self._why_not(shape) if self._agrees(shape) else None
                        if why is not None:
                            counts[why] += 1
        return dict(counts.most_common())

    @property
    def why_empty(self) -> str:
        """Why no shape has the fixed values, with the nearest that would do."""
        model, fixed = self.sizes, self.fixed
        tp = fixed.get("tp")
        options: dict[str, tuple[str, Sequence[int]]] = {
            "tp": (model.tensor_words, model.tensor_ranks()),
            "cp": self._context_options(tp if isinstance(tp, int) and tp in model.tensor_ranks() else None),
            "pp": (f"the model into stages of at least one of {model.layers} layers", range(1, model.layers + 1)),
            "dp": (f"{self.global_batch} sequences of a step", divisors_of(self.global_batch)),
            "ep": (f"the model's {model.experts} experts", divisors_of(model.experts)),
        }
        for name, (what, those) in options.items():
            value = fixed.get(name)
            if isinstance(value, int) and value not in those:
                low = max((one for one in those if one < value), default=None)
                high = min((one for one in those if one > value), default=None)
                near = " and ".join(str(one) for one in (low, high) if one is not None)
                verb = "does is" if None in (low, high) else "do are"
                return f"--{name} {value} does not divide {what}; the nearest that {verb} {near}"
        given = [f"--{name} {value}" for name, value in fixed.items() if name != "ring"]
        if "ring" in fixed:
            given.append(f"--cp-attention {'ring' if fixed['ring'] else 'ulysses'}")
        ranks = math.prod(size for name in options if name != "ep" and isinstance(size := fixed.get(name, 1), int))
        if ranks > self.gpus:
            return f"{' x '.join(given)} are {ranks} ranks, and the cluster has {self.gpus} GPUs; give more --nodes"
        return f"no layout of up to {self.gpus} GPUs has {', '.join(given)}; leave one of them out"

    def settings(self, shape: Shape) -> list[Setting]:
        """Divisions of the step into microbatches."""
        own = self.global_batch // shape.dp
        found = [Setting(batch, own // batch) for batch in divisors_of(own)]
        return [one for one in found if self._agrees(one)]

    def schedules(self, shape: Shape, setting: Setting) -> list[Candidate]:
        """A candidate of each schedule on each placement of a shape and a setting, in which nothing is sharded."""
        return [
            Candidate(
                shape=shape,
                setting=setting,
                schedule=schedule,
                chunks=chunks,
                stage_layers=layers,
                zero=0,
                places=places,
            )
            for schedule, chunks in self._schedules(shape, setting)
            for layers in self._divisions(shape, chunks)
            for places in self._placements(shape)
        ]

    def shardings(self, candidate: Candidate) -> list[Candidate]:
        """The candidate under every sharding and exchange of the embedding's gradient."""
        return [
            dataclasses.replace(candidate, zero=zero, sharded_over=ranks, sparse_embedding=sparse)
            for zero, ranks in self._shardings(candidate.shape, candidate.places)
            for sparse in self._exchanges(candidate.shape, candidate.setting, zero, ranks)
        ]

    def candidates(self, shape: Shape, setting: Setting) -> list[Candidate]:
        """All candidates of a shape and a setting."""
        return [one for bare in self.schedules(shape, setting) for one in self.shardings(bare)]

    def count(self, shape: Shape, setting: Setting) -> int:
        """Number of its candidates."""
        bare = sum(len(self._divisions(shape, chunks)) for _, chunks in self._schedules(shape, setting))
        ways = (
            self._exchanges(shape, setting, *sharding)
            for places in (self._placements(shape) if bare else ())
            for sharding in self._shardings(shape, places)
        )
        return bare * sum(map(len, ways))

    def request_of(self, candidate: Candidate) -> Request:
        """The request for a plan of a candidate."""
        shape, setting, request = candidate.shape, candidate.setting, self.request
        layout = dataclasses.replace(
            request.layout,
            gpus=shape.gpus,
            tp=shape.tp,
            cp=shape.cp,
            ring=shape.ring,
            pp=shape.pp,
            ep=shape.ep,
            batch=setting.batch,
        )
        ranks = min(shape.gpus, self.gpus_per_node)
        return dataclasses.replace(
            request,
            layout=layout,
            budgets=dataclasses.replace(request.budgets, ranks_per_node=ranks),
            accumulate=setting.accumulate,
            schedule=candidate.schedule,
            chunks=candidate.chunks if candidate.chunks > 1 else None,
            stage_layers=candidate.stage_layers,
            zero=candidate.zero,
            sharded_over=candidate.sharded_over,
            embedding=EmbeddingGradients.SPARSE if candidate.sparse_embedding else EmbeddingGradients.DENSE,
        )

    def problem(self, candidate: Candidate, tiles: int = 1) -> ActivationProblem:
        """The planning problem of a candidate with so many MLP tiles.

        Raises:
            UsageError: the host has no room for what is to be there in any case, or the layout does not go with groups.
        """
        return _problem(self, candidate, tiles)

    def further(self, candidate: Candidate) -> list[Candidate]:
        """Candidates that are tried beside one: with numbers of layers by its stages' speed and memory."""
        placement = self.placement(candidate)
        if placement is None or candidate.shape.pp == 1 or self.request.stage_layers:
            return []
        try:
            layers = balanced_layers(
                placement,
                _profile_of(self.request_of(candidate), self.request.tiles[0]),
                self.budgets_of,
                schedule=candidate.schedule,
                chunks=candidate.chunks,
            )
        except UsageError:
            return []
        other = dataclasses.replace(candidate, stage_layers=layers)
        return [] if self.owns(other) else [other]

    def owns(self, candidate: Candidate) -> bool:
        """Whether the candidate's numbers of layers are those of a candidate of the space, or given for all."""
        layers = candidate.stage_layers
        if self.request.stage_layers:
            return True
        if candidate.places:
            share, more = divmod(sum(layers), max(len(layers), 1))
            return layers == tuple(share + (run < more) for run in range(len(layers)))
        own = self._divisions(candidate.shape, candidate.chunks)
        return layers in own or (() in own and len(set(layers)) == 1)

    def placement(self, candidate: Candidate) -> ClusterPlacement | None:
        """Where the candidate's stages are, if nodes are not alike."""
        if self.cluster is None:
            return None
        return ClusterPlacement(
            cluster=self.cluster, places=candidate.places, tp=candidate.shape.tp, cp=candidate.shape.cp
        )

    def least_work(self, shape: Shape, setting: Setting) -> BoundSequence:
        """Bounds by the work of a shape and a setting, whatever the rest of a candidate is."""
        if not isinstance(self.request.config, GPTConfig) and self.cluster is None:
            # A kernel's time per sequence is least in the largest microbatch, so one step is recorded for all settings.
            setting = max(self.settings(shape), key=lambda one: one.batch)
        request = self.request_of(Candidate(shape=shape, setting=setting, zero=0))
        if self.cluster is not None:
            return self._least_work(shape, request)
        with contextlib.suppress(UsageError):
            return work_bounds(request.problem(self.request.tiles[0]))
        return BoundSequence()

    @property
    def groups(self) -> list[tuple[str, int, Hardware, Budgets]]:
        """Its kinds of nodes: name, empty where all are alike, number, machine and budgets of a node."""
        if self.cluster is None:
            return [("", self.nodes, self.request.machine, self.request.budgets)]
        return [(one.name, one.nodes, one.machine, self.budgets[one.name]) for one in self.cluster.groups]

    # Groups of nodes.

    def _least_work(self, shape: Shape, request: Request) -> BoundSequence:
        """Bound by the work on the placement that suits it best."""
        groups = () if self.cluster is None else self.cluster.groups

        @functools.cache
        def work(group: int) -> tuple[float, float, float, int]:
            """Seconds of a layer, of the embedding and of the head on a group's machine, and the number of layers."""
            profile = _profile_of(request, self.request.tiles[0])(groups[group].machine)
            layers = profile.layer_profiles()
            return min(map(_work_s, layers)), _work_s(profile.embedding), _work_s(profile.head), len(layers)

        steps = []
        for places in self._placements(shape):
            layer_s = [max(work(group)[0] for group in place.groups) for place in places]
            ends = max(work(group)[1] for group in places[0].groups) / layer_s[0]
            ends += max(work(group)[2] for group in places[-1].groups) / layer_s[-1]
            count = work(places[0].groups[0])[3]
            steps.append(request.accumulate * (count + ends) / sum(1 / seconds for seconds in layer_s))
        return BoundSequence(((Bound.COMPUTE, min(steps)),)) if steps else BoundSequence()

    def _placements(self, shape: Shape) -> tuple[tuple[StagePlace, ...], ...]:
        """Stages' places of a shape: one without any on equal nodes; none where it has no place on the groups of nodes."""
        if self.cluster is None:
            return ((),)
        if shape not in self._known:
            layout = dataclasses.replace(
                self.request.layout, gpus=shape.gpus, tp=shape.tp, cp=shape.cp, pp=shape.pp, ring=shape.ring
            )
            try:
                placed = list(itertools.islice(self.cluster.placements(layout), MOST_PLACEMENTS))
            except UsageError:
                placed = []
            across = shape.ep == 1  # experts are not planned on several groups
            self._known[shape] = tuple(one.places for one in placed if across or one.crossing is not Crossing.REPLICAS)
        return self._known[shape]

    def budgets_of(self, group: NodeGroup) -> Budgets:
        """Budgets of a node of a group."""
        return self.budgets[group.name]

    # What divides what.

    def _divisors(self) -> Iterator[Shape]:
        """Shapes whose numbers divide the model's and the step's, on up to all GPUs."""
        model = self.sizes
        tps = [tp for tp in model.tensor_ranks() if tp <= self.gpus]
        for tp in tps:
            for cp in self._context_options(tp)[1]:
                for pp in range(1, min(model.layers, self.gpus // (tp * cp)) + 1):
                    for dp in divisors_of(self.global_batch):
                        shape = Shape(pp, dp, cp, tp)
                        if shape.gpus <= self.gpus:
                            yield from self._ways(shape)

    def _ways(self, shape: Shape) -> Iterator[Shape]:
        """Shapes of the same ranks, by attention and by the ranks that divide the experts."""
        for ep in divisors_of(math.gcd(shape.dp, self.sizes.experts)):
            if self._agrees(dataclasses.replace(shape, ep=ep)):
                yield from (dataclasses.replace(shape, ep=ep, ring=ring) for ring in self._attentions(shape))

    @property
    def _may_ring(self) -> bool:
        """Whether memo train's ring attention takes the model, and `--cp-attention` does not exclude it."""
        request = self.request
        config, asked = request.config, self.fixed.get("ring")
        if not isinstance(config, GPTConfig) or config.is_local_within(request.layout.tokens):
            return False
        known = config.head_dim % 8 == 0 and request.precision is not Precision.FP32
        return known and asked in (None, True)

    def _context_options(self, tp: int | None) -> tuple[str, Sequence[int]]:
        """Words for what ranks of context parallelism divide, and the numbers of ranks that do, ascending."""
        model, tokens = self.sizes, self.request.layout.tokens
        heads = f"{model.heads} heads" if tp is None else f"{model.heads} heads on --tp {tp}"
        if not self._may_ring:
            return heads, model.context_ranks(tp or 1)
        parts = [cp for cp in divisors_of(tokens // 2) if cp <= self.gpus] if tokens % 2 == 0 else []
        if self.fixed.get("ring"):
            return f"{tokens} tokens in two parts a rank", sorted({1, *parts})
        return f"{heads} or {tokens} tokens in two parts a rank", sorted({*model.context_ranks(tp or 1), *parts})

    def _attentions(self, shape: Shape) -> tuple[bool, ...]:
        """Ways of attention under context parallelism: False exchanges heads for tokens, True is a ring."""
        model, tokens = self.sizes, self.request.layout.tokens
        if shape.cp == 1:
            return (False,)
        exchanges = shape.tp in model.tensor_ranks() and shape.cp in model.context_ranks(shape.tp)
        rings = self._may_ring and tokens % (2 * shape.cp) == 0
        return (False,) * (exchanges and not self.fixed.get("ring")) + (True,) * rings

    def _is_whole(self, gpus: int) -> bool:
        """Whether so many GPUs are whole nodes, or a part of one."""
        return gpus <= self.gpus_per_node or gpus % self.gpus_per_node == 0

    def _agrees(self, part: Shape | Setting) -> bool:
        """Whether it has the fixed values."""
        names = [field.name for field in dataclasses.fields(part) if field.name != "ring"]  # of shapes with cp alone
        return all(self.fixed.get(name) in (None, getattr(part, name)) for name in names)

    def _why_not(self, shape: Shape) -> str | None:
        """Reason why a shape is left out; None where it is not."""
        model, per_node, tokens = self.sizes, self.gpus_per_node, self.request.layout.tokens
        if shape.tp not in model.tensor_ranks():
            return "tp does not divide the heads and the MLP"
        if shape.ring not in self._attentions(shape):
            return f"cp does not divide the heads of a tensor-parallel rank{', nor the tokens in two' * self._may_ring}"
        if tokens % (shape.cp * shape.tp):
            return "tp x cp does not divide the tokens"
        if shape.tp > per_node and shape.tp % per_node:
            return "tp is beyond a node and not of whole nodes"
        if model.layers < shape.pp:
            return "pp is more than the layers"
        if self.global_batch % shape.dp:
            return "dp does not divide the sequences of a step"
        if math.gcd(shape.dp, model.experts) % shape.ep:
            return "ep does not divide dp and the experts"
        if shape.gpus > per_node and not self.request.machine.network.nics_per_node:
            return "no network connects the nodes"
        if not any(self._schedules(shape, setting) for setting in self.settings(shape)):
            return "too few microbatches for every schedule"
        return None

    def _schedules(self, shape: Shape, setting: Setting) -> list[tuple[PipelineSchedule, int]]:
        """Schedules that run so many microbatches, with their numbers of chunks."""
        if shape.pp == 1:
            options = [(PipelineSchedule.ONE_F_ONE_B, 1)]
        else:
            layers = self.sizes.layers
            # GPipe holds more than 1F1B in the same time.
            needless = PipelineSchedule.ONE_F_ONE_B.reason_unsupported(setting.accumulate, shape.pp) is None
            needless = needless and self.fixed.get("schedule") is not PipelineSchedule.GPIPE
            options = [
                (schedule, chunks)
                for schedule in PipelineSchedule
                for chunks in _chunk_counts(schedule)
                if layers >= shape.pp * chunks
                and not (needless and schedule is PipelineSchedule.GPIPE)
                and schedule.reason_unsupported(setting.accumulate, shape.pp) is None
                and (chunks == 1 or shape.pp * chunks * setting.accumulate <= MOST_TURNS)
            ]
        fixed = self.fixed
        return [
            (schedule, chunks)
            for schedule, chunks in options
            if fixed.get("schedule") in (None, schedule) and fixed.get("chunks") in (None, chunks)
        ]

    def _divisions(self, shape: Shape, chunks: int) -> tuple[tuple[int, ...], ...]:
        """Numbers of layers of the runs to try; empty ones are equal, of groups the first ones one larger if need be."""
        layers, runs = self.sizes.layers, shape.pp * chunks
        if shape.pp == 1 or self.cluster is not None:
            return ((),)
        equal = ((),) if layers % runs == 0 else ()
        balanced = _balanced(runs, *self._work)
        return equal if len(set(balanced)) == 1 else (*equal, balanced)

    @functools.cached_property
    def _work(self) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
        """Seconds of both passes of each layer, and of the embedding and the head, on one GPU; whether layers are alike."""
        request = self.request_of(Candidate(shape=Shape(1, 1, 1, 1), setting=Setting(1, 1), zero=0))
        profile = request.profile_on(request.machine, request.layout, tiles=request.tiles[0])
        layers = tuple(layer.forward_s + layer.backward_s for layer in profile.layer_profiles())
        ends = tuple(end.forward_s + end.backward_s for end in (profile.embedding, profile.head))
        return layers, ends, len(profile.classes) == 1

    def _shardings(self, shape: Shape, places: tuple[StagePlace, ...] = ()) -> list[tuple[int, int | None]]:
        """ZeRO stages, each with the ranks that share a copy: all, a node's, or some of the replicas of each group."""
        fixed = self.fixed.get("zero")
        ranks = shape.dp * shape.cp
        if ranks == 1 or self.sizes.experts > 1:  # which are planned as memo train shards them
            return [(3, None)]
        found: list[tuple[int, int | None]] = [(zero, None) for zero in (3, 2, 1, 0) if fixed in (None, zero)]
        of_node = self.gpus_per_node // shape.tp if shape.tp <= self.gpus_per_node else 1
        of_group = math.gcd(*places[0].replicas) * shape.cp if places and len(places[0].groups) > 1 else 1
        within = [of_node] * (1 < of_node < ranks and ranks % of_node == 0) + [of_group] * (of_group > 1)
        return found + [(3, each) for each in dict.fromkeys(within) if fixed is None]

    def _exchanges(self, shape: Shape, setting: Setting, zero: int, sharded_over: int | None) -> tuple[bool, ...]:
        """Whether the embedding's gradient is exchanged as rows: the ways to try."""
        request, ranks = self.request, shape.dp * shape.cp
        config, asked = request.config, request.embedding
        if asked is EmbeddingGradients.DENSE or not isinstance(config, GPTConfig):
            return (False,)
        reason = reason_not_sparse(tied=config.tie_embeddings, ranks=ranks, zero=zero, lora=request.lora)
        if reason is not None or sharded_over is not None:
            return (False,)
        if asked is EmbeddingGradients.SPARSE:
            return (True,)
        traffic = EmbeddingTraffic(
            rows=-(-config.vocab_size // shape.tp),
            width=config.hidden,
            tokens=request.layout.tokens // shape.cp * setting.batch * setting.accumulate,
            ranks=ranks,
            element=1,
            gathered_element=1 if zero else 0,
        )
        return (False, True) if traffic.sparse_is_less else (False,)


def _chunk_counts(schedule: PipelineSchedule) -> list[int]:
    """Numbers of chunks of a rank that are tried."""
    return [chunks for chunks in range(1, MOST_CHUNKS + 1) if schedule.reason_not_chunks(chunks) is None]


@functools.lru_cache(maxsize=1024)
def _balanced(runs: int, layers_s: tuple[float, ...], ends_s: tuple[float, ...], alike: bool) -> tuple[int, ...]:
    """Layers of each of so many runs with which the slowest one is shortest."""
    count, (before_s, after_s) = len(layers_s), ends_s
    if alike:
        return divide_equal_layers(count, runs, before=before_s / layers_s[0], after=after_s / layers_s[0])
    costs = StageCosts(seconds=layers_s, nbytes=[0] * count, room_bytes=0, before_s=before_s, after_s=after_s)
    return divide_layers([costs] * runs)


@functools.lru_cache(maxsize=256)  # each of a candidate's bounds asks for it
def _problem(space: Space, candidate: Candidate, tiles: int) -> ActivationProblem:
    request, placement = space.request_of(candidate), space.placement(candidate)
    if placement is None:
        return request.problem(tiles)
    return problem_inputs(
        placement,
        _profile_of(request, tiles),
        space.budgets_of,
        microbatches=request.accumulate,
        layers=candidate.stage_layers or None,
        schedule=candidate.schedule,
        chunks=candidate.chunks,
    )


def _profile_of(request: Request, tiles: int) -> ProfileOf:
    """Profiles of a request on a machine, with the changes of a placement."""

    @functools.lru_cache(maxsize=64)
    def profile_of(machine: Hardware, **changes: Any) -> Profile:
        return request.profile_on(machine, dataclasses.replace(request.layout, **changes), tiles=tiles)

    return profile_of


def _work_s(part: LayerProfile | EmbeddingOrHeadProfile) -> float:
    """Seconds of a microbatch's two passes, without waits for collectives."""
    return part.forward_s + part.backward_s - part.forward_exchange_s - part.backward_exchange_s
