"""The operations of chains by vLLM: a logits processor draws the tokens, and a session steps vLLM's engine.

    target.py      the target as far as it is known without weights
    settings.py    what vLLM is started with
    session.py     runs chains: operations become requests, finished requests become answers
    core.py        vLLM's engine, stepped in this process
    scratch.py    files and shared memory of vLLM's processes, removed after them
    cache_plan.py  the memory of keys and values, for a dry run
    ticket.py      what a request asks of the processor; it travels in the request
    drawing.py     draws the tokens of a batch from their logits
    rows.py        follows vLLM's persistent batch, and gives each row's token to the ledger
    ledger.py      the tokens that were drawn, with their log-probabilities, until the session takes them
    plugin.py      the classes that vLLM's worker loads: logits processor and worker extension
    blended.py     model classes with a layer blend
"""
