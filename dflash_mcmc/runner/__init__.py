"""A run: tasks are claimed, done, recorded and tracked by one loop, and then summarised."""
