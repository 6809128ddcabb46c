"""The derived profile: the paper's facts, and its bytes and FLOPs against what autograd saves and what really runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from activation_problems import plan_activations
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from memo.errors import UsageError
from memo.gpt import GPTConfig, Precision, Variant, preset
from memo.gpt.arithmetic import StepLayout, TrainingMethod, derive_profile
from memo.gpt.arithmetic.flops import layer_parameter_count, recompute_flops_per_token
from memo.gpt.model.model import Block
from memo.gpt.model.rotary import rotary_tables
from memo.mip.activation import Budgets
from memo.mip.inputs import (
    ALL,
    ATTENTION,
    AttentionKernel,
    Hardware,
    LayerProfile,
    Network,
    Profile,
    free_swap_tokens,
    hardware_preset,
)

GIB = 1 << 30
PAPER = StepLayout(tokens=1 << 20, gpus=8, tp=8)
A800 = hardware_preset("a800")
SHORT = preset("7b", max_seq=2048)
# Per token, the paper counts whole tensors alone: statistics of attention (one float a head) and of the norms (two
# bfloat16 each) come on top of its 16 units.
STATISTICS = 4 * 32 + 2 * 2 * 2


def paper_layer() -> LayerProfile:
    return derive_profile(preset("7b"), A800, PAPER).classes[0]


def without_statistics(layer: LayerProfile) -> float:
    return layer.full_bytes - STATISTICS * PAPER.tokens / 8


def test_7b_at_a_million_tokens_has_4096_gib_of_skeletal_activations() -> None:
    assert without_statistics(paper_layer()) * 8 * 32 == 4096 * GIB


def test_attentions_output_is_a_sixteenth_of_them_and_the_layers_input_another() -> None:
    layer = paper_layer()
    always = layer.always_bytes - 4 * 32 * PAPER.tokens / 8
    assert always == 2 * without_statistics(layer) / 16


def test_two_tebibytes_of_host_memory_cap_alpha_at_0_467() -> None:
    """(n - 2) (S_in + S_attn + alpha S_oth) <= M_cpu with 30 layers of 16 units of 1 GiB a GPU, and 256 GiB for each.

    Of the layers that move, so many are saved whole."""
    assert pytest.approx(0.467, abs=5e-4) == (256 / 30 - 2) / 14
    two_levels = only(paper_profile(), ALL, ATTENTION)
    layer = two_levels.classes[0]
    head = two_levels.head.saved_bytes + two_levels.head.transient_bytes
    room = 2 * layer.full_bytes + max(layer.transient_bytes, head - layer.full_bytes) + GIB // 8
    static = sum(known.static_bytes for known in two_levels.layer_profiles())
    static += two_levels.embedding.static_bytes + two_levels.embedding.saved_bytes + two_levels.head.static_bytes
    budgets = Budgets(device_bytes=room + static, host_bytes=2048 * GIB, ranks_per_node=8)
    plan = plan_activations(two_levels, A800, budgets)
    exact = (256 * GIB / 30 - layer.always_bytes) / layer.points[0].saved_bytes
    assert exact == pytest.approx(0.467, abs=2e-3), "statistics take a thousandth or two of alpha"
    whole = sum(plan.point == ALL and plan.kept < 0.5 for plan in plan.layers)
    assert 30 * exact - 2 <= whole <= 30 * exact + 2
    assert plan.stages[0].stall_s == 0


def test_the_middle_level_saves_more_time_than_the_papers_two() -> None:
    profile = derive_profile(preset("7b"), A800, StepLayout(tokens=1 << 20, gpus=8, cp=8))
    whole = plan_activations(profile, A800, FULL_NODE)
    two = plan_activations(only(profile, ALL, ATTENTION), A800, FULL_NODE)
    assert whole.stages[0].recompute_s < 0.6 * two.stages[0].recompute_s
    assert two.stages[0].recompute_s > 0.0


@pytest.mark.parametrize("layout", [{"tp": 8}, {"tp": 2, "cp": 4}, {"cp": 8}], ids=str)
def test_the_middle_level_keeps_ten_sixteenths_however_the_ranks_are_arranged(layout: dict[str, int]) -> None:
    """Input, attention, queries to values, the projection after attention, four of the MLP. Of what ranks sum the sum."""
    layer = derive_profile(preset("7b"), A800, StepLayout(tokens=1 << 20, gpus=8, **layout)).classes[0]
    unit = 2 * 4096 * (1 << 20) // 8
    assert layer.always_bytes - 4 * 32 * PAPER.tokens / 8 == 2 * unit
    assert layer.points[1].saved_bytes == 8 * unit


def test_the_middle_level_repeats_no_collective_of_tensor_parallelism() -> None:
    """Level `matmuls` takes the same time at any link rate; level `attention` repeats three of the four collectives."""
    slow, fast = (
        derive_profile(preset("7b"), dataclasses.replace(A800, nvlink_bytes_per_s=rate), PAPER).classes[0]
        for rate in (100e9, 200e9)
    )
    assert slow.points[1].recompute_s == fast.points[1].recompute_s
    collectives_s = 2 * (slow.forward_s - fast.forward_s)
    assert 2 * (slow.points[2].recompute_s - fast.points[2].recompute_s) == pytest.approx(3 / 4 * collectives_s)


@pytest.mark.parametrize(("bytes_per_s", "tokens"), [(32e9, 50_848), (13e9, 197_002)])
def test_the_length_above_which_full_swap_hides(bytes_per_s: float, tokens: int) -> None:
    """16 * 2 h bytes against 24 h^2 + 2 s h FLOPs, a token and layer: 51K tokens at 32 GB/s, 197K at 13 GB/s.

    The paper reports 192K for its nodes, where pairs of GPUs share a switch.
    """
    machine = only_matrix_products(bytes_per_s)
    profile = derive_profile(preset("7b"), machine, PAPER)
    layer = profile.classes[0]
    bare = dataclasses.replace(
        layer,
        always_bytes=layer.always_bytes - 4 * 32 * PAPER.tokens // 8,
        points=(dataclasses.replace(layer.points[0], saved_bytes=layer.points[0].saved_bytes - 8 * PAPER.tokens // 8),),
    )
    found = free_swap_tokens(dataclasses.replace(profile, classes=(bare,)), machine, ranks_per_node=8)
    assert found is not None
    assert found == pytest.approx(tokens, rel=1e-3)
    assert found == pytest.approx(16 * 200e12 / bytes_per_s - 12 * 4096, rel=1e-3)


def test_full_swap_hides_from_its_crossover_on_and_not_below() -> None:
    machine, layout = only_matrix_products(13e9), PAPER
    length = free_swap_tokens(derive_profile(preset("7b"), machine, layout), machine, ranks_per_node=8)
    assert length is not None
    for tokens, free in ((length * 1.01, True), (length * 0.99, False)):
        layer = derive_profile(preset("7b"), machine, dataclasses.replace(layout, tokens=int(tokens))).classes[0]
        assert (layer.full_bytes / 13e9 <= layer.forward_s) is free


def paper_profile() -> Profile:
    return derive_profile(preset("7b"), A800, PAPER)


FULL_NODE = Budgets(device_bytes=80 * GIB, host_bytes=2048 * GIB, ranks_per_node=8)


def only(profile: Profile, *names: str) -> Profile:
    classes = tuple(
        dataclasses.replace(known, points=tuple(point for point in known.points if point.name in names))
        for known in profile.classes
    )
    return dataclasses.replace(profile, classes=classes)


def only_matrix_products(link_bytes_per_s: float) -> Hardware:
    """200 TFLOP/s in everything, and memory and NVLink so fast that nothing else takes time."""
    return dataclasses.replace(
        A800,
        peak_flops=200e12,
        matmul_efficiency=1.0,
        attention=(AttentionKernel.alike(1.0),),
        hbm_bytes_per_s=1e25,
        nvlink_bytes_per_s=1e25,
        d2h_bytes_per_s=link_bytes_per_s,
        node_d2h_bytes_per_s=1e15,
    )


# Against the model itself.

TOKENS, BATCH = 96, 2


def block_config(variant: Variant, **rest: object) -> GPTConfig:
    return preset("tiny", variant=variant, hidden=256, heads=4, **rest)


def saved_of_block(config: GPTConfig) -> dict[str, int]:
    """Bytes of the storages that autograd saves of one block in bfloat16, by the shape and type of the tensor."""
    torch.manual_seed(0)
    block = Block(config).to(torch.bfloat16)
    hidden = torch.randn(BATCH, TOKENS, config.hidden, dtype=torch.bfloat16, requires_grad=True)
    tables = None
    if config.positions == "rotary":
        tables = rotary_tables(TOKENS, config.head_dim, config.rope_theta, device=hidden.device, dtype=hidden.dtype)
    outside = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *(tables or ()))}
    alive: list[torch.Tensor] = []
    seen: dict[int, tuple[str, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            seen.setdefault(storage.data_ptr(), (f"{tensor.dtype} {tuple(tensor.shape)}", storage.nbytes()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(hidden, tables)
    found: dict[str, int] = {}
    for name, nbytes in seen.values():
        found[name] = found.get(name, 0) + nbytes
    return found


def derived_layer(config: GPTConfig) -> LayerProfile:
    return derive_profile(config, A800, StepLayout(tokens=TOKENS, batch=BATCH)).classes[0]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_bytes_are_those_that_autograd_saves(positions: str, kv_heads: int, bias: bool) -> None:
    config = block_config("gpt", positions=positions, kv_heads=kv_heads, bias=bias)
    assert derived_layer(config).full_bytes == sum(saved_of_block(config).values())


def test_bytes_of_the_llama_variant_but_for_the_norms_which_the_cpu_writes_out_in_float32() -> None:
    config = block_config("llama")
    wide = BATCH * TOKENS * config.hidden
    saved = saved_of_block(config)
    # Of each norm the CPU saves its input and its result in float32, where a fused kernel reads its input, which is saved
    # anyway in bfloat16, as the residual of that kind.
    in_float32 = saved.pop(f"torch.float32 {(BATCH, TOKENS, config.hidden)}")
    assert in_float32 == 2 * 2 * 4 * wide
    assert derived_layer(config).full_bytes == sum(saved.values()) + 2 * 2 * wide


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_flops_are_those_that_run(variant: Variant) -> None:
    config = block_config(variant)
    block = Block(config)
    hidden = torch.randn(BATCH, TOKENS, config.hidden, requires_grad=True)
    tables = None
    if config.positions == "rotary":
        tables = rotary_tables(TOKENS, config.head_dim, config.rope_theta, device=hidden.device, dtype=hidden.dtype)
    with FlopCounterMode(display=False) as counter:
        block(hidden, tables)
    by_operator = counter.get_flop_counts()["Global"]
    layer = derived_layer(config)
    projections = sum(count for name, count in by_operator.items() if "attention" not in str(name))
    assert layer.forward_flops - layer.attention_flops == projections
    # Two products of tokens x tokens x hidden, two FLOPs each, of which a causal mask leaves half.
    assert layer.attention_flops == 2 * 2 * TOKENS * TOKENS * config.hidden * BATCH / 2


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_levels_save_less_and_repeat_more(variant: Variant) -> None:
    config = block_config(variant)
    layer = derived_layer(config)
    whole, matmuls, attention = layer.points
    assert whole.saved_bytes > matmuls.saved_bytes > attention.saved_bytes == 0
    assert whole.recompute_s == 0.0 < matmuls.recompute_s < attention.recompute_s < layer.forward_s
    assert (matmuls.recompute_flops, whole.recompute_flops) == (0.0, 0.0)
    expected = recompute_flops_per_token(config) / config.layers * TOKENS * BATCH
    assert attention.recompute_flops == expected


def static_bytes(config: GPTConfig, layout: StepLayout, **rest: object) -> int:
    """Of all layers."""
    return sum(layer.static_bytes for layer in derive_profile(config, A800, layout, **rest).layer_profiles())


def layer_parameters(config: GPTConfig) -> int:
    return config.layers * layer_parameter_count(config)


@pytest.mark.parametrize(("precision", "state"), [(Precision.BF16, 8), (Precision.FP32, 16)])
def test_weights_gradients_and_moments_are_divided_over_all_ranks(precision: Precision, state: int) -> None:
    config, layout = preset("13b"), StepLayout(tokens=4096, gpus=16, tp=4, cp=2)
    static = static_bytes(config, layout, precision=precision)
    assert static * 16 == pytest.approx(state * layer_parameters(config), rel=1e-4)


def test_the_ends_weights_and_gradients_are_whole_through_a_step() -> None:
    config = preset("13b")
    embedding = derive_profile(config, A800, StepLayout(tokens=4096, gpus=16, tp=4)).embedding
    table = config.vocab_size * config.hidden
    assert embedding.static_bytes == pytest.approx((8 / 4 + 2 + 2) * table / 4, rel=1e-6)
    alone = derive_profile(config, A800, StepLayout(tokens=4096, gpus=4, tp=4)).embedding
    assert alone.static_bytes == pytest.approx(8 * table / 4, rel=1e-6)


def test_a_stage_of_tied_embeddings_has_a_copy_of_its_own() -> None:
    config = preset("350m")
    assert config.tie_embeddings
    one, two = (derive_profile(config, A800, StepLayout(tokens=1024, gpus=pp, pp=pp)) for pp in (1, 2))
    assert (one.head.static_bytes, one.optimizer_exchange_s) == (0, 0)
    positions = 8 * 1024 * config.hidden  # with their gradients and optimizer state
    assert two.head.static_bytes + positions == two.embedding.static_bytes
    assert two.optimizer_exchange_s > 0


def test_what_is_sharded_less_takes_more_memory_and_no_more_gathers() -> None:
    config, layout = preset("7b"), StepLayout(tokens=8192, gpus=16)
    static = [static_bytes(config, layout, method=TrainingMethod(zero=zero)) for zero in (0, 1, 2, 3)]
    assert static == sorted(static, reverse=True)
    gathers = [
        derive_profile(config, A800, layout, TrainingMethod(zero=zero)).classes[0].gather_s > 0 for zero in (0, 1, 2, 3)
    ]
    assert gathers == [False, False, False, True]


def test_gradients_of_several_microbatches_are_added_up_whole() -> None:
    config, layout = preset("13b"), StepLayout(tokens=4096, gpus=16, tp=4)
    added = static_bytes(config, layout, accumulate=2) - static_bytes(config, layout)
    assert added == pytest.approx(2 * layer_parameters(config) / 4, rel=1e-4)
    # Alone with its shard, a rank adds them up in place.
    alone = StepLayout(tokens=4096, gpus=4, tp=4)
    assert static_bytes(config, alone, accumulate=2) == static_bytes(config, alone)


def test_a_pipeline_keeps_a_steps_weights_and_gradients_whole() -> None:
    config, piped = preset("13b"), StepLayout(tokens=4096, gpus=16, pp=2)
    more = static_bytes(config, piped) - 8 * layer_parameters(config) / 8
    assert more == pytest.approx((2 + 2) * layer_parameters(config), rel=1e-4)  # of all stages
    profile = derive_profile(config, A800, piped)
    whole = derive_profile(config, A800, StepLayout(tokens=4096, gpus=2, pp=2))
    assert profile.classes[0].backward_transient_bytes == whole.classes[0].backward_transient_bytes


def test_collectives_of_weights_grow_with_the_nodes() -> None:
    def layer(gpus: int, **layout: int) -> LayerProfile:
        return derive_profile(preset("7b"), A800, StepLayout(tokens=4096, gpus=gpus, **layout)).classes[0]

    seconds = [(one.gather_s, one.sync_s) for one in map(layer, (1, 8, 64, 1024))]
    assert seconds[0] == (0, 0)
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 4


def test_tensor_parallelism_beyond_a_node_runs_at_the_rate_of_its_nics() -> None:
    inside, across = (
        derive_profile(preset("7b"), A800, StepLayout(tokens=1 << 20, gpus=ranks, tp=ranks)).classes[0]
        for ranks in (8, 32)
    )
    network = A800.network
    nics = network.nics_per_node * network.nic_bytes_per_s * network.nic_efficiency
    nbytes = (1 << 20) * 4096 * 2  # the hidden states of all tokens
    assert across.forward_exchange_s == pytest.approx(4 * nbytes * 31 / 32 / nics, rel=1e-2)  # and latency
    assert across.forward_exchange_s > 1.5 * inside.forward_exchange_s


def test_a_pipelines_message_takes_longer_between_nodes() -> None:
    within, beyond = (
        derive_profile(preset("7b"), A800, StepLayout(tokens=1 << 20, gpus=gpus, pp=2)).send_s for gpus in (4, 16)
    )
    assert 0 < within < beyond
    # Stages of four GPUs, of which every second one hands over to another node.
    assert derive_profile(preset("7b"), A800, StepLayout(tokens=1 << 20, gpus=16, tp=4, pp=4)).send_s > 0.2 * beyond
    single = dataclasses.replace(A800, network=Network())
    with pytest.raises(UsageError, match="no network connects"):
        derive_profile(preset("7b"), single, StepLayout(tokens=1 << 20, gpus=16, tp=4, pp=4))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (StepLayout(tokens=1024, gpus=3, tp=3), "does not divide"),
        (StepLayout(tokens=1024, gpus=64, pp=64), "not make 64 pipeline stages"),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_refused(layout: StepLayout, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        derive_profile(preset("7b"), A800, layout)


def test_tiles_save_nothing_wide_and_take_longer() -> None:
    layout = StepLayout(tokens=1 << 20)
    whole, tiled, finer = (derive_profile(preset("7b", mlp_tiles=n), A800, layout) for n in (1, 4, 64))
    assert (whole.mlp_tiles, tiled.mlp_tiles) == (1, 4)
    wide = 2 * 4 * 4096 * 2 << 20  # what up and gelu give, in bfloat16
    assert whole.classes[0].full_bytes - tiled.classes[0].full_bytes == wide
    assert tiled.classes[0].transient_bytes > finer.classes[0].transient_bytes
    for less, more in ((whole, tiled), (tiled, finer)):
        assert less.classes[0].forward_s < more.classes[0].forward_s
        assert less.classes[0].backward_s < more.classes[0].backward_s
    again = 3 * 2 * 4096 * 4 * 4096 << 20  # three more products with an MLP's matrix
    assert tiled.classes[0].backward_flops - whole.classes[0].backward_flops == again


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_tiles_repeat_the_products_that_run(variant: Variant) -> None:
    def counted(config: GPTConfig) -> float:
        hidden = torch.randn(BATCH, TOKENS, config.hidden, requires_grad=True)
        tables = None
        if config.positions == "rotary":
            tables = rotary_tables(TOKENS, config.head_dim, config.rope_theta, device=hidden.device, dtype=hidden.dtype)
        with FlopCounterMode(display=False) as counter:
            Block(config)(hidden, tables).sum().backward()
        return counter.get_total_flops()

    whole = block_config(variant)
    tiled = dataclasses.replace(whole, mlp_tiles=4)
    added = derived_layer(tiled).backward_flops - derived_layer(whole).backward_flops
    assert added == counted(tiled) - counted(whole) > 0


def test_precision_says_how_many_bytes_the_stream_takes() -> None:
    """The input and the residual in four bytes rather than two: 2 + 2 of 18 units; and everything in float32."""
    unit = 4096 * 2 * PAPER.tokens / 8
    units = {}
    for precision in Precision:
        layer = derive_profile(preset("7b"), A800, PAPER, precision=precision).classes[0]
        units[precision] = round((layer.full_bytes - 4 * 32 * PAPER.tokens / 8) / unit, 2)
    assert units == {Precision.BF16: 16.0, Precision.BF16_AUTOCAST: 18.0, Precision.FP32: 32.0}


def test_gpus_are_a_multiple_of_what_is_asked_of_them() -> None:
    with pytest.raises(UsageError, match="not a multiple"):
        StepLayout(tokens=1024, gpus=8, tp=4, cp=4)


def test_gathers_and_reductions_take_time_beyond_a_node() -> None:
    one, many = (derive_profile(SHORT, A800, StepLayout(tokens=4096, gpus=gpus)) for gpus in (8, 1024))
    assert many.classes[0].gather_s > 2 * one.classes[0].gather_s > 0
    assert many.classes[0].sync_s > 2 * one.classes[0].sync_s > 0
    alone = derive_profile(SHORT, A800, StepLayout(tokens=4096))
    assert alone.classes[0].gather_s == alone.classes[0].sync_s == alone.link_share == alone.send_s == 0


def test_exchanges_are_a_part_of_the_passes() -> None:
    (layer,) = derive_profile(SHORT, A800, StepLayout(tokens=4096, gpus=8, tp=4, cp=2), TrainingMethod(zero=0)).classes
    alone = derive_profile(SHORT, A800, StepLayout(tokens=512)).classes[0]
    assert 0 < layer.forward_exchange_s < layer.forward_s
    assert layer.forward_s - layer.forward_exchange_s == pytest.approx(alone.forward_s, rel=0.15)


def test_gathered_weights_and_gradients_are_copied_in_the_passes() -> None:
    """FSDP reads and writes them on the compute stream: each layer's weights twice a step, its gradients once."""
    whole, sharded = (
        derive_profile(SHORT, A800, StepLayout(tokens=512, gpus=8), TrainingMethod(zero=zero)).classes[0]
        for zero in (0, 3)
    )
    copied_s = sharded.forward_gathered_bytes / A800.elementwise_bytes_per_s
    assert copied_s > 0
    assert sharded.forward_s == pytest.approx(whole.forward_s + copied_s)
    assert sharded.backward_s == pytest.approx(whole.backward_s + 2 * copied_s)


def test_collectives_beyond_a_node_take_a_part_of_the_link_to_the_host() -> None:
    within, beyond = (derive_profile(SHORT, A800, StepLayout(tokens=1 << 16, gpus=tp, tp=tp)) for tp in (8, 16))
    assert within.link_share == 0
    assert 0 < beyond.link_share < 1
    assert derive_profile(SHORT, A800, StepLayout(tokens=4096, gpus=16, tp=8, pp=2)).send_s > 0
