"""The error budget of half precision: what each group of products costs in accuracy, and which stay float32."""
