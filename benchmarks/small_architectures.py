"""The language models of the installed transformers, built small with random weights, and batches of tokens for them.

Sizes go by the names that configurations give them, so that a new architecture is built without a line here; what that
does not fit has an entry in OWN. Weights are perturbed after their initialisation: a gate or a scale that begins at zero
would hide what lies behind it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

VOCAB, SEQ, BATCH = 128, 160, 2

_KINDS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")

_HIDDEN, _INNER, _HEADS, _GROUPS, _HEAD, _DEPTH, _LENGTH = 64, 128, 4, 2, 16, 2, 256

_BY_VALUE: tuple[tuple[int, str], ...] = (
    (0, "num_nextn_predict_layers num_kv_shared_layers ple_layer_ids"),
    (1, """n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts num_dense_layers
        first_k_dense_replace moe_layer_start_index"""),
    (_GROUPS, """num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok moe_k
        num_experts_per_token moe_topk n_mamba_heads mamba_n_groups n_groups zero_expert_num mamba_expand o_groups kv_n_heads
        indexer_kv_heads"""),
    (_DEPTH, """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers num_blocks num_layers_per_stack speech_encoder_layers t2u_encoder_layers t2u_decoder_layers
        max_window_layers num_self_attends_per_block"""),
    (_HEADS, """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads mamba_n_heads mamba_num_heads
        linear_num_value_heads linear_num_heads num_experts n_routed_experts num_local_experts moe_num_experts index_n_heads
        linear_conv_kernel_dim num_self_attention_heads num_cross_attention_heads indexer_n_heads"""),
    (_HEAD // 2, """qk_rope_head_dim rotary_dim centroid_intermediate_top_k time_step_rank mamba_dt_rank num_buckets
        gated_norm_rank"""),
    (_HEAD, """head_dim d_kv d_head dim_head swa_head_dim kv_channels attention_head_size attention_head_dim v_head_dim
        qk_nope_head_dim q_lora_rank kv_lora_rank linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim
        state_size mamba_d_state ssm_state_size index_topk o_lora_rank laurel_rank d_rel rel_extent num_centroids
        query_pre_attn_scalar indexer_head_dim hc_lowrank adapter_rank embedding_rank"""),
    (2 * _HEAD, """mamba_d_head mamba_head_dim sliding_window sliding_window_size window_size local_attention block_size
        chunk_size mamba_chunk_size attention_chunk_size keep_window_size attention_window pronunciation_embed_dim
        shape_embed_dim local_attn_chunk_length lsh_attn_chunk_length floor_scale"""),
    (_HIDDEN, """hidden_size d_model n_embd emb_dim embedding_size embedding_dim attention_hidden_size word_embed_proj_dim
        input_embedding_size output_embedding_size backbone_hidden_size hidden_size_per_layer_input pooler_hidden_size
        encoder_hidden_size decoder_hidden_size d_latents moe_intermediate_size shared_expert_intermediate_size
        shared_experts_intermediate_size shared_intermediate_size num_latents audio_hidden_size"""),
    (_INNER, """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dff dim_ff d_inner n_inner ffn_hidden_size
        feed_forward_size expert_ffn_hidden_size intermediate_size_mlp dense_intermediate_size block_ff_dim mamba_d_ssm"""),
    (VOCAB, """vocab_size vocab_size_per_layer_input decoder_vocab_size src_vocab_size tgt_vocab_size unpadded_vocab_size
        ngram_vocab_size_base"""),
    (_LENGTH, """max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_sequence_length seq_length
        original_max_position_embeddings max_source_positions max_target_positions context_length"""),
)  # fmt: skip
_SIZES: dict[str, int] = {name: value for value, named in _BY_VALUE for name in named.split()}

_EVEN_IF_NONE = {"head_dim", "num_key_value_heads", "num_attention_heads", "n_group", "topk_group", "vocab_size"}
_EVEN_IF_NONE |= {"num_experts_per_tok", "n_routed_experts", "n_shared_experts"}
"""Sizes that a configuration may leave open, though its model reads them."""
_DROPOUTS = (
    "dropout",
    "pdrop",
    "drop_rate",
    "dropout_prob",
    "layerdrop",
    "dropout_p",
    "dropout_rate",
    "attention_probs_dropout_prob",
)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}

OWN: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "Dots3NoteTextConfig": {"head_dim": _HEAD + _HEAD // 2},
    "EsmcConfig": {"num_key_value_heads": _HEADS},
    "FalconH1Config": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128},
    "Gemma4AssistantConfig": {"hidden_size_per_layer_input": 0},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 4, "head_dim": 32},
    "Inkling2TextConfig": {"num_hidden_layers": 4},
    "OlmoHybridConfig": {"num_hidden_layers": 4},
    "PerceiverForMaskedLM": {"max_position_embeddings": SEQ, "d_model": 64},
    "ReformerConfig": {"axial_pos_shape": [10, 16], "axial_pos_embds_dim": [16, 48], "hash_seed": 1, "num_buckets": 4},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32},
    "Zamba2Config": {
        "num_hidden_layers": 4, "num_key_value_heads": _HEADS, "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Fields of configurations, by model class or configuration class, that the sizes by name do not fit."""
_WITHOUT_LABELS = {"GitForCausalLM"}
"""Models whose own loss needs other inputs."""


def use_key_heads(count: int) -> None:
    """Builds models with so many key/value heads from now on."""
    for name in ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "kv_n_heads"):
        _SIZES[name] = count


def use_depth(count: int) -> None:
    """Builds models with so many layers from now on."""
    global _DEPTH
    _DEPTH = count
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        _SIZES[name] = count


def names() -> list[str]:
    """Classes of causal, masked and sequence-to-sequence models, in the order of their names."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for kind in _KINDS:
        for value in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values():
            found.update([value] if isinstance(value, str) else value)
    return sorted(found, key=str.lower)


def build(name: str, *, dropout: float = 0.0, attention: str | None = None, experts: str | None = None) -> nn.Module:
    """The model of this class, small, in float32 and training mode.

    Args:
        name: class in transformers.
        dropout: probability of every dropout that its configuration names.
        attention: implementation of attention; None is its default.
        experts: implementation of routed experts; None is its default.
    """
    import transformers

    made = getattr(transformers, name)
    config = small(made.config_class, OWN.get(name, {}), dropout=dropout)
    if hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = not name.endswith("ForMaskedLM")
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = _TOKENS["decoder_start_token_id"]
    if attention is not None:
        config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts
    torch.manual_seed(0)
    model: nn.Module = made(config).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def small(kind: Any, own: dict[str, Any] | None = None, *, dropout: float = 0.0) -> Any:
    """A configuration of class `kind` with small sizes, its parts' too."""
    given = {**OWN.get(kind.__name__, {}), **(own or {})}
    default = kind(**{field: value for field, value in given.items() if field == "hidden_size_per_layer_input"})
    fields = default.to_dict()
    made: dict[str, Any] = {}
    for field, value in fields.items():
        part = None if field == "per_layer_config" else default.__dict__.get(field)
        if hasattr(part, "to_dict"):
            made[field] = small(type(part), dropout=dropout)
        elif field == "per_layer_config":
            made[field] = None
        elif field in _SIZES and (field in _EVEN_IF_NONE if value is None else type(value) is int):
            made[field] = _SIZES[field]
        elif field in _TOKENS:
            made[field] = _TOKENS[field]
        elif field.endswith(_DROPOUTS) and type(value) in (float, int):
            made[field] = type(value)(dropout)
        elif field == "use_cache":
            made[field] = False
        elif isinstance(value, list) and len(value) == _depth(fields) and len(value) > _DEPTH:
            made[field] = _shortened(value, given.get("num_hidden_layers", _DEPTH))
    if "kv_lora_rank" in fields:
        made["num_key_value_heads"] = _HEADS
        if fields.get("head_dim") == fields.get("qk_rope_head_dim"):
            made["head_dim"] = _SIZES["qk_rope_head_dim"]
    return kind(**{**made, **given})


def _depth(fields: dict[str, Any]) -> int:
    return next(
        (fields[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if fields.get(name)), 0
    )


def _shortened(value: list[Any], depth: int) -> list[Any]:
    """As many entries as there are layers; different ones in turn, where there are different ones."""
    other = next((entry for entry in value if entry != value[0]), value[0])
    return [value[0], other] * (depth // 2)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a batch that depends on `step` alone."""
    ids = torch.randint(3, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(step)).to(model.device)
    config: Any = model.config
    given: dict[str, Any] = {"input_ids": ids}
    accepted = inspect.signature(model.forward).parameters
    if "labels" in accepted and type(model).__name__ not in _WITHOUT_LABELS:
        given["labels"] = ids
    if "use_cache" in accepted:
        given["use_cache"] = False
    if getattr(config, "is_encoder_decoder", False) and "labels" in given:
        given["labels"] = ids.flip(1)
    found = model(**given)
    loss = getattr(found, "loss", None)
    if loss is None:
        logits = getattr(found, "logits", None)
        logits = found[0] if logits is None else logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, -2)[: ids.numel()], ids.flatten())
    return loss.mean() if loss.dim() else loss
