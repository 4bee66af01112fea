"""One module per claim, run as `python -m benchmarks.NAME [--json]`; all through `benchmarks.harness`."""
