"""Private names of torch, all that memo uses: what for, since when, and what torch has in public.

Owns the only place where they stand. A name without its underscores is imported from here, and is torch's own object:

    from memo.torch_private import current_graph_task_id

Each is looked up once, on first use, so that importing this module imports no torch. Where torch has it not, that is an
`ImportError` that says so; None where the row says what is lost. Attributes of torch's objects are read where the objects
are; ATTRIBUTES has their rows. In neither are operators (`torch.ops.aten._softmax`), which the dispatcher lists, and
`Tensor._version` and `Tensor._base`, which torch's own notes use.
"""

from __future__ import annotations

import importlib
import logging
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch._ops import (
        HigherOrderOperator as HigherOrderOperator,
        OpOverload as OpOverload,
        OpOverloadPacket as OpOverloadPacket,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

__all__ = ["AOT_AUTOGRAD", "ATTRIBUTES", "DYNAMO", "NAMES", "Use", "found", "place"]

_OLDEST = "2.11, the oldest that memo takes"
_AFTER_OLDEST = "2.13; 2.11 has it not"
_log = logging.getLogger("memo")


class Use(NamedTuple):
    """What memo uses a private name for."""

    what: str
    public: str = ""
    """What torch has in public, and why memo does not use it; empty: nothing."""
    since: str = _OLDEST
    lost: str = ""
    """For a name that some torch lacks: what memo then does without. Empty: memo needs it."""
    build: str = ""
    """`cuda`: of builds for CUDA alone."""


_KEPT = "a replay runs under its forward's value of it"
_FLAG = "of torch.backends, for each setting another; some warn, and some refuse to tell"
_STORED = "torch.autograd.graph.saved_tensors_hooks: a context, whose hooks must be the topmost when it ends"
_LOST = "a replay does not put this setting back"
_BUFFERS = "what stages of one rank pass on is held a step long"

_C = {
    "DispatchKey": Use("keys that a replayed operator's kernel must see as in its forward"),
    "DisableTorchFunctionSubclass": Use("reads deferred logits' shape", "of torch's notes on extending it, in torch._C"),
    "_DisableTorchDispatch": Use("the engine's own operators pass the recorder by, eight times faster than off the stack"),
    "_ForceDispatchKeyGuard": Use("calls a kernel under the keys of its forward"),
    "_RestorePythonTLSSnapshot": Use("tells those keys as the caller of the dispatch mode has them"),
    "_TorchDispatchModeKey": Use("tells modes that trace from those that run: FAKE, PROXY"),
    "_accelerator_setAllocatorSettings": Use("expandable segments", "PYTORCH_ALLOC_CONF: before the program starts"),
    "_autograd._get_sequence_nr": Use("tells whether autograd made a node between two saved tensors"),
    "_autograd._pop_saved_tensors_default_hooks": Use("takes hooks off from below others", _STORED),
    "_autograd._push_saved_tensors_default_hooks": Use("sets hooks", _STORED),
    "_autograd._saved_tensors_hooks_disable": Use(
        "replaced: hooks stand aside in torch.func", "torch.autograd.graph.disable_saved_tensors_hooks: calls this"
    ),
    "_autograd._saved_tensors_hooks_enable": Use("replaced, as the one above"),
    "_autograd._saved_tensors_hooks_get_disabled_error_message": Use("tells whether hooks are forbidden"),
    "_autograd._top_saved_tensors_default_hooks": Use("tells whose hooks are the topmost"),
    "_cuda_getCurrentRawStream": Use(
        "the stream, per tensor", "torch.cuda.current_stream().cuda_stream: makes an object", build="cuda"
    ),
    "_cuda_isCurrentStreamCapturing": Use(
        "capture of a CUDA graph, per copy", "torch.cuda.is_current_stream_capturing: asks the build each time"
    ),
    "_current_graph_task_id": Use("tells whether this thread runs a backward"),
    "_disabled_torch_dispatch_impl": Use("tells subclasses of tensors that leave operators to torch"),
    "_dispatch_has_kernel_for_dispatch_key": Use("tells operators that autograd has a formula for"),
    "_dispatch_tls_is_dispatch_key_excluded": Use("tells whether aliases share their version counter"),
    "_dispatch_tls_local_exclude_set": Use("keys that are hidden on this thread, to hide the same in a kernel"),
    "_dispatch_tls_local_include_set": Use("keys that are added on this thread, as above"),
    "_dispatch_tls_set_dispatch_key_excluded": Use("makes aliases below autograd share their version counter"),
    "_dynamo.eval_frame._FrameAction": Use("keeps hooks of ours out of Dynamo", "torch.compiler.disable: imports Dynamo"),
    "_dynamo.eval_frame._FrameExecStrategy": Use("as above", "as above"),
    "_dynamo.eval_frame.set_code_exec_strategy": Use("as above", "as above"),
    "_functorch.TransformType": Use("tells transforms of torch.func that leave hooks alone"),
    "_functorch.get_interpreter_stack": Use("the transforms of torch.func that run"),
    "_functorch.peek_interpreter_stack": Use("tells whether one runs"),
    "_get_deterministic_algorithms": Use(_KEPT, "torch.are_deterministic_algorithms_enabled: the same"),
    "_get_deterministic_algorithms_warn_only": Use(
        _KEPT, "torch.is_deterministic_algorithms_warn_only_enabled: the same"
    ),
    "_set_deterministic_algorithms": Use(_KEPT, "torch.use_deterministic_algorithms: sets the compiler's, too"),
    "_get_dispatch_mode": Use("tells whether what runs is traced, per operator"),
    "_get_dispatch_stack_at": Use("finds a mode of ours below others"),
    "_get_fp32_precision_getter": Use(_KEPT, "torch.backends.cuda.matmul.fp32_precision, ...: one each"),
    "_set_fp32_precision_setter": Use(_KEPT, "as above"),
    "_get_tracing_state": Use("torch.jit.trace runs", "torch.jit.is_tracing: the same, and more calls"),
    "_len_torch_dispatch_stack": Use("number of dispatch modes, per operator"),
    "_nn._parse_to": Use("reads the arguments of `.to()` as torch does"),
} | {
    f"_{does}_{name}": Use(_KEPT, _FLAG, lost=_LOST)
    for name in (
        "cpu_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation", "cublas_allow_fp16_reduced_precision_reduction", "cudnn_allow_tf32",
        "cudnn_benchmark", "cudnn_deterministic", "cudnn_enabled", "float32_matmul_precision", "mkldnn_deterministic",
        "mkldnn_enabled",
    )
    for does in ("get", "set")
}  # fmt: skip

_BY_MODULE: dict[str, dict[str, Use]] = {
    "torch": {
        "_fused_sdp_choice": Use(
            "the kernel of attention that torch would choose", "torch.backends.cuda.can_use_*: CUDA's alone"
        ),
        "Tensor._make_wrapper_subclass": Use(
            "deferred logits: a tensor without elements", "of torch's notes, by this name"
        ),
    },
    "torch._C": _C,
    "torch._C._distributed_c10d": {"FakeWork": Use("result of a collective in a run without bytes")},
    "torch._compile": {
        "_disable_dynamo": Use("keeps a hook of optimizers' out", "torch.compiler.disable: imports Dynamo")
    },
    "torch._ops": {
        "HigherOrderOperator": Use("tells operators that take functions"),
        "OpOverload": Use("what a dispatch mode is given"),
        "OpOverloadPacket": Use("tells names of operators"),
    },
    "torch._subclasses.fake_tensor": {
        "DataDependentOutputException": Use("names the operator that a run without bytes stops at"),
        "DynamicOutputShapeException": Use("as above"),
        "FakeTensor": Use("shapes of results, without computing them", "torch.device('meta'): loses devices"),
        "FakeTensorMode": Use("as above", "as above"),
        "UnsupportedOperatorException": Use("names the operator that a run without bytes stops at"),
    },
    "torch.autograd": {
        "_engine_run_backward": Use(
            "replaced: a backward's errors for want of memory are explained",
            lost="errors for want of memory in a backward go unexplained",
        ),
        "Variable._execution_engine": Use("calls a function when the backward that runs has ended"),
    },
    "torch.cuda.memory": {
        "_snapshot": Use("tells the allocator's settings", "torch.cuda.memory_snapshot: segments, without settings")
    },
    "torch.distributed.distributed_c10d": {
        "_resolve_process_group": Use("group of a functional collective, by its name")
    },
    "torch.distributed.fsdp._fully_shard": {
        "_fsdp_param": Use("its functions that free and allocate are replaced in a run without bytes"),
        "_fsdp_param_group": Use("as above"),
    },
    "torch.distributed.pipelining.schedules": {
        "_add_unshard_reshard": Use("replaced while a schedule is made: a rank's stages stay gathered")
    },
    "torch.distributed.tensor._utils": {
        "compute_local_shape_and_global_offset": Use("this rank's part of a weight that is drawn whole")
    },
    "torch.distributed.tensor.debug": {
        name: Use("shapes of a simulated rank are forgotten", lost="a later rank in this process may see them")
        for name in (
            "_clear_fast_path_sharding_prop_cache",
            "_clear_python_sharding_prop_cache",
            "_clear_sharding_prop_cache",
        )
    },
    "torch.distributed.tensor.experimental._context_parallel": {
        "_attention": Use("loops of ring attention", "torch.distributed.tensor.experimental.context_parallel: on CUDA")
    },
    "torch.distributed.tensor.placement_types": {
        "_StridedShard": Use("divides each of the projections fused in one matrix")
    },
    "torch.fx": {"_symbolic_trace": Use("tells whether torch.fx traces", "is_fx_tracing, which warns")},
    "torch.testing._internal.distributed.fake_pg": {
        "FakeStore": Use("simulates one rank alone; its import registers the backend")
    },
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": Use("sees each operator", "of torch's notes on extending it, by this name"),
        "_disable_current_modes": Use("hides a question from the program's modes"),
        "_get_current_dispatch_mode": Use("tells whether the recorder is the topmost mode"),
        "_get_current_dispatch_mode_stack": Use("finds the recorder that a declared function reports to"),
        "_pop_mode": Use("takes a mode off for the engine's own operators, faster than leaving it"),
        "_push_mode": Use("puts it back"),
    },
    "torch.utils._pytree": {
        "tree_leaves": Use("tensors within arguments"),
        "tree_map_only": Use("arguments with other tensors"),
    },
}

NAMES: dict[str, tuple[str, str, Use]] = {
    path.rpartition(".")[2].lstrip("_"): (module, path, use)
    for module, names in _BY_MODULE.items()
    for path, use in names.items()
}
"""memo's name of each: torch's module, the path within it, and what for."""

_TABLE = Use("hooks of ours are left out of copies and pickles of a module", "Module.register_forward_hook: sets them")

ATTRIBUTES: dict[tuple[str, str], dict[str, Use]] = {
    ("torch", "Tensor"): {"_is_zerotensor": Use("tells zeros without memory")},
    ("torch", "UntypedStorage"): {
        "_cdata": Use("tells whether two tensors share memory", "data_ptr: 0 where it is empty")
    },
    ("torch._ops", "OpOverload"): {
        "_op": Use("calls an operator with a Python frame less"),
        "_overloadname": Use("chooses a rule for tokens"),
        "_schema": Use("arguments of an operator, those it writes, and its results"),
    },
    ("torch._dynamo.eval_frame", "OptimizedModule"): {"_orig_mod": Use("tells a compiled module")},
    ("torch.autograd", "forward_ad"): {"_current_level": Use("tells whether there may be tangents, per tensor")},
    ("torch.autograd", "graph"): {
        "_allow_mutation_on_saved_tensors_enabled": Use("memo stands aside where torch copies what is saved")
    },
    ("torch.distributed.checkpoint", "FileSystemReader"): {
        "_get_metadata_path": Use("reads metadata without unpickling classes"),
        "_slice_file": Use("overridden: checks sums before reading"),
    },
    ("torch.distributed.device_mesh", "DeviceMesh"): {
        "_flatten": Use("group of ranks along several dimensions"),
        "_unflatten": Use("divides a dimension, for experts"),
    },
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam"): {"_module_info": Use("name of a sharded weight")},
    ("torch.distributed.fsdp", "FSDPModule"): {
        "_get_fsdp_state": Use("groups of weights whose exchange is compressed")
    },
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"): {
        "_fsdp_param_group": Use("as above, before _fsdp_param_groups", lost="_fsdp_param_groups is there instead"),
        "_fsdp_param_groups": Use("as above", since="2.12", lost="_fsdp_param_group is there instead"),
    },
    ("torch.distributed.pipelining", "PipelineStage"): {
        "_setup_backward_recv_info": Use("overridden: frees buffers early", since=_AFTER_OLDEST, lost=_BUFFERS),
        "_setup_forward_recv_info": Use("as above", since=_AFTER_OLDEST, lost=_BUFFERS),
    },
    ("torch.distributed.pipelining.schedules", "PipelineScheduleMulti"): {
        "_stages": Use("the order of a rank's layers")
    },
    ("torch.distributed.pipelining.schedules", "PipelineScheduleSingle"): {"_stage": Use("as above")},
    ("torch.distributed.tensor", "DTensor"): {
        "_local_tensor": Use("this rank's part, outside autograd", "DTensor.to_local: a node of autograd, and slower"),
        "_spec": Use("its placement, to make it again"),
    },
    ("torch.distributed.tensor.experimental._context_parallel", "_attention"): {
        "_RotateMethod": Use("keys circulate and are never all gathered"),
        "_cp_options": Use("as above; early and late parts on each rank"),
        "_templated_ring_attention": Use("loop of ring attention's forward, for any kernel"),
        "_templated_ring_attention_backward": Use("loop of its backward"),
    },
    ("torch.distributed.tensor.parallel", "ParallelStyle"): {
        "_apply": Use("divides a module; styles of ours override it")
    },
    ("torch.fx", "_symbolic_trace"): {"_is_fx_tracing_flag": Use("memo stands aside where torch.fx traces")},
    ("torch.nn", "Module"): {
        "_call_impl": Use("tells frames of modules' calls"),
        "_compiled_call_impl": Use("tells modules that are compiled"),
        "_forward_hooks": _TABLE,
        "_forward_hooks_always_called": _TABLE,
        "_forward_hooks_with_kwargs": _TABLE,
        "_forward_pre_hooks": _TABLE,
        "_forward_pre_hooks_with_kwargs": _TABLE,
        "_modules": Use("tells modules that are compiled", "named_children: leaves out what is there twice"),
        "_parameters": Use("a module's own weights, and None", "named_parameters: a generator, without None"),
        "_wrapped_call_impl": Use("tells frames of modules' calls"),
    },
    ("torch.utils", "_python_dispatch"): {
        "_mode_key": Use("takes off modes of torch's own that have one"),
        "_should_skip_dynamo": Use("overridden: keeps modes from switching torch.compile off at each operator"),
    },
    ("torch.utils", "flop_counter"): {"_get_raw": Use("a formula of ours is given tensors, not shapes")},
}
"""Attributes of torch's classes and modules, by these."""

DYNAMO, AOT_AUTOGRAD = "torch._dynamo", "torch._functorch._aot_autograd"
"""Modules of torch's compiler by which it is told that it is loaded, and that it saves; they are not imported."""


def place(name: str) -> tuple[Any, str]:
    """The object of torch that has a private name of NAMES, and its attribute there: for what memo replaces."""
    module, path, use = NAMES[name]
    inside, _, attribute = path.rpartition(".")
    try:
        home = importlib.import_module(module)
        return attrgetter(inside)(home) if inside else home, attribute
    except (AttributeError, ImportError) as error:
        raise _missing(f"{module}.{path}", use) from error


def found(name: str) -> Any:
    """What torch has under a private name of NAMES now; None where it has it not and memo can do without.

    Raises:
        ImportError: torch has it not, and memo needs it.
    """
    module, path, use = NAMES[name]
    try:
        return attrgetter(path)(importlib.import_module(module))
    except (AttributeError, ImportError) as error:
        if not use.lost:
            raise _missing(f"{module}.{path}", use) from error
        _log.info("this torch has no %s.%s: %s", module, path, use.lost)
        return None


def _missing(name: str, use: Use) -> ImportError:
    import torch

    return ImportError(
        f"this is torch {torch.__version__}, which has no {name} (memo's use of it: {use.what}; since torch {use.since}): "
        "install a torch that docs/versions.md names, or a memo that is made for this one"
    )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = there = found(name)
        return there

else:

    def __getattr__(name: str) -> Any: ...
