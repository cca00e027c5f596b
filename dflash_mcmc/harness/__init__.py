"""Models of this package for evaluation harnesses, which bring their own tasks, prompts and metrics."""
