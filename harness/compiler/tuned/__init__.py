"""Stores tuned schedules in one JSON file, which tuning writes and every compilation reads."""
