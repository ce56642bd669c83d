"""Finds an error budget of half precision: the error that each group of products adds, and which stay float32."""
