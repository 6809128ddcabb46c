"""A GPT's FLOPs, bytes and profile by arithmetic, without a GPU."""
