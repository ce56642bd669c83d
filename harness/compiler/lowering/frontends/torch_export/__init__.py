"""Exports modules by torch.export and imports them into Relax, with a workaround for every defect of the importer."""
