"""Address planning on pure data: buffers with lifetimes and sizes go in, offsets come out. Imports no torch.

Read `buffers.py` for the nouns and `solve.py` for the one call; `check.py` is what makes the answers trustworthy.
"""
