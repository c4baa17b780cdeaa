"""Benchmarks of engine and server against peers, in one run on one machine."""
