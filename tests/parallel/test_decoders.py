"""`memo.parallelize` of models that nobody wrote for memo: tensor, pipeline and data parallelism as one process trains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaAttention

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch

import memo
from benchmarks.small_architectures import build
from memo.errors import UsageError
from memo.parallel import fake_group
from memo.parallel.decoders import check_context
from memo.parallel.decoders.calls import calls_of
from memo.parallel.decoders.context import Sequences, _attends, _attention
from memo.parallel.decoders.dataflow import check, run_wide
from memo.parallel.decoders.division import Boundary, DividedModule, Division, Kind
from memo.parallel.decoders.operators import NotDivisible
from memo.parallel.decoders.parallel_model import _stage_ranges
from memo.parallel.decoders.plan import divide, parts_by_rules
from memo.parallel.decoders.stages import balanced
from memo.parallel.decoders.tensor import find_divisions
from memo.parallel.gathered_input import enter, kept_for

PLANNED = ["MixtralForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM"]
RULED = ["GPT2LMHeadModel", "OPTForCausalLM", "LlamaForCausalLM+lora"]


@pytest.mark.parallel
@pytest.mark.slow
def test_layers_are_divided_by_their_plan_or_by_two_rules() -> None:
    said = launch(2, "decoders_worker.py", "2", "1", "1", "1", *PLANNED, *RULED)
    for name in (*PLANNED, *RULED):
        assert f"equal {name} within" in said, said


@pytest.mark.parallel
@pytest.mark.slow
def test_a_pipeline_trains_as_one_process_with_tied_weights_too() -> None:
    names = ["LlamaForCausalLM", "OPTForCausalLM", "Gemma3ForCausalLM"]
    said = launch(2, "decoders_worker.py", "1", "2", "1", "1", *names)
    for name in names:
        assert f"equal {name} within" in said, said


@pytest.mark.parallel
@pytest.mark.slow
def test_frozen_matrices_that_tensor_and_data_parallel_ranks_gather_stay() -> None:
    assert "equal Qwen3ForCausalLM+lora" in launch(4, "decoders_worker.py", "2", "1", "2", "1", "Qwen3ForCausalLM+lora")


@pytest.mark.parallel
@pytest.mark.slow
def test_eight_ranks_of_three_dimensions_train_as_one_process() -> None:
    names = ["LlamaForCausalLM", "Qwen3ForCausalLM+lora", "MixtralForCausalLM"]
    said = launch(8, "decoders_worker.py", "2", "2", "2", "1", *names, timeout_s=900)
    for name in names:
        assert f"equal {name} within" in said, said


@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["1 1 1 2", "2 1 1 2", "1 2 1 2"])
def test_ranks_with_tokens_of_their_own_train_as_one_process(sizes: str) -> None:
    names = ["LlamaForCausalLM", "MistralForCausalLM"]  # the second within a window
    names += ["OPTForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM+lora"] if sizes == "1 1 1 2" else []
    tp, pp, dp, cp = map(int, sizes.split())
    said = launch(tp * pp * dp * cp, "decoders_worker.py", *sizes.split(), *names)
    for name in names:
        assert f"equal {name} within" in said, said


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("RobertaForCausalLM", "it numbers tokens in a way of its own"),  # from its padding token on
        ("Gemma2ForCausalLM", "its attention has softcap"),
        ("Llama4ForCausalLM", "its attention is not causal over all tokens or a window of them"),  # of chunks
        ("MambaForCausalLM", "convolution.default gives"),
        ("GPTNeoForCausalLM", "bmm.default gives"),  # writes attention out itself
        ("BloomForCausalLM", "cumsum goes along a divided dimension"),
        ("WhisperForCausalLM", "its loss is not its loss_function's alone"),
    ],
)
def test_tokens_that_more_than_attention_mixes_are_not_divided(name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"the tokens of {name} cannot be divided over cp=2 ranks: {reason}"):
        check_context(build(name, experts="eager"))


def by_a_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(float(x.shape[1]), dtype=x.dtype, device=x.device)


def by_full(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_full((x.shape[1], 1), x.shape[1])


def over_a_length(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] > 100 else x


def blocks_of_tokens(x: torch.Tensor) -> torch.Tensor:
    blocks = x.view(-1, 4, x.shape[2])
    return (blocks - blocks.mean(1, keepdim=True)).view_as(x)


def rows_of_places(x: torch.Tensor) -> torch.Tensor:
    return x + x.new_empty(4096, 32).gather(1, x[0].argsort(-1))


def rows_among_tokens(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).reshape(x.shape)


def by_frequency(x: torch.Tensor) -> torch.Tensor:
    return x + F.embedding(x.argmax(-1), x.new_empty(32, 32), scale_grad_by_freq=True)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (by_a_tensor, "a tensor is made of other numbers than on one rank"),
        (by_full, "new_full has other numbers than on one rank"),
        (over_a_length, "it takes another way than on one rank"),
        (blocks_of_tokens, "view.default puts tokens together"),
        (rows_of_places, "gather goes along a divided dimension"),
        (rows_among_tokens, "a view mixes a divided dimension with others"),
        (by_frequency, "embedding scales gradients by how often a rank has a token"),
    ],
)
def test_numbers_that_a_part_of_a_sequence_has_otherwise_are_found(
    between: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    model = llama()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: between(forward(x))
    with pytest.raises(UsageError, match=f"cannot be divided over cp=2 ranks: {reason}"):
        check_context(model)


@pytest.mark.parametrize("name", ["scaling", "indices"])
def test_attention_that_a_part_of_a_sequence_has_otherwise_is_found(name: str) -> None:
    class Attention(LlamaAttention):
        def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
            if name == "scaling":
                self.scaling = 1 / hidden_states.shape[1]
            else:
                named["indices"] = hidden_states
            return super().forward(hidden_states, **named)

    model = llama()
    model.model.layers[1].self_attn.__class__ = Attention
    reason = "mul has other numbers than on one rank" if name == "scaling" else "its attention has indices"
    with pytest.raises(UsageError, match=reason):
        check_context(model)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "MistralForCausalLM", "GotOcr2ForConditionalGeneration"])
def test_arguments_that_attention_need_not_know_are_taken(name: str) -> None:
    check_context(build(name, experts="eager"))
    module: Any = nn.Identity()
    q = torch.zeros(1, 2, 4, 8)
    _attends[module] = lambda query, *_: query
    assert _attention(module, q, q, q, None, num_items_in_batch=torch.tensor(3))[0].shape == (1, 4, 2, 8)


def test_tokens_of_a_model_whose_loss_has_no_logits_are_divided() -> None:
    model = llama()
    memo.loss_without_logits(model)
    check_context(model)


def test_a_loss_that_is_added_to_in_place_is_not_divided() -> None:
    class Added(LlamaForCausalLM):
        def forward(self, *args: Any, **named: Any) -> Any:
            output = super().forward(*args, **named)
            output.loss += output.logits.mean()
            return output

    model = llama()
    model.__class__ = Added
    with pytest.raises(UsageError, match="its loss is not its loss_function's alone"):
        check_context(model)


def test_a_loss_function_of_its_own_is_not_divided() -> None:
    def mean(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **named: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())

    model: Any = llama()
    model.loss_function = mean
    with pytest.raises(UsageError, match="has no loss of a causal language model, which cp divides"):
        check_context(model)


def test_a_model_as_it_was_after_its_tokens_were_checked() -> None:
    model = llama()
    before = dict(vars(model.config)), dict(vars(model))
    check_context(model)
    assert (dict(vars(model.config)), dict(vars(model))) == before


def test_a_module_of_two_names_keeps_its_weights_when_it_is_looked_at() -> None:
    model = llama()
    model.twin = model.model.layers[0].mlp
    calls_of(model, list(model.model.layers), tokens=8)
    check_context(model)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "attention_mask: with cp each token sees all before it"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids: with cp tokens are numbered from 0"),
        ({"input_ids": torch.zeros(1, 5, dtype=torch.int64)}, "a sequence of 5 tokens does not divide over cp=2"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds: with cp a forward takes input_ids, labels"),
        ({"past_key_values": object()}, "without past_key_values"),
        ({"output_router_logits": True}, "output_router_logits: with cp a forward takes input_ids, labels"),
        ({"ignore_index": 3}, "ignore_index: with cp a forward takes input_ids, labels"),
    ],
)
def test_batches_that_context_parallelism_would_read_otherwise_are_refused(batch: dict[str, Any], reason: str) -> None:
    with fake_group(2):
        sequences = Sequences(llama(), dist.group.WORLD)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=reason):
            sequences.own({"input_ids": torch.zeros(1, 4, dtype=torch.int64), **batch})


class Block(nn.Module):
    """A residual MLP, with something between its matrices."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 32), between, nn.Linear(32, 16))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.mlp(hidden_states)


class Halves(nn.Module):
    """Two projections fused in a matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * second.sigmoid(), second], -1)


class Shifted(nn.Module):
    """Each column takes its neighbour's value, which at a part's edge another rank has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (1, -1))


class PerColumn(nn.Module):
    """Values of the divided dimension, which ranks would all have whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Normed(nn.Module):
    """A norm without a weight, which would run on a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()


def found(between: nn.Module) -> Division:
    layer = Block(between)
    call = ((torch.empty(1, 32, 16, device="meta"),), {})
    return divide(layer, call, parts_by_rules(layer, call), ranks=2, sequence=False, by_rules=True)


def test_a_residual_mlp_is_divided_by_its_outputs_and_inputs() -> None:
    division = found(nn.GELU())
    assert {name: part.kind for name, part in division.parts.items()} == {"mlp.0": Kind.COLUMN, "mlp.2": Kind.ROW}
    assert division.boundaries == {"mlp": Boundary.ENTRY}


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.LayerNorm(32), "normalized_shape"),
        (Normed(), "mean goes along a divided dimension"),
        (nn.Softmax(-1), "_softmax goes along a divided dimension"),
        (PerColumn(), "broadcast"),
        (nn.Dropout(0.5), "dropout in a divided part gives all ranks the same mask"),
        (nn.Linear(32, 32), "must have same reduction dim"),
        (Shifted(), "constant_pad_nd shifts what is divided"),
    ],
)
def test_what_mixes_the_parts_of_ranks_is_refused(between: nn.Module, reason: str) -> None:
    with pytest.raises(NotDivisible, match=reason):
        found(between)


def test_a_matrix_of_two_projections_is_not_cut_in_halves() -> None:
    layer = Block(Halves())
    call = ((torch.empty(1, 32, 16, device="meta"),), {})
    parts = {"mlp.0": DividedModule(kind=Kind.COLUMN), "mlp.2": DividedModule(kind=Kind.ROW)}
    division = Division(parts=parts, boundaries={"mlp": Boundary.ENTRY})
    with pytest.raises(NotDivisible, match="split takes apart a divided dimension"):
        check(layer, call, division, run_wide(layer, call, parts, {}, ranks=2), ranks=2, sequence=False)


class Shared(nn.Module):
    """A second way from the module's input to its output, whose gradient every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) * x


def test_a_gradient_that_ranks_would_count_twice_moves_the_boundary() -> None:
    layer = Block(nn.GELU())
    layer.mlp = Shared()  # type: ignore[assignment]
    call = ((torch.empty(1, 32, 16, device="meta"),), {})
    division = divide(layer, call, parts_by_rules(layer, call), ranks=2, sequence=False, by_rules=True)
    assert division.boundaries["mlp.up"] is Boundary.ENTRY


class Looped(nn.Module):
    """Runs its first layer twice."""

    def __init__(self, between: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.layers = nn.ModuleList(Block(between()) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(input_ids)
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("between", "advice"), [(nn.GELU, "give memo.parallelize sequence_parallel=False"), (nn.Dropout, "use pp and dp")]
)
def test_only_advice_that_helps_is_given(between: type[nn.Module], advice: str) -> None:
    with pytest.raises(UsageError, match=f"Block cannot be divided over 2 ranks: it runs more than once .*; {advice}$"):
        memo.parallelize(Looped(between), tp=2)


def llama(layers: int = 2) -> LlamaForCausalLM:
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"pp": 4}, "4 pipeline stages are more than the 2 layers of LlamaForCausalLM; use pp=2"),
        ({"pp": 2, "schedule": "interleaved-1f1b"}, "4 pipeline stages .* use pp=2, schedule='1f1b'"),
        ({"tp": 3}, "3 ranks do not divide the model's 4 heads; each needs whole ones; 2 would"),
        (
            {"cp": 3},
            "the tokens of LlamaForCausalLM cannot be divided over cp=3 ranks: 3 ranks do not divide the 4 heads",
        ),
        ({"tp": 2, "tokens": 4096}, "tokens has no meaning without pp"),
        ({"pp": 2, "microbatches": 1}, "microbatches=1 is too few for 1f1b on 2 pipeline ranks; at least 2"),
        (
            {"pp": 2, "schedule": "zbv"},
            "'zbv' is none of those for models of transformers: gpipe, 1f1b, interleaved-1f1b",
        ),
        ({"pp": 2, "stage_layers": (2, 3)}, r"stage_layers=\(2, 3\) add up to 5; the model has 2 layers"),
        (
            {"pp": 2, "stage_layers": (2,)},
            r"stage_layers=\(2,\): give a number of layers for each of the 2 pipeline stages",
        ),
        ({"pp": 2, "stage_layers": (2, 0)}, r"stage_layers=\(2, 0\) has a stage of 0 layers"),
        ({"pp": 2, "microbatches": 0}, "microbatches=0 is less than 1"),
        ({"tp": 2, "microbatches": 4}, "microbatches has no meaning without pp"),
        ({"dp": 2, "schedule": "gpipe"}, "schedule has no meaning without pp"),
        ({"tp": 2}, "tp=2, pp=1, dp=1, cp=1 need 2 processes, and 1 was started: torchrun --nproc-per-node 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(sizes: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        memo.parallelize(llama(), **sizes)  # type: ignore[arg-type]


def test_a_model_without_layers_is_not_divided() -> None:
    with pytest.raises(UsageError, match=r"memo\.parallelize divides models with a ModuleList of equal layers"):
        memo.parallelize(nn.Linear(2, 2), tp=2)


def test_layers_that_are_left_out_by_chance_are_refused() -> None:
    shape = {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    with pytest.raises(UsageError, match="layerdrop leaves layers out by chance"):
        memo.parallelize(OPTForCausalLM(OPTConfig(**shape, num_hidden_layers=2, layerdrop=0.1)), dp=2)


class Shallow(nn.Module):
    """Layers whose hidden states a loss reads beside the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.layers = nn.ModuleList(Block(nn.GELU()) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = [self.embedding(input_ids)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return hidden[2] + hidden[1].square().mean()


@pytest.mark.parametrize(("sizes", "advice"), [({"tp": 2}, "sequence_parallel=False"), ({"pp": 2}, "use tp and dp")])
def test_hidden_states_that_are_read_between_layers_are_refused(sizes: dict[str, int], advice: str) -> None:
    with pytest.raises(UsageError, match=f"uses hidden states between its layers elsewhere, too.*; .*{advice}"):
        memo.parallelize(Shallow(), **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("drops", [False, True])
def test_dropout_outside_of_divided_parts_is_known(drops: bool) -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_head=4, n_layer=2, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0.1 * drops)
    )
    assert calls_of(model, list(model.transformer.h), tokens=8).draws is drops


def test_two_stacks_of_layers_are_no_pipeline() -> None:
    config = T5Config(vocab_size=61, d_model=32, num_heads=4, d_kv=8, d_ff=64, num_layers=2, decoder_start_token_id=0)
    with pytest.raises(UsageError, match="T5ForConditionalGeneration has an encoder and a decoder"):
        memo.parallelize(T5ForConditionalGeneration(config), pp=2)


def test_stages_are_balanced_with_the_projection_of_the_last() -> None:
    assert balanced([1.0] * 8, 2, last=2.0) == [range(5), range(5, 8)]
    assert balanced([1.0, 1.0, 4.0, 1.0], 3, last=0.0) == [range(2), range(2, 3), range(3, 4)]
    assert balanced([1.0] * 3, 3, last=9.0) == [range(1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize(
    ("tokens", "layers"), [(32, [9, 9, 9, 5]), (1 << 17, [8, 8, 8, 8])], ids=["the projection counts", "scores do"]
)
def test_stages_are_balanced_by_the_work_on_a_sequence(tokens: int, layers: list[int]) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=32, vocab_size=160_000))
    own = list(model.model.layers)
    calls = calls_of(model, own, tokens=32)
    assert [len(stage) for stage in _stage_ranges(own, calls, 4, (), tokens)] == layers


def test_experts_count_as_the_tokens_that_they_get() -> None:
    model = build("MixtralForCausalLM", experts="eager")
    layer = model.model.layers[0]
    whole = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    experts = sum(p.numel() for p in layer.mlp.experts.parameters())
    active = whole - experts + experts * model.config.num_experts_per_tok // model.config.num_local_experts
    calls = calls_of(model, list(model.model.layers), tokens=32)
    assert calls.flops[layer][0] == pytest.approx(2 * 32 * active, rel=0.02)


def test_attention_beside_experts_is_divided() -> None:
    model = build("MixtralForCausalLM", experts="eager")
    calls = calls_of(model, list(model.model.layers), tokens=32)
    for division in find_divisions(model, calls.layers, ranks=2, sequence=True).values():
        assert division.whole == {}
        assert {"self_attn.q_proj", "mlp.experts"} <= set(division.parts)


class Normalised(torch.autograd.Function):
    """The identity, whose gradient has length one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}])
def test_a_backward_that_nobody_has_looked_at_is_refused(sizes: dict[str, int]) -> None:
    model = llama()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: Normalised.apply(forward(x))  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match="an autograd function of its own, Normalised, whose backward may mix"):
        memo.parallelize(model, **sizes)  # type: ignore[arg-type]


def test_weights_that_layers_share_are_refused() -> None:
    model = llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(
        UsageError, match=r"layers.0.mlp.gate_proj.weight and model.layers.1.mlp.gate_proj.weight are one"
    ):
        memo.parallelize(model, tp=2)


def test_an_adapter_that_may_become_active_later_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear")
    model = get_peft_model(llama(), config)
    model.add_adapter("second", config)
    with pytest.raises(UsageError, match=r"lora_A\.second\.weight is not used in a forward, as an adapter"):
        memo.parallelize(model, tp=2)


def test_adapters_of_embeddings_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]))
    with pytest.raises(UsageError, match=r"embed_tokens\.lora_embedding_A has weights for another module"):
        memo.parallelize(model, tp=2)


def test_the_shard_is_saved_only_for_all_of_what_was_gathered_as_it_was() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        shard = torch.randn(2, 4, 8, requires_grad=True)
        whole = enter(shard, dist.group.WORLD, sequence=True)
        assert kept_for(whole)[0].data_ptr() == shard.data_ptr()
        for other in (whole.transpose(0, 1), whole[:, :4], whole.mul_(2)):
            assert kept_for(other)[0] is other
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_outputs_of_which_a_rank_has_a_part_are_refused(asked: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = memo.parallelize(llama(), tp=2)
        with pytest.raises(UsageError, match=f"{asked}: under tensor parallelism a rank has its own part"):
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64), **{asked: True})
    finally:
        dist.destroy_process_group()
