"""Arithmetic of a deployment: memory, KV cache, cards, batch sizes and times from config.json and the spec alone."""
