"""What a layer's forward did: its operators, their operands, the results that recompute reuses."""
