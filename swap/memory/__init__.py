"""Host memory: page-aligned and pinned blocks, NUMA placement, free lists, planned layout."""
