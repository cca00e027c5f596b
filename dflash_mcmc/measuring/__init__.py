"""What probes measure with: distances, simulated chains, scores of a signal, and the tables and figures that are long."""
