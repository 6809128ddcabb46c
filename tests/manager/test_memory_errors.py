"""An error for want of memory in a managed step says why, keeps its type, and leaves a trace that shows where."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Block, Stack

import memo
from memo.cli.main import main
from memo.errors import ExitCode
from memo.events import OUT_OF_MEMORY, Note
from memo.trace import read_traces

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free. "
    "Of the allocated memory 70.00 GiB is allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but unallocated."
)


class Failing(torch.autograd.Function):
    """Runs out of memory in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, when: str) -> torch.Tensor:
        ctx.when = when
        if when == "forward":
            raise torch.OutOfMemoryError(MESSAGE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.when == "backward":
            raise torch.OutOfMemoryError(MESSAGE)
        return gradient, None


class FailingBlock(Block):
    when = "never"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Failing.apply(x, self.when))


def failing_step(when: str, trace: Path, *, attach: bool) -> torch.OutOfMemoryError:
    """Runs a step whose second layer fails, and returns the error."""
    model = Stack(layers=3, make=lambda: FailingBlock(32, 2))
    ids = torch.randint(0, 61, (1, 256))
    manager = memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB", trace=trace)
    model.layers[1].when = when

    def step() -> None:
        if attach:
            manager.attach()
            model(ids).backward()
            return
        with manager:
            loss = model(ids)
        loss.backward()

    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step()
        return caught.value
    finally:
        manager.close()


@pytest.mark.parametrize("attach", [False, True], ids=["with", "attached"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_message_ends_with_the_reason_and_the_trace_marks_the_layer(
    when: str, attach: bool, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    error = failing_step(when, path, attach=attach)
    assert type(error) is torch.OutOfMemoryError
    assert len(error.args) == 1  # as frameworks that look for "out of memory" in it expect
    first, answer = str(error).split("\nmemo: ")
    assert first == MESSAGE
    assert answer.startswith("In layers.1, the device held 70 GiB when 2 GiB more were asked for")
    assert "weights " in answer
    (trace,) = read_traces([path])
    assert not trace.remarks  # it has its end
    notes = [event for event in trace.events if isinstance(event, Note) and event.cause == OUT_OF_MEMORY]
    assert [(note.module, note.message) for note in notes] == [("layers.1", MESSAGE)]


def test_explain_oom_reads_that_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    failing_step("backward", path, attach=False)
    assert main(["explain-oom", str(path)]) == ExitCode.OK
    said = capsys.readouterr().out
    assert said.startswith(
        "When memory ran out in step 0, in layers.1, the device held 70 GiB when 2 GiB more were asked"
    )
    assert "It is not" not in said


def fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("mine")


def test_another_error_is_left_alone_and_the_wrapper_goes_with_the_last_manager() -> None:
    plain = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    model = Stack(layers=2)
    manager = memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB")
    assert torch.autograd._engine_run_backward is not plain  # type: ignore[attr-defined]
    with manager:
        loss = model(torch.randint(0, 61, (1, 64)))
    loss.register_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert str(caught.value) == "mine"
    manager.close()
    assert torch.autograd._engine_run_backward is plain  # type: ignore[attr-defined]


def test_an_error_of_a_model_that_is_not_managed_is_left_alone() -> None:
    model, other = Stack(layers=2), Stack(layers=2, make=lambda: FailingBlock(32, 2))
    ids = torch.randint(0, 61, (1, 64))
    manager = memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB")
    with manager:
        loss = model(ids)
    loss.backward()
    other.layers[1].when = "backward"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        other(ids).backward()
    assert str(caught.value) == MESSAGE
    manager.close()


def test_the_wrapper_goes_with_a_manager_that_is_never_closed() -> None:
    plain = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    manager = memo.offload(Stack(layers=2), alpha=1.0, min_bytes="1KiB", host="64MiB")
    assert torch.autograd._engine_run_backward is not plain  # type: ignore[attr-defined]
    del manager
    gc.collect()
    assert torch.autograd._engine_run_backward is plain  # type: ignore[attr-defined]


def test_memory_of_the_machine_is_explained_too() -> None:
    model = Stack(layers=2)
    manager = memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB")

    def forward() -> None:
        with manager:
            model(torch.randint(0, 61, (1, 64)))
            torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match=r"can't allocate memory(.|\n)*memo: In this step, outside the layers"):
        forward()
    manager.close()


def test_the_advice_of_a_failing_head_keeps_the_loss() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 61}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 61, (1, 64))
    plain = model(input_ids=ids, labels=ids).loss

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(MESSAGE)

    hook = model.lm_head.register_forward_pre_hook(fail)
    manager = memo.offload(model, alpha=1.0, host="64MiB")
    with pytest.raises(torch.OutOfMemoryError, match=r"memo\.loss_without_logits\(model\)"), manager:
        model(input_ids=ids, labels=ids)
    hook.remove()
    memo.loss_without_logits(model)
    with manager:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    manager.close()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
