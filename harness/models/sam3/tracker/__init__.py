"""Captures inputs of the tracker's components while upstream answers clicks on a photograph and tracks a clip."""
