"""Holds the objects that were found in an image or a frame, and makes the files that describe and show them."""
