"""Holds the models that the harness verifies, one package each."""
