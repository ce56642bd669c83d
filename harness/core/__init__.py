"""The plain data of a verification: cases, outcomes, expectations, settings."""
