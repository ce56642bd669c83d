"""Finds objects in videos by text and tracks them with memory."""
