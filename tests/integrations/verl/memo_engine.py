"""The engine of docs/integrations/verl.md, on the test's device."""

from __future__ import annotations

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import memo


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu", vendor="nvidia")
class MemoEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine with a manager of its model."""

    manager: memo.Manager | None = None

    def initialize(self) -> None:
        """Attaches the manager once the model is sharded; not to a reference model, which has no backward."""
        super().initialize()
        if not self.engine_config.forward_only:
            self.manager = memo.offload(self.module, alpha=0.0, host="64MiB", min_bytes=1024).attach()
