"""Inputs of the planners: profiles, hardware, measured rates of a machine, pipeline schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.mip.inputs.coding import (
        CODE_BYTES as CODE_BYTES,
        CODECS as CODECS,
        Coding as Coding,
        checking_nbytes as checking_nbytes,
    )
    from memo.mip.inputs.doctor_rates import (
        with_measured_collectives as with_measured_collectives,
        with_measured_rates as with_measured_rates,
    )
    from memo.mip.inputs.free_swap_length import free_swap_tokens as free_swap_tokens
    from memo.mip.inputs.hardware import (
        PRESETS as PRESETS,
        AttentionKernel as AttentionKernel,
        Hardware as Hardware,
        HeadShares as HeadShares,
        hardware_of as hardware_of,
        hardware_preset as hardware_preset,
        peak_flops as peak_flops,
    )
    from memo.mip.inputs.network import (
        Collectives as Collectives,
        Network as Network,
        NetworkLevel as NetworkLevel,
        RankGroup as RankGroup,
        parse_network as parse_network,
    )
    from memo.mip.inputs.pipeline_schedules import Pass as Pass, PipelineSchedule as PipelineSchedule, Turn as Turn
    from memo.mip.inputs.profile import (
        ALL as ALL,
        ATTENTION as ATTENTION,
        INPUT as INPUT,
        MATMULS as MATMULS,
        EmbeddingExchange as EmbeddingExchange,
        EmbeddingOrHeadProfile as EmbeddingOrHeadProfile,
        LayerProfile as LayerProfile,
        PointProfile as PointProfile,
        Profile as Profile,
        Role as Role,
        Signature as Signature,
        StaticBytes as StaticBytes,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
