"""Models of Hugging Face's transformers from their configurations, and their profiles, recorded without memory or a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.hugging_face.configuration import (
        configuration_from as configuration_from,
        model_class as model_class,
        names_configuration as names_configuration,
    )
    from memo.hugging_face.layer_kinds import built_model as built_model
    from memo.hugging_face.model import HuggingFaceModel as HuggingFaceModel
    from memo.hugging_face.published import (
        PUBLISHED as PUBLISHED,
        published_name as published_name,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
