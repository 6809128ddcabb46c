"""`memo.offload`: checks its arguments, finds the layers, and makes the Manager."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from memo.errors import UsageError
from memo.kernels import Codec
from memo.manager.arguments import (
    LayerLevels,
    Names,
    bans_by_layer,
    naming_arguments,
    require_choice,
    require_device_budget,
    require_kinds,
    require_manageable,
    settings_by_layer,
)
from memo.manager.disabled import DisabledManager, is_disabled
from memo.manager.manager import Manager
from memo.manager.opening import OffloadOptions, OnFull
from memo.manager.plan_source import own_part, read_plan
from memo.parallel import PipelineOrder
from memo.swap import Level, find_layers, setting_of
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed import ProcessGroup

    from memo.mip.activation import ActivationPlan

CodecName = Literal["int8", "fp8"]
CODECS = {"int8": Codec.INT8, "fp8": Codec.FP8}

_Path = str | os.PathLike[str]


@naming_arguments
def offload(
    model: nn.Module,
    *,
    plan: ActivationPlan | _Path | None = None,
    alpha: LayerLevels | None = None,
    levels: Mapping[int | str, LayerLevels] | None = None,
    keep: Names | None = None,
    repeat: Names | None = None,
    device: int | str | None = None,
    host: int | str = "auto",
    host_pool: _Path | None = None,
    disk: _Path | Sequence[_Path] | None = None,
    disk_budget: int | str | None = None,
    layers: nn.ModuleList | Sequence[nn.Module] | type[nn.Module] | None = None,
    min_bytes: int | str = "64KiB",
    codec: CodecName | None = None,
    on_full: OnFull = "spill",
    verify: bool = False,
    trace: _Path | None = None,
    trace_stacks: bool = False,
    group: ProcessGroup | None = None,
    schedule: Any = None,
) -> Manager:
    """Manages the activations that a model's repeated layers save for backward: keeps, moves or recomputes them.

    Gradients are bit-identical to the same model without memo: each recompute is tried in the forward, and compared with
    what autograd saved.

    Without `plan`, `alpha` and `levels`, the first two steps recompute everything but attention and offload the rest,
    and the second one is measured. A solver then makes the plan with the shortest step that fits the budgets, and later
    steps run by it; another batch shape is planned from the same measurements. Where everything fits, nothing is moved
    or recomputed.

    Args:
        model: Module with repeated layers, on a CPU or a CUDA GPU; where it is still on the meta device, its first forward
            decides. It has hooks only inside `with manager:`, or while the manager is attached.
        plan: Activation plan, or the path of its JSON file, for all steps. Default None: no given plan. Excludes
            `alpha` and `levels`. A plan for several pipeline stages needs `schedule`, which says which stage is here.
        alpha: Fraction of the bytes that can be recomputed, 0 to 1, that is moved at most. The rest is recomputed in
            backward by replaying the operators that take least time for it. Layer inputs and attention outputs are
            always moved. 1.0 moves everything. Three fractions that sum to 1 are of the levels SAVE_ALL (move everything),
            SAVE_MATMULS (move matrix products, recompute element-wise work) and SAVE_ATTENTION (recompute all but
            attention): at most the bytes of that mix are moved. Default None: planned, or 1.0 where `levels` is given.
        levels: Levels of single layers, by position or name; each value is a fraction or fractions as for `alpha`, or a
            Level. `Level.SAVE_INPUT` moves the least, and recomputes attention too. Default None.
            `Manager.choose_levels` changes them between steps.
        keep: Names of operators whose results are never recomputed, such as "aten.mm" or "mm", or of groups: "attention",
            "matmul", "collective", "scan", "sort", "scatter". A list for all layers, or a dict from layers, by position or
            name, to lists. Default None: the level decides.
        repeat: Names, as for `keep`, of operators that may be recomputed although the level keeps their results. Random
            operators, and what memo cannot see, are kept all the same. Default None.
        device: Bytes of device memory for all of training, parameters included: an int, or text such as "80GiB". Plans
            keep within it; with a fixed `alpha` it limits how far reloads run ahead of backward. Default None: 94 % of
            the GPU's memory, which is also the most, or on a CPU what the process uses and 80 % of the free host memory.
        host: Bytes of host memory for activations on this node, shared by its ranks: an int, text such as "64GiB", or
            "auto". Default "auto": 70 % of the free memory for a model on a GPU, less what parameters on the host
            (FSDP's CPU offload) still need for gradients and AdamW's state; 0 for a model on the CPU, where host
            memory is the device. 0 turns the tier off. With a process group this is a collective call of all ranks.
        host_pool: File on this node, such as "/dev/shm/memo-host". `host` is then the budget of all jobs that name the same
            file, together: each takes host memory as it needs it, finds the tier full where the others leave none, and
            frees its part when it ends, killed or not. Default None: jobs know nothing of each other.
        disk: Directory for an anonymous scratch file, or a list of directories that share the load. Default None: the
            system's temporary directory for a model on the CPU without `host`, no disk otherwise.
        disk_budget: Bytes of disk on this node, shared by its ranks, as `host`. Default None: what the file systems
            have free, reserved as needed.
        layers: The repeated layers: a ModuleList, a list of modules, or their class. Default None: found automatically.
        min_bytes: Smallest storage that is moved, in bytes; smaller ones stay on the device. Default "64KiB".
        codec: Format of what moves: "int8" or "fp8", one byte a value and a scale for each 128. Gradients are then those of
            values with a bounded error, and the report shows the largest. Exact all the same: tensors of other types than
            float32, bfloat16 and float16, those with at most 1/8 of the values of the layer's hidden states, any
            with a NaN or an infinity, and those of layers of which anything is recomputed. Default None: everything moves
            bit for bit.
        on_full: Response to a full tier. "spill" (default) uses the next tier, and raises where none has room; "raise"
            raises at once; "recompute" uses the next tier, recomputes all of a layer that can be recomputed, attention too,
            where none has room for its tensors, and raises where none has room for its input. Without `plan`, `alpha` and
            `levels` none of it applies: a tensor that no tier has room for stays on the device or is recomputed.
        verify: True stores a checksum with each block on disk and compares it when the block is read. It also sums the bytes
            that recomputes read, parameters among them, in forward and again in backward, and those of each storage as it is
            copied out and as it is saved again; and it tries each recompute in each forward. So it finds changes that no
            version counter shows, at the cost of reading them twice more and of another recompute. Default False.
        trace: File, or directory for `trace.rank{N}.jsonl`; a name that ends in a slash is a directory, made if
            missing. The links are measured first, for a fraction of a second. Default None: no trace.
        trace_stacks: True writes to the trace the Python lines that saved each tensor, which costs some 10 µs a tensor.
            Default False.
        group: Ranks that communicate within the model's layers (tensor or context parallelism). Without `plan`, `alpha`
            and `levels` they agree on one plan, made for the slowest rank with the least room, and on the step at which
            it changes; they must run the same forwards. Default None: the group that `memo.parallelize` set, else none.
        schedule: Torch's pipeline schedule that runs the model. It gives, from the first step on, the number of
            microbatches in flight on this rank and the order of their backwards. Default None: no pipeline.

    Returns:
        A Manager, to be entered around each forward or attached to the model. `Manager.close` releases its memory and files.
        With MEMO_DISABLE=1 in the environment it does nothing, and its report says so.

    Raises:
        UsageError: An argument is invalid, or arguments exclude each other.
        NoRepeatedLayers: The model has no repeated layers, and `layers` names none.
        PlanError: `plan` cannot be read, breaks a rule, or does not fit the model or the schedule.
        HostPoolUnusable: The file of `host_pool` cannot be opened for writing or locked.
        ScratchUnusable, ScratchFull: The scratch directory cannot be used, or has no room for `disk_budget`.
        TraceError: The trace cannot be written.

    After any of them the model is unmodified, and no activations are managed.

    A forward inside `with manager:` raises:
        HostBudgetExceeded, ScratchFull: No tier has room (see `on_full`); only with `plan`, `alpha` or `levels`.
        StoreWriteError: A write to disk failed, and no other directory or tier takes the bytes.
        SwapError: The system refuses host memory within the budget.
        ModifiedAfterSave: With `verify`, a storage is saved again with other bytes, and nothing counted the change.
        After any of them what earlier forwards saved is still restored, and the manager can be entered again.

    A backward raises:
        ModifiedAfterSave: A tensor that it needs was modified in place after it was saved; with `verify` also where nothing
            counted it.
        StoreReadError: A read from disk failed; CorruptBlock, with `verify`: its checksum differs.
        SwapError: The manager is closed, a copy failed, or a recompute did something else than its forward.
        After any of them the gradients are incomplete: discard them, and run the forward again. Weights are unchanged.

    Example:
        manager = memo.offload(model, host="64GiB")
        for batch in data:
            with manager:
                loss = model(**batch).loss
            loss.backward()

        memo.offload(model, host="64GiB").attach()  # in a loop that is not one's own
        trainer.train()
    """
    require_kinds(
        model,
        plan=plan,
        levels=levels,
        layers=layers,
        host_pool=host_pool,
        disk=disk,
        trace=trace,
        group=group,
        schedule=schedule,
    )
    if is_disabled():
        return DisabledManager(model)
    if plan is not None and (alpha is not None or levels is not None):
        raise UsageError("plan: it excludes alpha and levels; give one of the three")
    require_choice("on_full", on_full, get_args(OnFull))
    require_choice("verify", verify, (True, False))
    require_device_budget(device)
    if codec is not None:
        require_choice("codec", codec, get_args(CodecName))
    fixed = None if plan is None else read_plan(plan)
    found = find_layers(require_manageable(model), layers)
    order = None if schedule is None else PipelineOrder.of(schedule, [layer.module for layer in found])
    setting, single = setting_of(1.0 if alpha is None else alpha), settings_by_layer(found, levels or {})
    automatic = fixed is None and alpha is None and levels is None
    own = [single.get(layer.name, setting) for layer in found]
    if codec is not None and fixed is None and not automatic and Level.SAVE_ALL not in own:
        raise UsageError(
            "codec: nothing would be coded, since what a layer is recomputed from moves as it is; give alpha=1, or no codec"
        )
    opening = OffloadOptions(
        model=model,
        layers=found,
        plan=None if fixed is None else own_part(fixed, order),
        plan_name=os.fspath(plan) if isinstance(plan, str | os.PathLike) else "the plan",
        automatic=automatic,
        setting=setting,
        levels=single,
        bans=bans_by_layer(found, keep, repeat),
        device_bytes=None if device is None else parse_bytes(device, what="device"),
        host=host,
        host_pool=host_pool,
        disk=disk,
        disk_budget=disk_budget,
        min_bytes=parse_bytes(min_bytes, what="min_bytes", bare=True),
        codec=None if codec is None else CODECS[codec],
        on_full=on_full,
        verify=verify,
        trace=trace,
        trace_stacks=trace_stacks,
        group=group,
        order=order,
    )
    return Manager(model, found, opening=opening)
