"""The database of tuned schedules: one JSON file, which tuning writes and every compilation reads."""
