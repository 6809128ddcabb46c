"""Offload of saved activations, storage by storage, to host memory and NVMe; recompute of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine as Engine
    from memo.swap.engine.handles import KeptTensor as KeptTensor
    from memo.swap.engine.layer_calls import Group as Group
    from memo.swap.engine.spills import SpillFigures as SpillFigures, SpillOutcome as SpillOutcome
    from memo.swap.engine.tier_choice import WhenFull as WhenFull
    from memo.swap.kept import keep as keep
    from memo.swap.layers import (
        Layer as Layer,
        LayerHook as LayerHook,
        find_layers as find_layers,
        hook_forward as hook_forward,
        runs_as_written as runs_as_written,
    )
    from memo.swap.levels import (
        LayerCosts as LayerCosts,
        Level as Level,
        Mix as Mix,
        PointCost as PointCost,
        Setting as Setting,
        comparing_nbytes as comparing_nbytes,
        least_part_nbytes as least_part_nbytes,
        setting_of as setting_of,
    )
    from memo.swap.memory.host_memory import (
        available_host_bytes as available_host_bytes,
        total_host_bytes as total_host_bytes,
    )
    from memo.swap.memory.host_pool import HostPool as HostPool
    from memo.swap.memory.numa import node_of_pci_device as node_of_pci_device
    from memo.swap.memory.page_aligned import aligned_empty as aligned_empty, whole_pages as whole_pages
    from memo.swap.memory.pinned import empty_pinned as empty_pinned
    from memo.swap.memory.slab import touched_slab_bytes as touched_slab_bytes
    from memo.swap.placement import Placement as Placement, Quota as Quota
    from memo.swap.recompute.explanation import LayerExplanation as LayerExplanation
    from memo.swap.recompute.policy import RecomputePolicy as RecomputePolicy
    from memo.swap.recompute.rank_agreement import (
        equal_on_all_ranks as equal_on_all_ranks,
        gather_values as gather_values,
    )
    from memo.swap.recompute.tape.attention import is_attention as is_attention
    from memo.swap.recompute.tape.bans import Bans as Bans
    from memo.swap.recompute.tape.declared import memoize as memoize, recomputable as recomputable
    from memo.swap.recompute.tape.work import (
        Rates as Rates,
        Work as Work,
        picoseconds_of as picoseconds_of,
        work_of as work_of,
    )
    from memo.swap.saving_hooks import SavingHooks as SavingHooks
    from memo.swap.stats import Stats as Stats, Totals as Totals
    from memo.swap.tensor_kinds import (
        argument_storages as argument_storages,
        cast_of_parameter as cast_of_parameter,
        has_storage as has_storage,
        layer_input as layer_input,
        local_part as local_part,
        parameter_behind as parameter_behind,
        tensors_within as tensors_within,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
