"""One model on many devices: layouts, collectives, tensor-parallel layers, pipelines."""
