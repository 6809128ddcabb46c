"""Cross entropy without logits: over chunks of tokens, behind an output projection, in a model's own forward."""
