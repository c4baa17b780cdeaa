"""Starts the real tritonserver on a model repository and leaves nothing behind."""
