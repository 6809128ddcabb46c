"""Token ranges: a part of a layer's tokens moves and the rest is replayed, where row rules prove the token axis."""
