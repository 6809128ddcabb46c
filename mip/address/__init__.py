"""Address planning: buffers with lifetimes and sizes go in, offsets come out."""
