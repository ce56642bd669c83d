"""Tuning: the search for better schedules, and the database of what it found."""
