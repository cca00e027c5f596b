"""A command line becomes jobs: schema and checks, composition, sweeps, errors of one line."""
