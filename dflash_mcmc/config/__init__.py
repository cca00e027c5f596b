"""Turns a command line into jobs: schema and checks, composition, sweeps, errors of one line."""
