"""Structures that an answer must satisfy: checked, compiled, and turned into token masks.

Knows nothing of Triton or of how the engine schedules.
"""
