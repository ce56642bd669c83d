"""What tuning found, in a folder: the database of the best schedules, and every trial that led there."""
