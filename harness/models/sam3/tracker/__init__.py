"""Upstream's tracker at work: clicks on a photograph and objects in a clip, as inputs of its components."""
