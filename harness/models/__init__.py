"""The models that the harness verifies, one package each."""
