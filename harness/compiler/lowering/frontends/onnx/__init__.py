"""Exports and imports modules through ONNX, by torch.export, PyTorch's ONNX exporter and TVM's importer."""
