"""What one training step allocates, recorded without a GPU and without its memory."""
