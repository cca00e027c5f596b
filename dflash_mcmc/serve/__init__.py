"""A server with the interface of OpenAI, which answers with samples of any sampler: `python -m dflash_mcmc.serve`.

    options.py      the limits, and the configuration of model and sampler
    fields.py       the body of a request: every field is used, or refused by name
    app.py          paths and answers
    gate.py         what every request passes: key, counters for Prometheus, and a line of log
    network.py      the socket, slow clients, signals
    answers.py      bodies of answers
    workers.py      the chains that wait, and the thread that draws them

`api/choices.py` has the sampler of a request.
"""
