"""The functions of the compiled model: what they take and give, and how to build them."""
