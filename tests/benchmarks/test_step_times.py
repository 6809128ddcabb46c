"""Steps that one GPU took, and what `memo plan` predicts of them: within 5 %, or 10 % where the page says why."""

from __future__ import annotations

import pytest

from benchmarks.results import newest_result
from benchmarks.step_times import RESULTS, measured_s, predicted_s, step_rows

NEAR = 0.05
FARTHER = {
    "350m, 64k, heads of 64, H200: everything kept": 0.10,  # heads of 64 have published rates at 16k tokens only
    "Qwen3-0.6B, 32k, H100: everything kept": 0.10,  # small matrices have none
    "Qwen3-0.6B, 32k, H100: full checkpointing": 0.10,
    "8 layers of Llama-3-8B with LoRA, 32k, H100: by plan": 0.10,  # more was offloaded than is planned now
}


@pytest.mark.parametrize("what", step_rows())
def test_a_measured_step_is_predicted_and_as_the_page_says(what: str) -> None:
    row = step_rows()[what]
    if row.get("transformers") or "qwen" in row["plan"]:
        pytest.importorskip("transformers")
    predicted = predicted_s(row)
    assert predicted == pytest.approx(measured_s(row), rel=FARTHER.get(what, NEAR))
    newest = newest_result("step-times", RESULTS)
    assert newest is not None
    (shown,) = (one["predicted_s"] for one in newest["steps"] if one["what"] == what)
    assert predicted == pytest.approx(shown, rel=5e-3), "python -m benchmarks.step_times, and make plots"
