"""inspect_ai (UK AI Security Institute 2024, https://inspect.aisi.org.uk): `--model dflash/...`, and logs of runs.

    entry.py       what inspect_ai finds by the entry point of this package
    requests.py    the configuration of a request, in this package's terms
    provider.py    the model
    log.py         a run as a log of inspect_ai

The package inspect_ai is imported by the last two and by `entry.py`.
"""
