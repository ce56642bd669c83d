"""Verifies a model: runs cases in processes of their own, reports, diagnoses what differs, finds a precision budget."""
