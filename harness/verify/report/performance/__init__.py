"""The performance report: pytest-benchmark's JSON is the truth, a page and plots are rendered from it."""
