"""Reports performance: renders a page and plots from pytest-benchmark's JSON files."""
