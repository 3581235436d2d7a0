"""SparseEngine: a sparse-first LLM inference engine."""
