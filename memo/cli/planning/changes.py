"""Changes where no plan fits: the largest item of a GPU's memory, and the cheapest changes that make a plan fit.

Each change is tried: it is named only if the planner finds a plan with it, everything else as asked for.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memo.cli.planning.search import gpu_counts
from memo.cli.tables.activation import memory_summary, memory_table, use_name
from memo.errors import UsageError
from memo.mip.activation import fits
from memo.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from memo.mip.activation import DeviceMemory, DoesNotFit
    from memo.search import Request

__all__ = ["changes_that_fit", "explain_misfit"]

MOST_TIMES = 64
"""Times as many GPUs, or parts of the sequence, that are tried."""


def explain_misfit(request: Request, misfit: DoesNotFit, changes: list[str], *, as_json: bool) -> DoesNotFit:
    """Prints a GPU's memory under the plan that lacks least, and returns the error that says what to change.

    Args:
        request: the request.
        misfit: what planning it raised.
        changes: flags that each make a plan fit.
        as_json: print one object instead of the table.
    """
    error = misfit.with_message(_message(request, misfit, changes))
    if as_json:
        memory = memory_summary(misfit.problem, misfit.memory)
        found = {"status": "infeasible", "message": str(error), "memory": memory, "fits": changes}
        print(json.dumps({**found, "least_budgets_bytes": misfit.least_bytes}))
    else:
        print(f"{memory_table(misfit.problem, misfit.memory)}\n")
    return error


def changes_that_fit(request: Request, misfit: DoesNotFit) -> list[str]:
    """Flags that each make a plan fit by itself, the one that asks for least first; the smallest value of each.

    Of changes that take more GPUs each is named that takes fewer than those before it.
    """
    found: list[str] = []
    now, fewest = request.layout.gpus, math.inf
    for options in _changes(request):
        for flag, changed in options:
            gpus = changed.layout.gpus
            if gpus > now and gpus >= fewest:
                break
            if _fits(changed):
                found.append(flag)
                fewest = min(fewest, gpus) if gpus > now else fewest
                break
    for tier, there in (("device", request.machine.device_bytes), ("host", request.machine.host_bytes)):
        least = misfit.least_bytes.get(tier)
        if least is not None and least <= there:
            found.append(f"--{tier} {format_bytes(least, up=True).replace(' ', '')}")
    return found


def _changes(request: Request) -> Iterator[Iterator[tuple[str, Request]]]:
    """Changes of a named model's request: of each kind ever larger ones, as flags and the request with them."""
    if request.config is None:
        return
    without_logits = request.without_logits()
    if without_logits is not None:
        yield iter([("--loss without-logits", without_logits)])
    if not request.optimizer_offload:
        yield iter([("--optimizer-offload", dataclasses.replace(request, optimizer_offload=True))])
    if request.zero < 3 and request.layout.replicas > 1:
        yield iter([("--zero 3", dataclasses.replace(request, zero=3))])
    yield _more_gpus(request)
    yield _more_ranks(request, "tp")
    yield _more_ranks(request, "cp")
    yield _shorter(request)
    if without_logits is not None:
        for options in (_more_gpus(without_logits), _more_ranks(without_logits, "cp"), _shorter(without_logits)):
            yield ((f"--loss without-logits {flag}", changed) for flag, changed in options)


def _more_gpus(request: Request) -> Iterator[tuple[str, Request]]:
    zero = "" if request.zero == 3 else " --zero 3"
    layout = request.layout
    for gpus in gpu_counts(layout.tp * layout.cp * layout.pp * layout.ep, request.machine.gpus_per_node):
        if not layout.gpus < gpus <= MOST_TIMES * layout.gpus:
            continue
        more = _on(request, gpus=gpus)
        yield f"--gpus {more.layout.gpus}{zero}", dataclasses.replace(more, zero=3)


def _more_ranks(request: Request, name: str) -> Iterator[tuple[str, Request]]:
    """More ranks of tensor or context parallelism within a node, on as many more GPUs as that takes."""
    ranks, layout = getattr(request.layout, name), request.layout
    for times in _powers(request.machine.gpus_per_node // (layout.tp * layout.cp)):
        gpus = layout.gpus if layout.replicas % (times * layout.ep) == 0 else times * layout.gpus
        flag = f"--{name} {times * ranks}" if gpus == layout.gpus else f"--gpus {gpus} --{name} {times * ranks}"
        yield flag, _on(request, gpus=gpus, **{name: times * ranks})


def _shorter(request: Request) -> Iterator[tuple[str, Request]]:
    for times in _powers(MOST_TIMES):
        tokens = request.layout.tokens // times
        if tokens * times == request.layout.tokens:
            yield f"--seq {format_tokens(tokens)}", _on(request, tokens=tokens)


def _powers(most: int) -> Iterator[int]:
    times = 2
    while times <= most:
        yield times
        times *= 2


def _on(request: Request, **layout: Any) -> Request:
    """The request with another layout."""
    other = dataclasses.replace(request.layout, **layout)
    ranks = min(other.gpus, request.machine.gpus_per_node)
    return dataclasses.replace(
        request, layout=other, budgets=dataclasses.replace(request.budgets, ranks_per_node=ranks)
    )


def _fits(request: Request) -> bool:
    """Whether a plan with the most MLP tiles, which needs least memory, fits."""
    try:
        return fits(request.problem(request.tiles[-1]))
    except UsageError:  # the layout does not divide the model
        return False


def _message(request: Request, misfit: DoesNotFit, changes: list[str]) -> str:
    signature, memory = misfit.problem.profile.signature, misfit.memory
    words = f"no plan fits: {signature.model} in {signature.dtype} at {format_tokens(signature.tokens)} tokens: "
    words += _largest(memory, misfit.problem.budgets.device_bytes)
    if changes:
        words += f"; it fits with {' or '.join(changes)}"
    elif request.config is not None:
        words += (
            f"; up to {MOST_TIMES} times the GPUs, tensor and context parallelism and a shorter sequence do not fit"
        )
    return f"{words}; the smallest device budget that fits is {format_bytes(misfit.least_bytes['device'], up=True)}"


def _largest(memory: DeviceMemory, budget: int) -> str:
    """The largest item of a GPU's memory against its budget."""
    static, given = memory.static_bytes, f"{format_bytes(budget, down=True)}"
    if static > budget:
        states = f"weights, gradients and optimizer state take {format_bytes(static)} before any activation"
        return f"{states}, and a GPU's budget is {given}"
    instant = f"at {memory.where}" + (f", {memory.phase}" if memory.phase else "")
    use = max(memory.uses, key=lambda use: memory.uses[use])
    largest, nbytes = use_name(use), memory.uses[use]
    if static > nbytes:
        largest, nbytes = "weights, gradients and optimizer state", static
    needed = format_bytes(memory.nbytes, up=True)
    return f"{needed} are needed {instant}, {format_bytes(nbytes)} of them for {largest}, and a GPU's budget is {given}"
