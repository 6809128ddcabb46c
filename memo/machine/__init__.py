"""Machine facts: measured links and disks, process memory, shares of a node, and limits of torch's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.machine.collective_rates import (
        CollectiveFit as CollectiveFit,
        CollectiveRates as CollectiveRates,
        measure_collectives as measure_collectives,
    )
    from memo.machine.doctor import Diagnosis as Diagnosis, Gpu as Gpu, MeasuredDisk as MeasuredDisk, examine as examine
    from memo.machine.kernel_rates import (
        KernelRates as KernelRates,
        measure_kernels as measure_kernels,
    )
    from memo.machine.kernel_times import (
        KernelTimes as KernelTimes,
        replay_rates as replay_rates,
    )
    from memo.machine.link_bandwidth import (
        DiskRates as DiskRates,
        HostFacts as HostFacts,
        LinkRates as LinkRates,
        measure_lanes as measure_lanes,
        measure_link as measure_link,
    )
    from memo.machine.node_share import (
        AUTO_HOST_SHARE as AUTO_HOST_SHARE,
        require_host_memory as require_host_memory,
        share_of_node as share_of_node,
    )
    from memo.machine.norm_limit import (
        require_layer_within_norm_limit as require_layer_within_norm_limit,
        require_within_norm_limit as require_within_norm_limit,
    )
    from memo.machine.process_memory import (
        freed_memory_returns as freed_memory_returns,
        peak_rss_bytes as peak_rss_bytes,
        restart_peak_rss as restart_peak_rss,
        return_freed_memory as return_freed_memory,
        rss_bytes as rss_bytes,
        run_peak_rss_bytes as run_peak_rss_bytes,
        trim_heap as trim_heap,
    )
    from memo.machine.sustained_write import SustainedWrite as SustainedWrite
else:
    __getattr__, __dir__, __all__ = attach(__name__)
