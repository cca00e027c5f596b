"""Mathematics that several samplers share."""
