"""What a verification is about, as plain data: cases, outcomes, expectations, settings."""
