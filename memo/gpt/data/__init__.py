"""Training data: documents, tokenizers, token files and batches."""
