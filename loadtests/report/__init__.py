"""The report of a load test, made of report.json and nothing else."""
