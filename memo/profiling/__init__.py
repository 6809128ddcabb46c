"""`memo.profile`: measures the bytes and times of each layer of a model, as input for a plan."""
