"""Segments images for `sam3-tvm segment` and writes overlays, masks and COCO annotations."""
