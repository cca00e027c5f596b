"""A server with the interface of OpenAI, which answers with samples of any sampler: `python -m dflash_mcmc.serve`.

    options.py      address and limits, and the configuration of model and sampler
    requests.py     the bodies of requests, and the sampler that one asks for
    app.py          hosts, origins, the key and numbers; paths, and from a request to its answers
    answers.py      bodies of answers and errors, and parts of answers
    workers.py      the chains that wait, and the thread that draws them
"""
