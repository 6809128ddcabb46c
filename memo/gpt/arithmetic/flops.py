"""Parameter count of a GPT, FLOPs per token, and utilisation of a machine.

Formulas use the letters N (weights that multiply a token), L (layers), h (width of all query heads), s (sequence length).
Needs no torch.

    mfu_causal   (6N +  6 L h s) tokens/s / peak     attention counted as the causal half it is
    mfu_full     (6N + 12 L h s) tokens/s / peak     attention counted as the full square
    hfu          mfu_causal, plus the FLOPs of recompute

6N: two FLOPs forward and four backward per weight and token (Kaplan et al. 2020, "Scaling Laws for Neural Language
Models", section 2.1). 12 L h s: the two products with the s x s scores, 4 h s forward and twice that backward
(Chowdhery et al. 2022, "PaLM", appendix B); a causal mask leaves half of them. The distinction between model and
hardware utilisation: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".

A layer with a window of w tokens counts in the place of s the scores within it: in mfu_causal 2 w - w^2 / s, since the
first w tokens see fewer, and in mfu_full w, the whole window of each token.
"""

from __future__ import annotations

from memo.gpt.config import GPTConfig


def parameter_count(config: GPTConfig) -> int:
    """Number of parameters; equals the sum over model.parameters()."""
    embedding = config.vocab_size * config.hidden
    positions = config.max_seq * config.hidden if config.positions == "learned" else 0
    head = 0 if config.tie_embeddings else embedding
    dense = (config.layers - config.moe_layers) * layer_parameter_count(config) + _norm_parameters(config)
    routed = config.moe_layers * expert_layer_parameter_count(config) if config.moe_layers else 0
    return embedding + positions + head + dense + routed


def layer_parameter_count(config: GPTConfig) -> int:
    """Number of parameters of one layer without experts."""
    biases = config.qkv_width + config.hidden + _mlp_matrices_up(config) * config.ffn + config.hidden
    return _layer_weights(config) + (biases if config.bias else 0) + 2 * _norm_parameters(config)


def expert_layer_parameter_count(config: GPTConfig) -> int:
    """Number of parameters of one layer with experts."""
    return layer_parameter_count(config) - mlp_parameter_count(config) + _moe_parameters(config)


def layer_matrices(config: GPTConfig) -> list[tuple[int, int]]:
    """Columns and rows of each matrix of one layer."""
    up = [(config.hidden, config.ffn)] * _mlp_matrices_up(config)
    attention = [(config.hidden, config.qkv_width), (config.heads * config.head_dim, config.hidden)]
    return [*attention, *up, (config.ffn, config.hidden)]


def adapter_parameter_count(config: GPTConfig, rank: int) -> int:
    """Number of parameters of one layer's adapters of a rank, on each of its matrices (Hu et al. 2021)."""
    return sum(rank * (columns + rows) for columns, rows in layer_matrices(config))


def mlp_parameter_count(config: GPTConfig) -> int:
    """Number of parameters of one layer's MLP."""
    biases = _mlp_matrices_up(config) * config.ffn + config.hidden
    return _mlp_weights(config) + (biases if config.bias else 0)


def matmul_parameter_count(config: GPTConfig) -> int:
    """Number N of weights that multiply a token: the layers' matrices and the output projection; of experts its top k.

    Embeddings are not counted, since they are looked up, nor are norms and biases, which are below a thousandth.
    """
    dense = (config.layers - config.moe_layers) * _layer_weights(config)
    routed = config.moe_layers * expert_layer_weights(config, of_a_token=True) if config.moe_layers else 0
    return dense + routed + config.vocab_size * config.hidden


def causal_keys(tokens: int, window: int | None = None) -> float:
    """Keys that a token attends to, on average over a sequence, of its window or of all before it."""
    return tokens / 2 if window is None else window - window * window / (2 * tokens)


def flops_per_token(config: GPTConfig, seq: int, *, causal: bool = True, lora: int = 0) -> float:
    """Model FLOPs per token, forward and backward, in a sequence of `seq` tokens: 6N + 6 L h s, or 6N + 12 L h s.

    Layers with local attention count what is in their windows.

    Where only adapters are trained, 4N, since frozen weights need no gradients, and 6 for each weight of an adapter.

    Args:
        config: the model.
        seq: sequence length s.
        causal: count the causal half of attention (6 L h s), or the full square (12 L h s).
        lora: rank of the adapters that alone are trained; 0: everything is.
    """
    windows = [config.window_of(layer, seq) for layer in range(config.layers)]
    keys = sum(causal_keys(seq, window) if causal else (window or seq) for window in windows)
    attention = 12 * config.hidden * keys
    trained = 6 * config.layers * adapter_parameter_count(config, lora)
    return float((4 if lora else 6) * matmul_parameter_count(config) + trained + attention)


def recompute_flops_per_token(config: GPTConfig, fraction: float = 1.0) -> float:
    """FLOPs per token of recomputing `fraction` of the tokens in every layer.

    Two FLOPs per weight of the layer, without its last projection, on which no saved tensor depends, and without attention,
    whose output is kept (docs/design.md, "Recompute").
    """
    redone = _layer_weights(config) - config.ffn * config.hidden
    return 2.0 * config.layers * redone * fraction


def _mlp_matrices_up(config: GPTConfig) -> int:
    return 2 if config.mlp == "swiglu" else 1


def _layer_weights(config: GPTConfig) -> int:
    attention = config.hidden * config.qkv_width + config.heads * config.head_dim * config.hidden
    return attention + _mlp_weights(config)


def _mlp_weights(config: GPTConfig) -> int:
    return (_mlp_matrices_up(config) + 1) * config.hidden * config.ffn


def _moe_weights(config: GPTConfig, experts: int) -> int:
    """Weights of one layer's router, its shared experts and projections of a bottleneck, and `experts` of the others."""
    moe = config.moe
    assert moe is not None
    matrices = (_mlp_matrices_up(config) + 1) * moe.expert_hidden
    shared = config.hidden * (moe.experts + 2 * moe.bottleneck + moe.shared_experts * matrices)
    return shared + experts * (moe.bottleneck or config.hidden) * matrices


def expert_layer_weights(config: GPTConfig, *, of_a_token: bool) -> int:
    """Weights of the matrices of one layer with experts: of all of them, or of those that a token uses."""
    assert config.moe is not None
    count = config.moe.top_k if of_a_token else config.moe.experts
    return _layer_weights(config) - _mlp_weights(config) + _moe_weights(config, count)


def _moe_parameters(config: GPTConfig) -> int:
    moe = config.moe
    assert moe is not None
    biases = _mlp_matrices_up(config) * moe.shared_hidden + config.hidden
    return _moe_weights(config, moe.experts) + (biases if config.bias and moe.shared_experts else 0)


def _norm_parameters(config: GPTConfig) -> int:
    return config.hidden * (2 if config.norm == "layernorm" and config.bias else 1)
