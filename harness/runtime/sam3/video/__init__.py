"""Videos: objects are found by text and tracked with memory."""
