"""memo beside what people would use instead: one model, data, seed and length, each way in a process of its own."""
