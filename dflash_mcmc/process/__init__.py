"""The process itself: its rank, how it stops, the same bits on every processor, exit codes."""
