"""Compares the server, in a process of its own, with `dflash_mcmc.sample` of the same requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dflash_mcmc.api import LoadedEngine, component
from dflash_mcmc.sampler import Sampler
from tests.bench.measure import Sizes
from tests.bench.subject import Subject

_CLIENTS = (1, 8, 64)
_TURNS = 3
_FIELDS = {"num_blocks": 4, "num_steps": 1}
"""Fields of power_mh. Short answers show the cost of the server most."""
_A_CLIENT = {1: 8, 8: 4, 64: 2}
"""Requests of each client, one after the other, for a number of clients."""


class _LoadSpent(NamedTuple):
    seconds: float
    token_forwards: int
    texts: list[str]


def server(subject: Subject, sizes: Sizes) -> list[dict]:
    """(p) The server with 1, 8 and 64 clients compared with `dflash_mcmc.sample` of the same requests, in turns.

    `dflash_mcmc.sample` has as many slots as there are clients, since each client waits for its answer before it asks again.
    The server has 64 slots. The two have different random numbers, so that rates are per token-forward.
    """
    folder = subject.causal_lm.name_or_path
    if not folder:
        return []
    samplers: dict[str, Sampler] = {"greedy": component("sampler", "greedy"),
                                    "power_mh": component("sampler", "power_mh", **_FIELDS)}
    rows = []
    with _serving(folder, subject.horizon, max(_CLIENTS)) as port:
        for clients in _CLIENTS:
            requests = clients * _A_CLIENT[clients]
            prompts = [subject.prompts[number % len(subject.prompts)].tolist() for number in range(requests)]
            hardware = component("hardware", "local", num_slots=clients)
            with LoadedEngine(component("model", "hf", path=folder), hardware=hardware) as engine:
                rows += [_row(clients, name, _compared(port, engine, clients, sampler, name, prompts, subject.horizon))
                         for name, sampler in samplers.items()]
    return rows


def _compared(port: int, engine: LoadedEngine, clients: int, sampler: Sampler, name: str, prompts: Sequence[list[int]],
              horizon: int) -> list[tuple[_LoadSpent, _LoadSpent]]:
    """What the server and `sample` have spent in each turn after one that is not counted. Raises RuntimeError."""
    fields = {"name": name} if name == "greedy" else {"name": name, **_FIELDS}
    turns = []
    for turn in range(_TURNS + 1):
        mine, theirs = _served(port, clients, prompts, horizon, fields), _sampled(engine, prompts, horizon, sampler)
        if name == "greedy" and mine.texts != theirs.texts:
            raise RuntimeError("the server's greedy answers are not those of dflash_mcmc.sample")
        if turn:
            turns.append((mine, theirs))
    return turns


def _row(clients: int, name: str, turns: Sequence[tuple[_LoadSpent, _LoadSpent]]) -> dict:
    ratios = [mine.token_forwards / mine.seconds * theirs.seconds / theirs.token_forwards for mine, theirs in turns]
    requests = len(turns[0][0].texts)
    return {"clients": clients, "sampler": name, "requests": requests,
            "server, requests/s": requests / min(mine.seconds for mine, _ in turns),
            "sample, requests/s": requests / min(theirs.seconds for _, theirs in turns),
            "server / sample": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def _sampled(engine: LoadedEngine, prompts: Sequence[list[int]], horizon: int, sampler: Sampler) -> _LoadSpent:
    started = time.perf_counter()
    drawn = engine.sample(prompts, sampler=sampler, max_new_tokens=horizon, progress=False)
    return _LoadSpent(time.perf_counter() - started, sum(sample.cost.token_forwards for sample in drawn),
                  [sample.text for sample in drawn])


def _served(port: int, clients: int, prompts: Sequence[list[int]], horizon: int, sampler: dict) -> _LoadSpent:
    """Each client asks for every n-th prompt, on one connection."""
    def client(first: int) -> list[tuple[str, int]]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
            return [_answer(connection, {"prompt": prompt, "max_tokens": horizon, "sampler": sampler, "seed": number})
                    for number, prompt in enumerate(prompts[first::clients])]

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(client, range(clients)))
    answers = [found[number % clients][number // clients] for number in range(len(prompts))]
    return _LoadSpent(time.perf_counter() - started, sum(cost for _, cost in answers), [text for text, _ in answers])


def _answer(connection: http.client.HTTPConnection, body: dict) -> tuple[str, int]:
    connection.request("POST", "/v1/completions", json.dumps(body))
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    if reply.status != 200:
        raise RuntimeError(f"the server answers {reply.status}: {answer['error']['message']}")
    return answer["choices"][0]["text"], answer["usage"]["token_forwards"]


@contextlib.contextmanager
def _serving(folder: str, horizon: int, slots: int) -> Iterator[int]:
    """The port of a server."""
    command = [sys.executable, "-m", "dflash_mcmc.serve", "serve.port=0", "model=hf", f"model.path={folder}",
               "sampler=greedy", f"dataset.max_new_tokens={horizon}", f"hardware.num_slots={slots}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r":(\d+)/v1$", line.strip())
        if found is None:
            raise RuntimeError(f"the server did not start: {' '.join(command)}")
        yield int(found[1])
    finally:
        process.terminate()
        process.communicate()
