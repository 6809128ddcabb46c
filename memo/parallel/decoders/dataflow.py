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

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memo.parallel.decoders.division import Boundary, DividedModule, Division, Kind, is_experts, scattering, sizes
from memo.parallel.decoders.operator_run import WITHOUT_GRADIENT, OperatorRun
from memo.parallel.decoders.operators import Flow, NotDivisible, OperatorCall, State

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module."""


def run_wide(
    layer: nn.Module,
    call: Call,
    parts: Mapping[str, DividedModule],
    scaled: Mapping[str, Sequence[str]],
    *,
    ranks: int,
) -> list[OperatorCall]:
    """The operators of the layer with `ranks` times the heads and columns, in which modules of `parts` count as one."""
    run = _LayerRun(layer, parts, ranks=ranks, steps=None)
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
    run = _LayerRun(layer, division.parts, ranks=ranks, steps=steps, division=division, sequence=sequence)
    try:
        run.forward(call)
    except NotDivisible as error:
        error.reached = len(run.done)
        raise
    run.check_end()
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


class _LayerRun(OperatorRun):
    """One run of a layer, in which modules of `parts` count as one operator."""

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
        super().__init__(layer, ranks=ranks, steps=steps)
        self.parts, self.division, self.sequence = parts, division, sequence
        self.uses: dict[str, set[bool]] = {}
        self._running: list[str] = []
        """Modules whose forwards run."""

    def forward(self, call: Call) -> None:
        """Runs the layer on meta tensors; the output's first tensor must be as the input is."""
        args, kwargs = call
        meta = self._weights()
        hidden = first_hidden(args, kwargs)
        if self.sequence and self.steps is not None:
            own = hidden.new_empty(hidden.shape[0], hidden.shape[1] // self.ranks, *hidden.shape[2:])
            self._note(own, State(Flow.SHARDED, dim=1))
        else:
            own = hidden.new_empty(hidden.shape)
            self._note(own, State(Flow.REPLICATED))
        args, kwargs = with_hidden(args, kwargs, own)
        with self._patched(), torch.no_grad():
            output = torch.func.functional_call(self.model, meta, args, kwargs, tie_weights=False)
        self._check_outputs(output, own)

    def _check_outputs(self, output: Any, own: torch.Tensor) -> None:
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
            for path, module in self.model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._begin(path)).remove)
                stack.callback(module.register_forward_hook(self._end).remove)
            for path, boundary in boundaries.items():
                module = self.model.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(self._enter(boundary), with_kwargs=True).remove)
                if boundary is Boundary.WHOLE and self.sequence:
                    stack.callback(module.register_forward_hook(self._leave).remove)
            for path, part in self.parts.items():
                module = self.model.get_submodule(path)
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

    def _check_part(self, size: int, name: str) -> None:
        if size % self.ranks:
            raise NotDivisible(f"{self.ranks} ranks do not divide the {size} of a dimension at {name}")

    def _require_owner(self, root: str) -> None:
        """Only in its module's forward is a parameter this rank's own tensor."""
        owner = root.rpartition(".")[0]
        if owner in self.parts or owner not in self._running:
            raise NotDivisible(f"{root} is used outside of its module")

    def _flow(
        self, name: str, states: Sequence[State], dims: Sequence[int | None], out_dims: Sequence[int | None]
    ) -> tuple[Flow, frozenset[str]]:
        flows = {state.flow for state in states} - {Flow.CONSTANT}
        roots = frozenset(root for state in states for root in state.roots)
        for root in roots:
            self._require_owner(root)
        if not flows or name.startswith(WITHOUT_GRADIENT):
            return Flow.CONSTANT, frozenset()
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
