"""The process itself: its rank, its signals, its machine, the same bits in every batch, exit codes."""
