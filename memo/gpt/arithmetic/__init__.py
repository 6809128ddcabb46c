"""Arithmetic model of a GPT: FLOPs, bytes and profile, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.gpt.arithmetic.collectives import (
        Collective as Collective,
        CollectiveKind as CollectiveKind,
        Ranks as Ranks,
        collective_s as collective_s,
        exchange_s as exchange_s,
    )
    from memo.gpt.arithmetic.embedding_traffic import (
        EmbeddingTraffic as EmbeddingTraffic,
        reason_not_sparse as reason_not_sparse,
    )
    from memo.gpt.arithmetic.fixed_methods import RecomputeMethod as RecomputeMethod
    from memo.gpt.arithmetic.flops import parameter_count as parameter_count
    from memo.gpt.arithmetic.layout import StepLayout as StepLayout
    from memo.gpt.arithmetic.optimizers import (
        Optimizer as Optimizer,
        layer_states as layer_states,
        orthogonalisation_flops as orthogonalisation_flops,
    )
    from memo.gpt.arithmetic.profile_by_arithmetic import derive_profile as derive_profile
    from memo.gpt.arithmetic.rank_weights import RankWeights as RankWeights
    from memo.gpt.arithmetic.run_of_plan import (
        PlannedRun as PlannedRun,
        is_of_gpt as is_of_gpt,
        planned_run as planned_run,
        run_of as run_of,
        untrained as untrained,
    )
    from memo.gpt.arithmetic.step_collectives import StepCollectives as StepCollectives
    from memo.gpt.arithmetic.training import (
        ADAM_FP32 as ADAM_FP32,
        ADAM_PURE as ADAM_PURE,
        AS_MEMO_TRAINS as AS_MEMO_TRAINS,
        NF4_BYTES as NF4_BYTES,
        STATES as STATES,
        AdapterDtype as AdapterDtype,
        BaseFormat as BaseFormat,
        StateBytes as StateBytes,
        Training as Training,
        TrainingMethod as TrainingMethod,
        adapter_states as adapter_states,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
