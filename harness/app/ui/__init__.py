"""Serves the page of `sam3-tvm ui`: a photograph is segmented by clicks, boxes and texts in a browser.

The server needs the extra `ui`.
"""
