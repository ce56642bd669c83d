"""Tracks objects through videos for `sam3-tvm track`: a video of the objects, their masks, a data set, a table."""
