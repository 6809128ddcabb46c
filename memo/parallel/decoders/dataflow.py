"""Dataflow of a layer whose matrices are divided: the proof, without data, that it computes what the whole layer does.

The layer runs twice on the meta device: unchanged, and as a wider layer with `ranks` times the heads and columns, of which
the unchanged layer is one rank's part. Both runs must be the same operators; a dimension in which their sizes differ by the
number of ranks is divided, and the ranks must divide its size in the layer. Each operator that sees such a dimension must be
one that keeps it: elementwise, a batch dimension of a product, a view of whole blocks. None may reduce, mix or index it,
which only row-parallel matrices do. Beside that each tensor has a flow, which says what its gradient is on a rank:

    CONSTANT     none                      WEIGHT    of replicated parameters alone
    REPLICATED   whole, on every rank      PARTIAL   values of every rank are equal, gradients are to be summed
    SHARDED      of this rank's part

REPLICATED becomes PARTIAL where a module enters (memo.parallel.Entry), PARTIAL becomes SHARDED in a column-parallel matrix,
and SHARDED becomes REPLICATED in a row-parallel one. Nothing else may mix REPLICATED with the other two. A parameter that
meets PARTIAL or SHARDED has its gradient summed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memo.parallel.decoders.operators import Flow, NotDivisible, OperatorCall, Shape, State, kept_pieces
from memo.torch_private import TorchDispatchMode

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module."""


_NUMBERING = frozenset(["arange", "add", "detach", "unsqueeze", "view", "expand", "alias", "cumsum", "mul", "sub"])
"""Operators that number tokens where a model is given no positions."""

_LONG = 2**16
"""Times that a sequence is longer than a rank's part, so that whatever a model does from some length on is seen."""

_ROWS = 2
"""Sequences of that run, so that a view that mixes rows with tokens is seen."""

_OF_VALUES = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.Tensor.new_tensor}
"""Functions that make tensors of values, which operators do not show."""


class Kind(enum.Enum):
    """Division of a module's weights."""

    COLUMN = "outputs"
    ROW = "inputs"
    EXPERTS = "columns and rows of every expert"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DividedModule:
    """Division of one module."""

    kind: Kind
    pieces: int = 1
    """Projections fused in a COLUMN one."""
    whole_outside: bool = False
    """A COLUMN one gathers its outputs, a ROW one takes its part of whole inputs."""
    weights: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Parameter of EXPERTS to the dimension that is divided, and the pieces fused along it."""


class Boundary(enum.Enum):
    """Communication where a module begins, and with WHOLE where it ends."""

    ENTRY = "tokens are gathered; gradients are summed"
    WHOLE = "tokens are gathered, and divided again at the end"


@dataclasses.dataclass(slots=True, kw_only=True)
class Division:
    """Division of one layer: its modules by their names within it."""

    parts: dict[str, DividedModule]
    boundaries: dict[str, Boundary]
    scaled: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Module to its attributes that are proportional to the heads."""
    summed: frozenset[str] = frozenset()
    """Replicated parameters whose gradient is summed over the ranks."""
    whole: dict[str, str] = dataclasses.field(default_factory=dict)
    """Modules of the layer that stay whole, to the reason."""


def run_wide(
    layer: nn.Module,
    call: Call,
    parts: Mapping[str, DividedModule],
    scaled: Mapping[str, Sequence[str]],
    *,
    ranks: int,
) -> list[OperatorCall]:
    """The operators of the layer with `ranks` times the heads and columns, in which modules of `parts` count as one."""
    run = _Run(layer, parts, ranks=ranks, steps=None)
    with _scaled(layer, scaled, ranks):
        run.forward(call)
    return run.done


def check(
    layer: nn.Module,
    call: Call,
    division: Division,
    steps: list[OperatorCall],
    *,
    ranks: int,
    sequence: bool,
) -> frozenset[str]:
    """Names of the replicated parameters whose gradients are to be summed.

    Args:
        layer: its parameters may be anywhere, and are not read.
        call: positional and named arguments of the layer, on the meta device.
        division: what is checked.
        steps: of `run_wide`.
        ranks: among which the layer is divided.
        sequence: between the modules a rank has its own tokens.

    Raises:
        NotDivisible: the layer would not compute what the whole one does.
    """
    run = _Run(layer, division.parts, ranks=ranks, steps=steps, division=division, sequence=sequence)
    try:
        run.forward(call)
    except NotDivisible as error:
        error.reached = len(run.done)
        raise
    if len(run.done) != len(steps):
        raise NotDivisible("it takes another way than on one rank")
    names = {name for name, _ in layer.named_parameters(remove_duplicate=False)}
    seen = {name for name in names if name in run.uses or any(name.startswith(f"{part}.") for part in division.parts)}
    # The experts' own are left out of a run without data.
    seen |= {name for name in names if is_experts(layer.get_submodule(name.rpartition(".")[0]))}
    ran = {name.partition(".")[0] for name in seen}  # a cross-attention of which nothing runs never will
    idle = {name for name in names - seen if name.partition(".")[0] in ran}
    if idle:
        raise NotDivisible(f"{min(idle)} is not used in a forward, as an adapter that is not active")
    unlike = {name for name, kinds in run.uses.items() if len(kinds) > 1}
    if unlike:
        raise NotDivisible(f"{min(unlike)} is used both inside and outside of what is divided")
    summed = frozenset(name for name, kinds in run.uses.items() if kinds == {True})
    owners = {name.rpartition(".")[0] for name in summed}
    beside = [name for name in run.uses.keys() - summed if name.rpartition(".")[0] in owners]
    if beside:
        raise NotDivisible(f"{min(beside)} is used outside of what is divided, and others of its module inside")
    return summed


def check_tokens(model: nn.Module, forward: Callable[..., torch.Tensor], *, ranks: int) -> None:
    """Checks that ranks can each run a model on their own tokens.

    Args:
        model: its parameters may be anywhere, and are not read.
        forward: runs the model and returns (rows, tokens, any); called with tensors on the meta device: by name in the place
            of parameters and buffers, tokens, and their positions, (rows, tokens) each, or None for positions of its own.
        ranks: among which the tokens are divided.

    Raises:
        NotDivisible: an operator mixes tokens, or the model itself numbers them in another way than from 0.
    """
    for times in (ranks, _LONG):  # a short sequence first, since the long one's masks would have no room
        whole = _Run(model, {}, ranks=times, steps=None)
        whole.on_tokens(forward, 8 * ranks * times)
        if times == ranks:
            alone = _Run(model, {}, ranks=ranks, steps=None)
            alone.on_tokens(lambda tensors, ids, _: forward(tensors, ids, None), 8 * ranks * ranks)
            _check_numbering(alone.done, whole.done)
        run = _Run(model, {}, ranks=times, steps=whole.done)
        run.on_tokens(forward, 8 * ranks)
        if len(run.done) != len(whole.done):
            raise NotDivisible("it takes another way than on one rank")


def _check_numbering(alone: Sequence[OperatorCall], given: Sequence[OperatorCall]) -> None:
    """Raises NotDivisible unless a run beyond one with positions makes them by `arange` from 0, or counts a mask so."""
    counts = [collections.Counter((one.name.split(".")[1], one.settings) for one in run) for run in (alone, given)]
    more = {(name, tuple(one for one in settings if one is not None)) for name, settings in counts[0] - counts[1]}
    names = {name for name, _ in more}
    ranges = [[one for one in settings if isinstance(one, int)] for name, settings in more if name == "arange"]
    starts = all(len(given) == 1 or (given[0] == 0 and given[2:] in ([], [1])) for given in ranges)
    adds = all(settings == (0,) for name, settings in more if name == "add")
    counted = ("sub", (1,)) in more if "cumsum" in names else names.isdisjoint({"mul", "sub"})
    if not (starts and adds and counted) or names - _NUMBERING:
        raise NotDivisible("it numbers tokens in a way of its own")


@contextlib.contextmanager
def _scaled(layer: nn.Module, scaled: Mapping[str, Sequence[str]], ranks: int) -> Iterator[None]:
    before = [
        (module, name, getattr(module, name))
        for path, names in scaled.items()
        for module in [layer.get_submodule(path)]
        for name in names
    ]
    try:
        for module, name, value in before:
            setattr(module, name, value * ranks)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class _Run(TorchDispatchMode):
    """One run of a layer; compares with `steps` where there are some."""

    def __init__(
        self,
        layer: nn.Module,
        parts: Mapping[str, DividedModule],
        *,
        ranks: int,
        steps: list[OperatorCall] | None,
        division: Division | None = None,
        sequence: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer, self.parts, self.ranks, self.steps = layer, parts, ranks, steps
        self.division, self.sequence = division, sequence
        self.done: list[OperatorCall] = []
        self.uses: dict[str, set[bool]] = {}
        self._states: dict[int, State] = {}
        self._kept: list[Any] = []  # identities must stay unique
        self._views: dict[int, list[torch.Tensor]] = {}
        self._paused = False
        self._running: list[str] = []
        """Modules whose forwards run."""
        self._tokens = 0
        """Tokens that the run has where tokens are divided: each rank has whole parameters, whose gradients are summed."""

    def forward(self, call: Call) -> Any:
        """Runs the layer on meta tensors; the output's first tensor must be as the input is."""
        args, kwargs = call
        meta = meta_tensors(self.layer)
        for name, _ in self.layer.named_parameters():
            self._note(meta[name], State(Flow.WEIGHT, roots=frozenset({name})))
        hidden = first_hidden(args, kwargs)
        if self.sequence and self.steps is not None:
            own = hidden.new_empty(hidden.shape[0], hidden.shape[1] // self.ranks, *hidden.shape[2:])
            self._note(own, State(Flow.SHARDED, dim=1))
        else:
            own = hidden.new_empty(hidden.shape)
            self._note(own, State(Flow.REPLICATED))
        args, kwargs = with_hidden(args, kwargs, own)
        with self._patched(), torch.no_grad():
            output = torch.func.functional_call(self.layer, meta, args, kwargs, tie_weights=False)
        self._check_outputs(output, own, hidden.shape)
        return output

    def on_tokens(self, forward: Callable[..., torch.Tensor], tokens: int) -> None:
        """Runs a model on tokens that are divided; so must be the result."""
        meta = meta_tensors(self.layer)
        for name, _ in self.layer.named_parameters():
            self._note(meta[name], State(Flow.WEIGHT, roots=frozenset({name})))
        given = [torch.empty(_ROWS, tokens, dtype=torch.int64, device="meta") for _ in range(2)]
        for x in given:
            self._note(x, State(Flow.SHARDED, dim=1))
        self._tokens = tokens
        with self, _Values(self), torch.no_grad():
            made = forward(meta, *given)
        if self.steps is not None and self._state(made) != State(Flow.SHARDED, 1):
            raise NotDivisible("its logits are not those of its tokens")

    def _check_outputs(self, output: Any, own: torch.Tensor, whole: torch.Size) -> None:
        found = first_output(output)
        if self.steps is None:
            return
        if found.shape != own.shape or self._states.get(id(found), State()).flow is not (
            Flow.SHARDED if self.sequence else Flow.REPLICATED
        ):
            raise NotDivisible("its output is not summed over the ranks")
        if not isinstance(output, torch.Tensor):
            for other in output[1:]:
                if isinstance(other, torch.Tensor) and self._state(other).flow in (Flow.PARTIAL, Flow.SHARDED):
                    raise NotDivisible("a second output of the layer is a part")

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Divided modules as single steps, boundaries as hooks."""
        boundaries = {} if self.division is None else self.division.boundaries
        with contextlib.ExitStack() as stack:
            for path, module in self.layer.named_modules():
                stack.callback(module.register_forward_pre_hook(self._begin(path)).remove)
                stack.callback(module.register_forward_hook(self._end).remove)
            for path, boundary in boundaries.items():
                module = self.layer.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(self._enter(boundary), with_kwargs=True).remove)
                if boundary is Boundary.WHOLE and self.sequence:
                    stack.callback(module.register_forward_hook(self._leave).remove)
            for path, part in self.parts.items():
                module = self.layer.get_submodule(path)
                module.forward = self._of_part(path, module, part)
                stack.callback(module.__dict__.pop, "forward")
            stack.enter_context(self)
            yield

    def _begin(self, path: str) -> Callable[..., None]:
        return lambda *_: self._running.append(path)

    def _end(self, *_: object) -> None:
        self._running.pop()

    # Boundaries

    def _enter(self, boundary: Boundary) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = first_hidden(args, kwargs)
            state = self._state(x)
            sharded = self.sequence and state.flow is Flow.SHARDED
            if boundary is Boundary.WHOLE and not self.sequence:
                return None
            if not sharded and state.flow is not Flow.REPLICATED:
                raise NotDivisible(f"what enters {type(module).__name__} is {state.flow.name}")
            if sharded and state.dim != x.dim() - 2:
                raise NotDivisible("tokens are not the last dimension but one")
            shape = list(x.shape)
            if sharded:
                shape[-2] *= self.ranks
            flow = Flow.REPLICATED if boundary is Boundary.WHOLE else Flow.PARTIAL
            return with_hidden(args, kwargs, self._made(shape, x, State(flow)))

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        found = first_output(output)
        if self._state(found).flow is not Flow.REPLICATED or found.dim() < 3:
            raise NotDivisible(f"what leaves {type(module).__name__} is {self._state(found).flow.name}")
        shape = list(found.shape)
        shape[-2] //= self.ranks
        return with_first_output(output, self._made(shape, found, State(Flow.SHARDED, dim=len(shape) - 2)))

    # Divided modules

    def _of_part(self, path: str, module: nn.Module, part: DividedModule) -> Any:
        def forward(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            if part.kind is Kind.EXPERTS:
                return self._experts(path, x, *rest, *named.values())
            return self._linear(path, module, part, x)

        return forward

    def _experts(self, path: str, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        for given in (x, *(one for one in rest if isinstance(one, torch.Tensor))):
            if self._state(given).flow not in (Flow.REPLICATED, Flow.CONSTANT):
                raise NotDivisible(f"the experts {path} are given {self._state(given).flow.name}")
        return self._done(path, x, list(x.shape), State(Flow.REPLICATED))

    def _linear(self, path: str, module: nn.Module, part: DividedModule, x: torch.Tensor) -> torch.Tensor:
        outputs, inputs = sizes(module)
        state = self._state(x)
        shape = [*x.shape[:-1], outputs]
        if self.steps is None:
            shape[-1] *= self.ranks if part.kind is Kind.COLUMN and not part.whole_outside else 1
            return self._done(path, x, shape, State())
        if part.kind is Kind.COLUMN:
            if state.dim is not None or state.flow is not Flow.PARTIAL:
                raise NotDivisible(f"{path} is given {state.flow.name}")
            if outputs % (self.ranks * part.pieces):
                raise NotDivisible(f"{self.ranks} ranks do not divide the {outputs} outputs of {path}")
            if part.whole_outside:
                return self._done(path, x, shape, State(Flow.REPLICATED))
            return self._done(path, x, shape, State(Flow.SHARDED, len(shape) - 1, part.pieces))
        if inputs % self.ranks or x.shape[-1] != inputs:
            raise NotDivisible(f"{self.ranks} ranks do not divide the {inputs} inputs of {path}")
        if part.whole_outside:
            if state.flow is not Flow.REPLICATED or state.dim is not None:
                raise NotDivisible(f"{path} is given {state.flow.name}")
        elif state.flow is not Flow.SHARDED or state.dim != x.dim() - 1 or state.pieces != 1:
            raise NotDivisible(f"{path} is given {state.flow.name}")
        if self.sequence and path in self._scattering:
            shape[-2] //= self.ranks
            return self._done(path, x, shape, State(Flow.SHARDED, len(shape) - 2))
        return self._done(path, x, shape, State(Flow.REPLICATED))

    @property
    def _scattering(self) -> set[str]:
        assert self.division is not None
        return scattering(self.division)

    def _done(self, name: str, x: torch.Tensor, shape: list[int], state: State) -> torch.Tensor:
        made = self._made(shape, x, state)
        self._compare(OperatorCall(name, (), (tuple(made.shape),), ()), skip_shapes=True)
        return made

    def _made(self, shape: Sequence[int], like: torch.Tensor, state: State) -> torch.Tensor:
        self._paused = True
        made = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
        self._paused = False
        self._note(made, state)
        return made

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._paused:
            return output
        given = tensors_of((args, kwargs))
        made = tensors_of(output)
        step = OperatorCall(
            str(func),
            tuple(tuple(x.shape) for x in given),
            tuple(tuple(x.shape) for x in made),
            _settings(args, kwargs),
        )
        whole = self._compare(step, skip_shapes=False)
        if whole is not None:
            self._follow(func, args, kwargs, given, made, step, whole)
        else:
            for x in made:
                self._note(x, State())
        return output

    def note_values(self, args: Any, kwargs: Any) -> None:
        """Compares the values that a tensor is made of."""
        step = OperatorCall("python.tensor", (), (), (repr(_settings(args, kwargs)),))
        whole = self._compare(step, skip_shapes=True)
        if whole is not None and whole.settings != step.settings:
            raise NotDivisible("a tensor is made of other numbers than on one rank")

    def _compare(self, step: OperatorCall, *, skip_shapes: bool) -> OperatorCall | None:
        self.done.append(step)
        if self.steps is None:
            return None
        index = len(self.done) - 1
        if index >= len(self.steps) or self.steps[index].name != step.name:
            raise NotDivisible(f"it takes another way than on one rank, at {step.name}")
        whole = self.steps[index]
        if not skip_shapes and (len(whole.outputs) != len(step.outputs) or len(whole.inputs) != len(step.inputs)):
            raise NotDivisible(f"it takes another way than on one rank, at {step.name}")
        return whole

    def _divided(self, own: Shape, whole: Shape, name: str) -> int | None:
        """The dimension in which a rank has its part."""
        if len(own) != len(whole):
            raise NotDivisible(f"{name} gives another number of dimensions")
        found = [dim for dim, (a, b) in enumerate(zip(own, whole, strict=True)) if a != b]
        if len(found) > 1 or any(own[dim] * self.ranks != whole[dim] for dim in found):
            raise NotDivisible(f"{name} gives {own}, and on one rank {whole}")
        if found and self._tokens and own[found[0]] % self._tokens:
            raise NotDivisible(f"{name} puts tokens together")
        if found and not self._tokens and own[found[0]] % self.ranks:
            raise NotDivisible(f"{self.ranks} ranks do not divide the {own[found[0]]} of a dimension at {name}")
        return found[0] if found else None

    def _follow(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        step: OperatorCall,
        whole: OperatorCall,
    ) -> None:
        name = str(func).removeprefix("aten.")
        states = [self._state(x) for x in given]
        dims = [self._divided(a, b, name) for a, b in zip(step.inputs, whole.inputs, strict=True)]
        out_dims = [self._divided(a, b, name) for a, b in zip(step.outputs, whole.outputs, strict=True)]
        for state, dim in zip(states, dims, strict=True):
            if state.dim != dim:
                raise NotDivisible(f"{name} is given a tensor divided otherwise than it was made")
        pieces = 1
        if any(dim is not None for dim in (*dims, *out_dims)):
            pieces = kept_pieces(func, args, kwargs, states, out_dims, step, whole)
        elif step.settings != whole.settings:
            raise NotDivisible(f"{name} has other numbers than on one rank")
        for x in given:
            for root in self._state(x).roots:
                self._require_owner(root)
        flow, roots = self._flow(name, states, dims, out_dims)
        for x, dim in zip(made, out_dims, strict=True):
            now = flow if x.is_floating_point() or x.is_complex() else Flow.CONSTANT
            if any(x is one for one in given):
                self._write(name, x, now)
            self._note(
                x, State(now, dim, pieces if dim is not None else 1, roots if now is Flow.WEIGHT else frozenset())
            )

    def _write(self, name: str, x: torch.Tensor, flow: Flow) -> None:
        """Gives all views of a tensor the flow of what is written into it."""
        for other in self._views.get(id(x if x._base is None else x._base), ()):
            before = self._state(other)
            flows = {before.flow, flow} - {Flow.CONSTANT}
            if (not flows <= {Flow.PARTIAL, Flow.SHARDED} and len(flows) > 1) or Flow.WEIGHT in flows:
                raise NotDivisible(f"{name} writes into a tensor with another gradient")
            self._states[id(other)] = dataclasses.replace(before, flow=max(flows, default=Flow.CONSTANT))

    def _require_owner(self, root: str) -> None:
        """Only in its module's forward is a parameter this rank's own tensor."""
        owner = root.rpartition(".")[0]
        if owner in self.parts or (owner not in self._running and not self._tokens):
            raise NotDivisible(f"{root} is used outside of its module")

    def _flow(
        self, name: str, states: Sequence[State], dims: Sequence[int | None], out_dims: Sequence[int | None]
    ) -> tuple[Flow, frozenset[str]]:
        flows = {state.flow for state in states} - {Flow.CONSTANT}
        roots = frozenset(root for state in states for root in state.roots)
        if name.startswith(("detach", "zeros", "ones", "full", "empty", "new_")):
            return Flow.CONSTANT, frozenset()
        if not flows:
            return Flow.CONSTANT, frozenset()
        if self._tokens and any(dim is not None for dim in (*dims, *out_dims)):
            return Flow.SHARDED, frozenset()
        if flows == {Flow.WEIGHT}:
            if any(dim is not None for dim in out_dims):
                raise NotDivisible(f"{name} divides a parameter")
            return Flow.WEIGHT, roots
        flows -= {Flow.WEIGHT}
        if Flow.REPLICATED in flows and len(flows) > 1:
            raise NotDivisible(f"{name} mixes what is whole with parts of ranks")
        divided = any(dim is not None for dim in (*dims, *out_dims))
        flow = max(flows)
        if flow is Flow.PARTIAL and divided:
            flow = Flow.SHARDED
        if flow is Flow.REPLICATED and divided:
            raise NotDivisible(f"{name} divides what is whole")
        for root in roots:
            self.uses.setdefault(root, set()).add(flow is not Flow.REPLICATED)
        return flow, frozenset()

    def _note(self, x: torch.Tensor, state: State) -> None:
        self._kept.append(x)
        self._views.setdefault(id(x if x._base is None else x._base), []).append(x)
        self._states[id(x)] = state

    def _state(self, x: torch.Tensor) -> State:
        return self._states.get(id(x), State())


class _Values(TorchFunctionMode):
    """Has a run note the values that tensors are made of."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_VALUES:
            self._run.note_values(args, kwargs or {})
        return func(*args, **(kwargs or {}))


def scattering(division: Division) -> set[str]:
    """Row-parallel modules that leave each rank its own tokens with sequence parallelism: outside of WHOLE modules."""
    inside = [path + "." for path, boundary in division.boundaries.items() if boundary is Boundary.WHOLE]
    return {
        path
        for path, part in division.parts.items()
        if part.kind is Kind.ROW and not any(path.startswith(one) for one in inside)
    }


def meta_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers without data, by all their names; a module of two names has the first one's.

    For functional_call with tie_weights=False, since with it torch leaves a module of two names without data.
    """
    made: dict[int, torch.Tensor] = {}
    return {
        f"{path}{'.' * bool(path)}{name}": made.setdefault(id(value), torch.empty_like(value, device="meta"))
        for path, one in module.named_modules()
        for name, value in itertools.chain(one._parameters.items(), one._buffers.items())
        if value is not None
    }


def is_linear(module: nn.Module) -> bool:
    """True for a linear map of torch or of GPT-2, and none that wraps one."""
    return type(module).__name__ in ("Linear", "Conv1D") and not any(True for _ in module.children())


def is_experts(module: nn.Module) -> bool:
    """True for fused experts of transformers: parameters (experts, ...) whose forward depends on data, token by token."""
    kind = type(module)
    known = kind.__name__.endswith("Experts") and kind.__module__.startswith("transformers.")
    return known and any(p.dim() == 3 for p in module.parameters(recurse=False))


def sizes(linear: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    outputs, inputs = linear.weight.shape  # type: ignore[misc]
    return (inputs, outputs) if type(linear).__name__ == "Conv1D" else (outputs, inputs)


def first_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states that a module is given."""
    found: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return found


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> Call:
    """Returns the arguments with other hidden states."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": hidden}
    return (hidden, *args[1:]), kwargs


def first_output(output: Any) -> torch.Tensor:
    """The first tensor that a module returns."""
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found


def with_first_output(output: Any, first: torch.Tensor) -> Any:
    """Returns what a module does, with another first tensor."""
    return first if isinstance(output, torch.Tensor) else (first, *output[1:])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [x for one in value for x in tensors_of(one)]
    return []


def _settings(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Arguments that are no tensors."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return None
        if isinstance(value, (tuple, list)):
            return tuple(map(plain, value))
        return value

    return (*map(plain, args), *((name, plain(value)) for name, value in kwargs.items()))
