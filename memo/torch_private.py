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
    from collections.abc import Iterator

    from torch._ops import (
        HigherOrderOperator as HigherOrderOperator,
        OpOverload as OpOverload,
        OpOverloadPacket as OpOverloadPacket,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_log = logging.getLogger("memo")


class PrivateUse(NamedTuple):
    """Use of a private name: its purpose, public successor and first version."""

    what: str
    public: str = ""
    """Public successor in torch, which does less or takes longer; empty: none."""
    since: str = "2.11, the oldest that memo takes"
    lost: str = ""
    """For a name that some torch lacks: what then is. Empty: memo needs it."""
    build: str = ""
    """`cuda`: of builds for CUDA alone."""


_NAMES = """
torch:Tensor._make_wrapper_subclass | makes deferred logits | public: in torch's notes, by this name
torch:_fused_sdp_choice | asks for torch's choice of kernel | public: torch.backends.cuda.can_use_*, of CUDA alone
torch._C:DispatchKey | keys that a replayed operator's kernel must see as in its forward
torch._C:DisableTorchFunctionSubclass | asks deferred logits for their shape | public: in torch's notes, in torch._C
torch._C:_DisableTorchDispatch | the engine's own operators pass the recorder by, eight times faster than off the stack
torch._C:_ForceDispatchKeyGuard | calls a kernel under the keys of its forward
torch._C:_RestorePythonTLSSnapshot | tells the keys that the caller of a dispatch mode has
torch._C:_TorchDispatchModeKey | tells modes that trace from those that run
torch._C:_accelerator_setAllocatorSettings | expandable segments | public: PYTORCH_ALLOC_CONF, before a program starts
torch._C:_autograd._get_sequence_nr | tells whether autograd made a node between two saved tensors
torch._C:_autograd._pop_saved_tensors_default_hooks | takes hooks off from below others
torch._C:_autograd._push_saved_tensors_default_hooks | sets hooks | public: saved_tensors_hooks, which must be topmost
torch._C:_autograd._saved_tensors_hooks_disable | replaced: hooks of ours stand aside in torch.func
torch._C:_autograd._saved_tensors_hooks_enable | replaced: hooks of ours are set again after torch.func
torch._C:_autograd._saved_tensors_hooks_get_disabled_error_message | tells whether hooks are forbidden
torch._C:_autograd._top_saved_tensors_default_hooks | tells whose hooks are the topmost
torch._C:_cuda_getCurrentRawStream | tells the stream | public: torch.cuda.current_stream, which is slow | build: cuda
torch._C:_cuda_isCurrentStreamCapturing | tells captures | public: torch.cuda.is_current_stream_capturing, which is slow
torch._C:_current_graph_task_id | tells whether this thread runs a backward
torch._C:_disabled_torch_dispatch_impl | tells subclasses of tensors that leave operators to torch
torch._C:_dispatch_has_kernel_for_dispatch_key | tells operators that autograd has a formula for
torch._C:_dispatch_tls_is_dispatch_key_excluded | tells whether an alias has its tensor's version counter
torch._C:_dispatch_tls_local_exclude_set | keys that this thread hides, for a kernel to see the same
torch._C:_dispatch_tls_local_include_set | keys that this thread adds, for a kernel to see the same
torch._C:_dispatch_tls_set_dispatch_key_excluded | gives aliases below autograd their tensor's version counter
torch._C:_dynamo.eval_frame._FrameAction | keeps Dynamo from hooks | public: torch.compiler.disable, slow to import
torch._C:_dynamo.eval_frame._FrameExecStrategy | keeps Dynamo from hooks | public: torch.compiler.disable
torch._C:_dynamo.eval_frame.set_code_exec_strategy | keeps Dynamo from hooks | public: torch.compiler.disable
torch._C:_functorch.TransformType | tells transforms of torch.func that leave hooks alone
torch._C:_functorch.get_interpreter_stack | tells which transforms of torch.func run
torch._C:_functorch.peek_interpreter_stack | tells whether a transform of torch.func runs
torch._C:_get_deterministic_algorithms | set for replays | public: torch.are_deterministic_algorithms_enabled
torch._C:_get_deterministic_algorithms_warn_only | set for replays | public: torch.is_deterministic_algorithms_...
torch._C:_set_deterministic_algorithms | set for replays | public: torch.use_deterministic_algorithms, slower
torch._C:_get_dispatch_mode | tells whether an operator is traced
torch._C:_get_dispatch_stack_at | finds a mode of ours below others
torch._C:_get_fp32_precision_getter | set for replays | public: fp32_precision of torch.backends, in six places
torch._C:_set_fp32_precision_setter | set for replays | public: fp32_precision of torch.backends, in six places
torch._C:_get_tracing_state | tells torch.jit.trace | public: torch.jit.is_tracing, slower
torch._C:_len_torch_dispatch_stack | number of dispatch modes
torch._C:_nn._parse_to | reads the arguments of `Tensor.to` as torch does
torch._C:_will_engine_execute_node | tells which gradients a half of a split backward wants
torch._C:_{get,set}_blas_preferred_backend | set for replays | public: backends.cuda | lost: not set
torch._C:_{get,set}_cpu_allow_fp16_reduced_precision_reduction | set for replays | lost: not set
torch._C:_{get,set}_cublas_allow_bf16_reduced_precision_reduction | set for replays | public: backends.cuda | lost: not set
torch._C:_{get,set}_cublas_allow_fp16_accumulation | set for replays | public: backends.cuda | lost: not set
torch._C:_{get,set}_cublas_allow_fp16_reduced_precision_reduction | set for replays | public: backends.cuda | lost: not set
torch._C:_{get,set}_cudnn_allow_tf32 | set for replays | public: torch.backends.cudnn.allow_tf32 | lost: not set
torch._C:_{get,set}_cudnn_benchmark | set for replays | public: torch.backends.cudnn.benchmark | lost: not set
torch._C:_{get,set}_cudnn_deterministic | set for replays | public: torch.backends.cudnn.deterministic | lost: not set
torch._C:_{get,set}_cudnn_enabled | set for replays | public: torch.backends.cudnn.enabled | lost: not set
torch._C:_{get,set}_float32_matmul_precision | set for replays | public: get_float32_matmul_precision | lost: not set
torch._C:_{get,set}_linalg_preferred_backend | set for replays | public: backends.cuda | lost: not set
torch._C:_{get,set}_mkldnn_deterministic | set for replays | public: torch.backends.mkldnn.deterministic | lost: not set
torch._C:_{get,set}_mkldnn_enabled | set for replays | public: torch.backends.mkldnn.enabled | lost: not set
torch._C:_{get,set}_nnpack_enabled | set for replays | public: torch.backends.nnpack | lost: not set
torch._C._distributed_c10d:FakeWork | result of a collective in a run without bytes
torch._compile:_disable_dynamo | keeps Dynamo from a hook | public: torch.compiler.disable, slow to import
torch._ops:HigherOrderOperator | tells operators that are given functions
torch._ops:OpOverload | what a dispatch mode is given
torch._ops:OpOverloadPacket | tells names of operators
torch._subclasses.fake_tensor:DataDependentOutputException | names the operator that a run without bytes stops at
torch._subclasses.fake_tensor:DynamicOutputShapeException | names the operator that a run without bytes stops at
torch._subclasses.fake_tensor:FakeTensor | shapes of results, without computing them | public: torch.device("meta")
torch._subclasses.fake_tensor:FakeTensorMode | shapes of results, without computing them
torch._subclasses.fake_tensor:UnsupportedOperatorException | names the operator that a run without bytes stops at
torch.autograd:Variable._execution_engine | calls a function when the backward that runs has ended
torch.autograd:_engine_run_backward | replaced: explains errors | lost: those of a backward go unexplained
torch.cuda.memory:_snapshot | tells the allocator's settings | public: memory_snapshot, which does not tell them
torch.distributed.distributed_c10d:_resolve_process_group | group of a functional collective, by its name
torch.distributed.fsdp._fully_shard:_fsdp_param | frees no storage in a run without bytes
torch.distributed.fsdp._fully_shard:_fsdp_param_group | frees no storage in a run without bytes
torch.distributed.pipelining.schedules:_add_unshard_reshard | replaced: keeps the stages of a rank gathered
torch.distributed.tensor._utils:compute_local_shape_and_global_offset | this rank's part of a weight that is drawn whole
torch.distributed.tensor.debug:_clear_fast_path_sharding_prop_cache | forgets a simulated rank | lost: its shapes stay
torch.distributed.tensor.debug:_clear_python_sharding_prop_cache | forgets a simulated rank | lost: its shapes stay
torch.distributed.tensor.debug:_clear_sharding_prop_cache | forgets a simulated rank | lost: its shapes stay
torch.distributed.tensor.experimental._context_parallel:_attention | loops of ring attention, for any kernel
torch.distributed.tensor.placement_types:_StridedShard | divides each of the projections that are fused in one matrix
torch.fx:_symbolic_trace.is_fx_symbolic_tracing | memo stands aside where torch.fx traces
torch.testing._internal.distributed.fake_pg:FakeStore | simulates one rank alone; its import registers the backend
torch.utils._python_dispatch:TorchDispatchMode | sees each operator | public: in torch's notes, by this name
torch.utils._python_dispatch:_disable_current_modes | hides operators of memo's own from the program's modes
torch.utils._python_dispatch:_get_current_dispatch_mode | tells whether the recorder is the topmost mode
torch.utils._python_dispatch:_get_current_dispatch_mode_stack | finds the recorder that a declared function reports to
torch.utils._python_dispatch:_pop_mode | takes the recorder off for the engine's own operators
torch.utils._python_dispatch:_push_mode | puts the recorder back
torch.utils.checkpoint:_checkpoint_without_reentrant_generator | replaced: no checkpoint around managed layers
torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl | replaced likewise | since: 2.14 | lost: it stays
torch.utils._pytree:tree_leaves | finds tensors within arguments
torch.utils._pytree:tree_map_only | exchanges tensors within arguments
"""

_ATTRIBUTES = """
torch:Tensor._is_zerotensor | tells zeros without memory
torch:Tensor._post_accumulate_grad_hooks | tells parameters whose gradients a program takes in backward
torch:UntypedStorage._cdata | tells whether two tensors share memory | public: data_ptr, 0 of all that are empty
torch._dynamo.eval_frame:OptimizedModule._orig_mod | tells compiled modules
torch._ops:OpOverload._op | calls an operator with a Python frame less
torch._ops:OpOverload._schema | arguments of an operator, those that it writes, and its results
torch.autograd:forward_ad._current_level | tells whether there may be tangents
torch.autograd:graph._allow_mutation_on_saved_tensors_enabled | memo stands aside where torch copies what is saved
torch.distributed.checkpoint:FileSystemReader._get_metadata_path | reads metadata that may not be unpickled
torch.distributed.checkpoint:FileSystemReader._slice_file | overridden: verifies a part before it is read
torch.distributed.device_mesh:DeviceMesh._flatten | group of the ranks along several dimensions
torch.distributed.device_mesh:DeviceMesh._unflatten | divides a dimension, for experts
torch.distributed.fsdp:FSDPModule._get_fsdp_state | groups of weights whose exchange is compressed
torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._module_info | name of a sharded weight
torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group | sharded weights | lost: the next is read
torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_groups | sharded weights | since: 2.12 | lost: none
torch.distributed.pipelining:PipelineStage._setup_backward_recv_info | frees buffers | since: 2.12 or 2.13 | lost: they stay
torch.distributed.pipelining:PipelineStage._setup_forward_recv_info | frees buffers | since: 2.12 or 2.13 | lost: they stay
torch.distributed.pipelining.schedules:PipelineScheduleMulti._stages | order of a rank's layers
torch.distributed.pipelining.schedules:PipelineScheduleSingle._stage | order of a rank's layers
torch.distributed.tensor:DTensor._local_tensor | this rank's part | public: to_local, a node of autograd
torch.distributed.tensor:DTensor._spec | placement, to make a DTensor again
torch.distributed.tensor.experimental._context_parallel:_attention._RotateMethod | keys are never gathered
torch.distributed.tensor.experimental._context_parallel:_attention._cp_options | early and late parts on each rank
torch.distributed.tensor.experimental._context_parallel:_attention._templated_ring_attention | forward
torch.distributed.tensor.experimental._context_parallel:_attention._templated_ring_attention_backward | backward
torch.distributed.tensor.parallel:ParallelStyle._apply | divides a module; overridden by styles of ours
torch.nn:Module._call_impl | tells frames of modules' calls
torch.nn:Module._compiled_call_impl | tells compiled modules, and keeps one from a layer's hooks
torch.nn:Module._forward_hooks | hooks of ours are called last, and are in no copy
torch.nn:Module._forward_hooks_always_called | hooks of ours are called last, and are in no copy
torch.nn:Module._forward_hooks_with_kwargs | hooks of ours are in no copy
torch.nn:Module._forward_pre_hooks | hooks of ours are called first, and are in no copy
torch.nn:Module._forward_pre_hooks_with_kwargs | hooks of ours are called first, and are in no copy
torch.nn:Module._modules | tells compiled modules
torch.nn:Module._parameters | a module's own weights, and which of its names has none
torch.nn:Module._wrapped_call_impl | tells frames of modules' calls
torch.utils:_python_dispatch._mode_key | takes off modes of torch's own that have one
torch.utils:_python_dispatch._should_skip_dynamo | overridden: no mode of ours turns torch.compile off at each operator
torch.utils:flop_counter._get_raw | a formula of ours is given tensors, not their shapes
"""


def _rows(table: str) -> Iterator[tuple[str, str, PrivateUse]]:
    for line in table.strip().splitlines():
        name, what, *more = line.split(" | ")
        module, _, path = name.partition(":")
        use = PrivateUse(what, **dict(each.split(": ", 1) for each in more))
        for does in ("get", "set") if "{get,set}" in path else ("",):
            yield module, path.replace("{get,set}", does), use


NAMES = {path.rpartition(".")[2].lstrip("_"): (module, path, use) for module, path, use in _rows(_NAMES)}
"""memo's name of each: torch's module, the path in it, and what for."""

ATTRIBUTES = {path.rpartition(".")[2]: (module, path, use) for module, path, use in _rows(_ATTRIBUTES)}
"""Each by its own name, with its class, or its module where that is replaced or changes."""

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
    """Object under a private name of NAMES in this torch; None where it is absent and memo can do without.

    Raises:
        ImportError: torch has it not, and memo needs it.
    """
    module, path, use = NAMES[name]
    try:
        return attrgetter(path)(importlib.import_module(module))
    except (AttributeError, ImportError) as error:
        if not use.lost:
            raise _missing(f"{module}.{path}", use) from error
        if _is_as_new_as(use.since):
            _log.info("this torch has no %s.%s (%s): %s", module, path, use.what, use.lost)
        return None


def _is_as_new_as(version: str) -> bool:
    import torch

    return bool(torch.__version__ >= version)


def _missing(name: str, use: PrivateUse) -> ImportError:
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
