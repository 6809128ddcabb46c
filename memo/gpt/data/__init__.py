"""Token files, documents and the batches made of them."""
