"""Address planning on pure data: buffers with lifetimes and sizes go in, offsets come out. Imports no torch."""
