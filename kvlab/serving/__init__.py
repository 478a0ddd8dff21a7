"""Everything that imports vLLM; nothing outside this package does."""
