"""`memo.loss_without_logits` on unmodified models of many families: their own loss and gradients, and no logits."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from family_sizes import GROUPED, LAYERS, STACKS, TOKENS, VOCAB
from live_bytes import LiveBytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memo
from memo.errors import UsageError

hf = pytest.importorskip("transformers")

HEADS = {**GROUPED, "head_dim": 8}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64}
PAIRS = {**STACKS, "decoder_start_token_id": 2}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "experts_implementation": "eager",
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, **TOKENS}),
    "Qwen2ForCausalLM": ("Qwen2Config", {**GROUPED, **TOKENS}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**HEADS, **TOKENS, "tie_word_embeddings": True}),
    "Phi3ForCausalLM": ("Phi3Config", {**GROUPED, **TOKENS}),
    "PhiForCausalLM": ("PhiConfig", {**GROUPED, **TOKENS}),  # a bias
    "GPTJForCausalLM": ("GPTJConfig", {**GPT, "rotary_dim": 4}),  # a bias
    "GemmaForCausalLM": ("GemmaConfig", HEADS),
    "Gemma2ForCausalLM": ("Gemma2Config", {**HEADS, "final_logit_softcapping": 3.0}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**HEADS, **TOKENS, "final_logit_softcapping": 3.0}),
    "CohereForCausalLM": ("CohereConfig", {**GROUPED, **TOKENS}),  # multiplied
    "GraniteForCausalLM": ("GraniteConfig", {**GROUPED, **TOKENS, "logits_scaling": 6.0}),  # divided
    "GPT2LMHeadModel": ("GPT2Config", GPT),
    "OPTForCausalLM": ("OPTConfig", {**LAYERS, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {**LAYERS, "intermediate_size": 64}),
    "BloomForCausalLM": ("BloomConfig", {**LAYERS, "n_layer": 2, "n_head": 4}),
    "FalconForCausalLM": ("FalconConfig", LAYERS),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, **TOKENS, **EXPERTS}),  # and what its router adds
    "BartForCausalLM": ("BartConfig", PAIRS),
    "BartForConditionalGeneration": ("BartConfig", PAIRS),  # a bias that no module has
    "T5ForConditionalGeneration": ("T5Config", {**PAIRS, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
}
UNSHIFTED = ("BartForCausalLM", "BartForConditionalGeneration", "T5ForConditionalGeneration")


@pytest.fixture(autouse=True)
def _no_logits_made() -> Iterator[None]:
    """That a model's loss made its logits is a warning; here, where a test does not expect it, an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*they were computed")
        yield


def model_of(name: str, **changes: Any) -> nn.Module:
    """In eval: dropout is no subject here."""
    kind, shape = FAMILIES[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(hf, name)(getattr(hf, kind)(**{**shape, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # logits that are far apart, and biases that are not zero
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name == "final_logits_bias":
                buffer.copy_(torch.randn_like(buffer))
    return model


def batch(seq: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (2, seq), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:9] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def step(model: nn.Module, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    output = model(**{**batch(), "use_cache": False, **more})
    output.loss.backward()
    return output, gradients(model)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    """Within `bound` of the largest of each gradient."""
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert float((got[name] - grad).abs().max()) <= bound * max(1.0, float(grad.abs().max())), name


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_models_own_loss(name: str) -> None:
    model = model_of(name)
    own, want = step(model)
    with memo.loss_without_logits(model, chunk=7):
        output, got = step(model)
    assert output.loss.dtype == own.loss.dtype
    torch.testing.assert_close(output.loss, own.loss, rtol=2e-6, atol=0)
    assert_close(got, want, 2e-6)
    assert torch.equal(output.logits, own.logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_float64_it_is_exact(name: str) -> None:
    """The library rounds logits to float32 for its loss, so the plain loss is computed here."""
    model = model_of(name).double()
    given = batch()
    logits = model(**given, use_cache=False).logits
    shift = 0 if name in UNSHIFTED else 1
    kept, targets = logits[:, : logits.shape[1] - shift], given["labels"][:, shift:]
    plain = F.cross_entropy(kept.reshape(-1, VOCAB), targets.reshape(-1))
    plain.backward()
    want = gradients(model)
    with memo.loss_without_logits(model, chunk=7):
        output = model(**given, use_cache=False)
        kept = output.logits[:, : logits.shape[1] - shift]
        loss = F.cross_entropy(kept.reshape(-1, VOCAB), targets.reshape(-1))
        assert "computed=False" in repr(kept)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-12)
    assert_close(gradients(model), want, 1e-12)
    if name != "MixtralForCausalLM":  # whose router adds to its loss
        output.loss.backward()
        assert_close(gradients(model), want, 1e-12)


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        {"shift_labels": batch()["labels"].roll(3, 1)},
        {"labels": batch()["labels"][:, -5:], "logits_to_keep": 5},
        {"return_dict": False},
    ],
    ids=["items", "items as a tensor", "shifted labels", "logits of the last", "tuple"],
)
def test_what_a_training_loop_may_ask_for(more: dict[str, Any]) -> None:
    model = model_of("Gemma2ForCausalLM")

    def asked() -> tuple[Tensor, dict[str, Tensor]]:
        output = model(**{**batch(), "use_cache": False, **more})
        loss: Tensor = output[0]
        loss.backward()
        return loss, gradients(model)

    own, want = asked()
    with memo.loss_without_logits(model):
        loss, got = asked()
    torch.testing.assert_close(loss, own, rtol=2e-6, atol=0)
    assert_close(got, want, 2e-6)


def test_labels_may_be_positional() -> None:
    model = model_of("LlamaForCausalLM")
    given = batch()
    with memo.loss_without_logits(model):
        output = model(given["input_ids"], None, None, None, None, given["labels"])
        assert "computed=False" in repr(output.logits)
    torch.testing.assert_close(output.loss, model(**given).loss, rtol=2e-6, atol=0)


def peaks(model: nn.Module, seq: int, *, train: bool = True) -> LiveBytes:
    ids = torch.randint(8192, (1, seq), generator=torch.Generator().manual_seed(1))
    with LiveBytes() as alive, torch.set_grad_enabled(train):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if train:
            loss.backward()
    return alive


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_no_logits_are_made(name: str, train: bool) -> None:
    seq, vocab, chunk = 256, 8192, 4
    model = model_of(name, vocab_size=vocab)
    logits, matrix, hidden = seq * vocab * 4, vocab * 32 * 4, seq * 32 * 4
    scores = 4 * (2 * seq) ** 2 * 4 if name == "Gemma2ForCausalLM" else 0  # its attention is written out
    assert peaks(model, seq, train=train).largest == logits
    with memo.loss_without_logits(model, chunk=chunk):
        short, long = peaks(model, seq, train=train), peaks(model, 2 * seq, train=train)
    assert long.largest <= max(matrix if train else 0, chunk * vocab * 4, 4 * hidden * 2, scores)
    if not scores:  # what grows with the length is what the layers have of each token, not a row of logits
        assert long.peak - short.peak < logits / 4


@pytest.mark.filterwarnings("ignore:model.layers.0 moves whole tensors:RuntimeWarning")  # Gemma 2 writes attention out
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel"])
def test_with_memo_it_is_the_same_to_the_last_bit(name: str) -> None:
    model = model_of(name)
    with memo.loss_without_logits(model):
        own, want = step(model)
        manager = memo.offload(model, alpha=0.5, min_bytes=0)
        with manager:
            loss = model(**batch(), use_cache=False).loss
        loss.backward()
        got = gradients(model)
        assert manager.stats.bytes_host + manager.stats.bytes_disk > 0
        manager.close()
    assert torch.equal(loss, own.loss)
    assert all(torch.equal(got[each], want[each]) for each in want)


def test_under_autocast_the_loss_is_closer_than_the_models_own() -> None:
    model = model_of("Gemma2ForCausalLM")
    exact = model(**batch()).loss
    with torch.autocast("cpu", torch.bfloat16):
        own = model(**batch())
        with memo.loss_without_logits(model):
            output = model(**batch())
    assert output.logits.dtype is own.logits.dtype
    assert torch.equal(output.logits, own.logits)  # made outside of autocast, in the dtype of the call
    ours, theirs = (abs(float(each.loss.detach() - exact.detach())) for each in (output, own))
    assert ours <= theirs + 1e-3 * float(exact.detach())
    torch.testing.assert_close(output.loss, own.loss, rtol=5e-3, atol=0)


def test_without_labels_nothing_is_different() -> None:
    model = model_of("LlamaForCausalLM")
    ids = batch()["input_ids"]
    own = model(ids).logits
    words = model.generate(ids, max_new_tokens=3, do_sample=False)
    with memo.loss_without_logits(model):
        assert type(model(ids).logits) is Tensor
        assert torch.equal(model(ids).logits, own)
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), words)
        with torch.inference_mode():
            assert type(model(**batch()).logits) is Tensor


def test_closed_the_model_is_as_it_was() -> None:
    model = model_of("LlamaForCausalLM")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    without = memo.loss_without_logits(model)
    assert "forward" in vars(model.lm_head)
    without.close()
    without.close()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert type(model(**batch()).logits) is Tensor


def test_a_copy_of_the_model_has_its_own() -> None:
    model = model_of("LlamaForCausalLM")
    without = memo.loss_without_logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2.0)
    assert "computed=False" in repr(other(**batch()).logits)
    assert not torch.equal(other(**batch()).loss, model(**batch()).loss)
    without.close()
    assert "computed=False" in repr(other(**batch()).logits)


def test_an_error_within_the_forward_leaves_nothing_behind() -> None:
    model = model_of("LlamaForCausalLM")
    memo.loss_without_logits(model)
    with pytest.raises(ValueError, match="batch_size"):
        model(input_ids=batch()["input_ids"], labels=torch.zeros(2, 3, dtype=torch.int64))
    assert type(model.lm_head(torch.zeros(1, 32))) is Tensor
    model(**batch())
    assert type(model.lm_head(torch.zeros(1, 32))) is Tensor


@pytest.mark.filterwarnings("default:.*they were computed")
def test_a_loss_of_the_users_own_is_right_and_said_to_make_logits() -> None:
    model = model_of("LlamaForCausalLM")

    def with_entropy(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1) + logits.softmax(-1).std()

    model.loss_function = with_entropy
    own, want = step(model)
    with memo.loss_without_logits(model):
        with pytest.warns(UserWarning, match="LlamaForCausalLM does more with its logits"):
            output, got = step(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model)
    assert torch.equal(output.loss, own.loss)
    assert all(torch.equal(got[name], want[name]) for name in want)


class Adapted(nn.Module):
    """As an adapter library wraps a model: whatever it is given it gives on, to the forward itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


def test_a_model_that_is_wrapped_is_given_as_it_is_called() -> None:
    model = model_of("LlamaForCausalLM")
    own = model(**batch())
    wrapped = Adapted(model)
    with memo.loss_without_logits(wrapped):
        output = wrapped(**batch())
        assert "computed=False" in repr(output.logits)
        assert type(wrapped(batch()["input_ids"]).logits) is Tensor
    torch.testing.assert_close(output.loss, own.loss, rtol=2e-6, atol=0)


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """A process group that outlives the test's wrappers: a reducer that ends it waits for gloo with the GIL taken."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


def wrapped_by(model: nn.Module, kind: str) -> nn.Module:
    if kind == "fully_shard":
        return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    options = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}  # Trainer gives the first
    return nn.parallel.DistributedDataParallel(model, **options.get(kind, {}))


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("kind", ["plain", "unused", "static", "fully_shard"])
def test_data_parallelism_around_the_model_makes_no_logits(kind: str) -> None:
    model = model_of("LlamaForCausalLM")
    memo.loss_without_logits(model)
    wrapped = wrapped_by(model, kind)
    for _ in range(2):
        output = wrapped(**batch())
        output.loss.backward()
        assert "computed=False" in repr(output.logits)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("kind", ["plain", "unused", "static"])
def test_logits_that_are_read_behind_data_parallelism_have_their_gradient(kind: str) -> None:
    grads = []
    for without in (False, True):
        model = model_of("LlamaForCausalLM").double()
        if without:
            memo.loss_without_logits(model)
        wrapped = wrapped_by(model, kind)
        output = wrapped(**batch())
        (output.loss + output.logits.square().mean()).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, rtol=0, atol=1e-7)  # losses are in float32


def test_a_clone_without_a_graph_may_be_written_into() -> None:
    model = model_of("LlamaForCausalLM")
    with memo.loss_without_logits(model), torch.no_grad():
        logits = model(**batch()).logits
        changed = logits.clone()
        changed.zero_()
        assert not changed.any()
        assert logits.any()


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Eight short ones."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trained(folder: Path, *, without: bool, **more: Any) -> tuple[list[float], nn.Module]:
    """Losses of three steps of two accumulated batches each, and of an evaluation."""
    model = model_of("Gemma2ForCausalLM")
    closing = memo.loss_without_logits(model, chunk=7) if without else contextlib.nullcontext()
    told = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    sizes = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    arguments = hf.TrainingArguments(str(folder), use_cpu=True, **told, **sizes, **more)
    with closing:
        trainer = hf.Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts())
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    return [*(row["loss"] for row in trainer.state.log_history if "loss" in row), evaluated], model


@pytest.mark.filterwarnings("default:.*they were computed")
@pytest.mark.parametrize(
    "more", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}], ids=["plain", "bf16", "smoothed"]
)
def test_trainer_trains_as_ever(more: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    want, whole = trained(tmp_path / "whole", without=False, **more)
    got, model = trained(tmp_path / "without", without=True, **more)
    assert len(got) == 4
    bound = 1e-3 if "bf16" in more else 2e-6
    torch.testing.assert_close(got, want, rtol=bound, atol=0)
    if "bf16" not in more:
        ours, theirs = (dict(each.named_parameters()) for each in (model, whole))
        for name, parameter in theirs.items():
            assert float((ours[name] - parameter).detach().abs().max()) <= 1e-5, name


def test_a_weight_that_is_computed_later_on_makes_logits_as_ever() -> None:
    model = model_of("LlamaForCausalLM")
    without = memo.loss_without_logits(model)
    nn.utils.parametrizations.weight_norm(model.lm_head)
    output, got = step(model)
    assert type(output.logits) is Tensor
    without.close()
    own, want = step(model)
    assert torch.equal(output.loss, own.loss)
    assert all(torch.equal(got[name], want[name]) for name in want)


class Scaled(nn.Linear):
    """A projection that does something else."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 2.0


def test_models_whose_loss_is_not_known_are_refused_and_left_alone() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    scaled, twice = model_of("LlamaForCausalLM"), model_of("LlamaForCausalLM")
    scaled.lm_head = Scaled(32, VOCAB, bias=False)
    normed = model_of("LlamaForCausalLM")
    nn.utils.parametrizations.weight_norm(normed.lm_head)
    kept = memo.loss_without_logits(twice)
    patched = model_of("LlamaForCausalLM")
    patched.lm_head.forward = lambda hidden: hidden
    llama = hf.LlamaConfig(**small, vocab_size=VOCAB, pad_token_id=0)
    other = model_of("LlamaForCausalLM")
    other.loss_type = "ForCTC"
    refused: dict[str, tuple[nn.Module, str]] = {
        "classifier": (hf.LlamaForSequenceClassification(llama), "no output projection"),
        "no head": (hf.LlamaModel(llama), "no output projection"),
        "no transformer": (nn.Linear(3, 3), "no output projection"),
        "own forward": (scaled, r"is a \S*Scaled with a forward of its own"),
        "computed": (normed, "is computed, and no parameter of it"),
        "twice": (twice, "is without logits already; leave out this second memo"),
        "another's": (patched, "another library has replaced the forward"),
        "other loss": (other, r"the loss of LlamaForCausalLM \(ForCTC\) is not a cross entropy"),
    }
    for name, (model, message) in refused.items():
        before = {at: dict(vars(module)) for at, module in model.named_modules()}
        with pytest.raises(UsageError, match=message):
            memo.loss_without_logits(model)
        assert {at: dict(vars(module)) for at, module in model.named_modules()} == before, name
    kept.close()
