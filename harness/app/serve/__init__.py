"""Serves a compiled model over HTTP with Ray Serve: questions about images in, data sets in COCO's format out.

The service needs the extra `serve`.
"""
