"""The disk tier's I/O: scratch files, queues of operations, io threads, GPUDirect Storage."""
