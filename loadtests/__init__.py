"""Load tests and benchmarks: workloads, metrics, objectives and reports. Knows only the wire."""
