"""A server with the interface of OpenAI, which answers with samples of any sampler: `python -m dflash_mcmc.serve`.

    options.py      address and limits, and the configuration of model and sampler
    app.py          bodies of requests, answers and errors; hosts, origins, the key and numbers; paths
    workers.py      the chains that wait, and the thread that draws them
"""
