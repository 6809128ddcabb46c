"""Calls of a model's layers, found in a forward on the meta device: their arguments, and what connects them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from memo.errors import UsageError, one_line
from memo.parallel.decoders.dataflow import Call, first_hidden, first_output, with_hidden
from memo.parallel.decoders.division import is_experts
from memo.parallel.decoders.operator_run import meta_tensors, tensors_of
from memo.torch_private import TorchDispatchMode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """A call of a layer in a forward."""

    layer: nn.Module
    call: Call
    takes_previous_output: bool
    """Its hidden states are what the layer before gave, unchanged."""
    returns_tuple: bool

    @property
    def hidden(self) -> tuple[torch.Size, torch.dtype]:
        """Sizes behind rows and tokens, and the type, of the hidden states."""
        given = first_hidden(*self.call)
        return given.shape[2:], given.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutsideCall:
    """A call of a module with parameters that is in no layer and has none."""

    module: nn.Module
    layers_before: int
    """Calls of layers before it."""
    input_shape: torch.Size
    output_shape: torch.Size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCalls:
    """Calls of a forward in their order; none of one that was not looked at."""

    layers: list[LayerCall] = dataclasses.field(default_factory=list)
    outside: list[OutsideCall] = dataclasses.field(default_factory=list)
    shares_hidden: bool = False
    """Hidden states that a layer passes to the next one are used elsewhere, too."""
    draws: bool = False
    """Random numbers are drawn, as dropout does."""
    own_backward: str = ""
    """Name of an autograd function of Python's, which says itself what its gradients are; empty without one."""
    tokens: int = 1
    flops: dict[nn.Module, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """FLOPs of each module: of products with weights, and of attention's scores."""

    def cost(self, module: nn.Module, tokens: int) -> float:
        """FLOPs of a module's forward on a sequence of tokens, of which each attends to those before it."""
        times, (products, scores) = tokens / self.tokens, self.flops.get(module, (0, 0))
        return products * times + scores * times**2 / 2


class _Uses(TorchFunctionMode):
    """Notes the tensors that operations outside of layers differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: list[tuple[Any, Any]] = []
        """Arguments of the layer that runs."""
        self.read: dict[int, torch.Tensor] = {}
        """Tensors by their identity, which stays theirs while they are held."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self.layer and any(x.requires_grad for x in tensors_of(output)):
            self.read |= {id(x): x for x in tensors_of((args, kwargs))}
        return output


class _Draws(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def calls_of(model: nn.Module, layers: Sequence[nn.Module], *, tokens: int) -> ForwardCalls:
    """Runs the model on one sequence of tokens, without data or memory.

    Args:
        model: of transformers, in training mode; nothing of it changes.
        layers: modules whose calls are wanted.
        tokens: of the sequence.

    Raises:
        UsageError: it does not run without data, or a layer is given a tensor with a gradient beside its hidden states.
    """
    meta = meta_tensors(model)
    for name, parameter in model.named_parameters():
        meta[name].requires_grad_(parameter.is_floating_point())
    found: list[LayerCall] = []
    uses = _Uses()
    draws = _Draws()  # type: ignore[no-untyped-call]
    given = uses.layer
    results: list[Any] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append((args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        call = given.pop()
        hidden = first_hidden(*call)
        others = tensors_of(with_hidden(*call, None))
        if any(x.requires_grad and x is not hidden for x in others):
            raise UsageError(f"{type(module).__name__} is given more than hidden states with a gradient")
        found.append(
            LayerCall(
                layer=module,
                call=call,
                takes_previous_output=bool(results) and hidden is results[-1],
                returns_tuple=not isinstance(output, torch.Tensor),
            )
        )
        results.append(first_output(output))

    outside: list[OutsideCall] = []

    def after_outside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x, y = tensors_of((args, kwargs))[:1], tensors_of(output)[:1]
        if x and y:
            outside.append(
                OutsideCall(module=module, layers_before=len(found), input_shape=x[0].shape, output_shape=y[0].shape)
            )

    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    accepted = inspect.signature(model.forward).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
    # Without a mask models look at the tokens.
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    batch = {name: value for name, value in batch.items() if takes_any or name in accepted}
    pairs: dict[nn.Module, int] = {}

    def before_experts(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors_of((args, kwargs))
        pairs[module] = next((x.numel() for x in given if not x.is_floating_point()), given[0].shape[0])

    names = {module: f"{type(model).__name__}.{name}" for name, module in model.named_modules()}
    counter = FlopCounterMode(display=False)
    with tracing(model), counter, contextlib.ExitStack() as stack, uses, draws:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(after).remove)
        for module in filter(is_experts, model.modules()):
            stack.callback(module.register_forward_pre_hook(before_experts, with_kwargs=True).remove)
        for module in outside_modules(model, layers):
            stack.callback(module.register_forward_hook(after_outside, with_kwargs=True).remove)
        try:
            output = torch.func.functional_call(model, meta, (), batch, tie_weights=False)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{type(model).__name__} does not run without data, which memo divides it by: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error
    passed = zip(results, found[1:], strict=False)
    shares = any(following.takes_previous_output and id(x) in uses.read for x, following in passed)
    counts = counter.get_flop_counts()
    flops = {m: _flops(m, counts[key], pairs) for m, key in names.items() if key in counts}
    return ForwardCalls(
        layers=found,
        outside=outside,
        shares_hidden=shares,
        draws=draws.found,
        own_backward=_own_backward(output),
        tokens=tokens,
        flops=flops,
    )


def _own_backward(output: Any) -> str:
    """Name of a function of Python's in the graph of a forward; activation checkpointing is none, since it recomputes."""
    nodes = [x.grad_fn for x in tensors_of(output) if x.grad_fn is not None]
    seen: set[Any] = set()
    while nodes:
        node: Any = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        name = str(node.name()).removesuffix("Backward")
        if issubclass(type(node), BackwardCFunction) and name != "CheckpointFunction":
            return name
        nodes += [following for following, _ in node.next_functions if following is not None]
    return ""


def _flops(module: nn.Module, counts: Mapping[Any, int], pairs: Mapping[nn.Module, int]) -> tuple[int, int]:
    """FLOPs of products with weights, with those of experts, which a run without data leaves out; and of scores."""
    scores = sum(count for operator, count in counts.items() if str(operator) in ("aten.bmm", "aten.baddbmm"))
    products = sum(counts.values()) - scores
    for experts in set(module.modules()) & pairs.keys():
        products += sum(2 * pairs[experts] * p.numel() // p.shape[0] for p in experts.parameters() if p.dim() == 3)
    return products, scores


def outside_modules(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Outermost modules with parameters that are in no layer and hold none."""
    known, found = set(layers), []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child in known or next(child.parameters(), None) is None:
                continue
            if known.isdisjoint(child.modules()):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def tracing(model: nn.Module, *, attention: str = "eager") -> Iterator[None]:
    """Training mode, attention that is written out or of another name, and experts without data, for the duration."""
    modes = {module: module.training for module in model.modules()}
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    configs = {key: c for key, c in configs.items() if hasattr(c, "_attn_implementation")}
    kept = {key: c._attn_implementation for key, c in configs.items()}
    experts = [module for module in model.modules() if is_experts(module)]
    try:
        model.train()
        for config in configs.values():
            config._attn_implementation = attention
        for module in experts:
            module.forward = _as_given
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for key, config in configs.items():
            config._attn_implementation = kept[key]
        for module in experts:
            module.__dict__.pop("forward", None)


def _as_given(hidden: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    return hidden.clone()
