"""Host memory: page-aligned and page-locked blocks, NUMA placement, free lists, planned layout."""
