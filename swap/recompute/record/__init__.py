"""Record of a layer's forward: operator log, provenance of operands, arguments, results that recompute reuses."""
