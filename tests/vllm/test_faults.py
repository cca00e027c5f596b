"""What goes wrong with vLLM: a full KV cache, logits that are not numbers, signals, and what vLLM refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.engine.batching.interface import NOT_NUMBERS
from dflash_mcmc.errors import UserError
from dflash_mcmc.rng import Key
from tests.engine.batching.test_batched import PROMPTS, SAMPLERS, STOPS
from tests.processes import HANG, ROOT
from tests.targets import random_model
from tests.vllm.running import TOLERANCE, Comparison, engine_of, target_of
from tests.vllm.test_blended import WIDE

TINY = PACKAGE / "assets" / "tiny"
RUN = ("engine=vllm", "sampler=power_mh", "dataset.limit=6", "num_chains=2", "dataset.max_new_tokens=48", "tracker=none",
       "hardware.memory_gb=0.1", "hardware.num_slots=4", "seed=3")
MANY = 24
SHORT = (f"dataset.limit={MANY}", "sampler=temperature", "dataset.max_new_tokens=16", "num_chains=1", "hardware.num_slots=1")
"""One sample after another, so many that the run goes on after its first one is seen on a busy machine."""
TWO = ("engine.tensor_parallel_size=2",)


def test_preemption_changes_no_token(tmp_path):
    """A KV cache of a few blocks: requests are preempted and computed again."""
    target = target_of(random_model("qwen3", **WIDE), tmp_path, STOPS)

    def results(**changes):
        prompts = [prompt for prompt in PROMPTS for _ in range(3)]
        engine = engine_of(target, 15, **changes)
        chains = [(index, SAMPLERS["power_mh_early"].chain(prompt, 30, Key(index))) for index, prompt in enumerate(prompts)]
        found = {done.tag: done for done in engine.run(chains)}
        return found, sum(done.cost.target_forwards for done in found.values())

    plenty, _ = results()
    one_block = 2 * 3 * 1 * 32 * 32 * 4  # keys and values, layers, heads, width, positions, bytes
    counted = Preemptions()
    with counted:
        tight, _ = results(kv_cache_bytes=10 * one_block)
    assert counted.number > 0
    found = Comparison.of(tight, lambda tag: plenty[tag].result)
    assert (found.equal, found.chains) == (15, 15)
    assert max(found.log_p, found.log_q) < TOLERANCE


def test_the_memory_chooses_the_number_of_chains_of_the_plan(make_config):
    """A dry run's number of chains is vLLM's own count of requests that fit at full length."""
    config = make_config("engine=vllm", "sampler=greedy", "hardware.device=cpu", "hardware.num_slots=null", "num_chains=2",
                         "hardware.memory_gb=0.02", "dataset.max_new_tokens=100")
    requests = int(re.search(r"keys and values of (\d+) requests", config.engine.memory_note(config))[1])
    assert 1 < requests < config.dataset.num_chosen() * config.num_chains
    engine = config.engine.start(config, config.engine.load(config, "cpu"), config.assumed.prompt_length,
                                 config.dataset.num_chosen() * config.num_chains)
    assert engine._num_chains == requests


def test_the_default_memory_on_a_cpu_holds_all_chains_at_full_length_twice(make_config):
    config = make_config("engine=vllm", "sampler=greedy", "hardware.device=cpu", "hardware.num_slots=null", "num_chains=1",
                         "dataset.limit=12", "dataset.max_new_tokens=100")
    engine = config.engine.start(config, config.engine.load(config, "cpu"), config.assumed.prompt_length, 12)
    assert engine._num_chains == 12
    assert 23.5 < engine._core.capacity() <= 24


class Preemptions:
    """Counts the requests that vLLM's scheduler preempts inside the context."""

    def __enter__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        self.number, self._class, self._original = 0, Scheduler, Scheduler._preempt_request

        def counted(*arguments, **named):
            self.number += 1
            return self._original(*arguments, **named)

        Scheduler._preempt_request = counted

    def __exit__(self, *_) -> None:
        self._class._preempt_request = self._original


def test_weights_that_are_not_numbers_fail_each_chain_with_one_line(tmp_path):
    model = random_model("qwen3", **WIDE)
    model.lm_head.weight.data[5] = torch.nan
    target = target_of(model, tmp_path, STOPS)
    for done in engine_of(target).run((index, SAMPLERS["power_mh"].chain(prompt, 8, Key(index)))
                                      for index, prompt in enumerate(PROMPTS)):
        assert done.result is None
        assert done.failure == NOT_NUMBERS


def test_what_vllm_refuses_is_one_line(tmp_path):
    target = target_of(random_model("qwen3", **WIDE), tmp_path, STOPS)
    for changes in (dict(quantization="nonsense"), dict(kv_cache_dtype="int3"), dict(kv_cache_bytes=10)):
        with pytest.raises(UserError, match="engine: vLLM refuses") as error:
            engine_of(target, **changes)
        assert "\n" not in str(error.value)
    assert engine_of(target)  # the process can go on


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "dflash_mcmc", *RUN, f"paths.outputs={folder}", *overrides], cwd=folder,
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def recorded(folder: Path) -> dict[tuple[str, int], list[int]]:
    found = {}
    for file in folder.rglob("*.jsonl"):
        for line in file.read_text().splitlines():
            if line.startswith("{") and line.endswith("}") and "tokens" in (record := json.loads(line)):
                assert (record["problem"], record["chain"]) not in found, "recorded twice"
                found[record["problem"], record["chain"]] = record["tokens"]
    return found


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_process_and_goes_on(tmp_path, sent):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    process = start(killed, "hardware.grace_seconds=0")
    while process.poll() is None and not recorded(killed):
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(sent)
    process.communicate(timeout=HANG)
    _, left = psutil.wait_procs(children, timeout=HANG)
    assert not left
    before = recorded(killed)
    assert 0 < len(before) < 12
    for folder in (killed, whole):
        output, _ = (process := start(folder)).communicate(timeout=HANG)
        assert process.returncode == 0, output
    after, expected = recorded(killed), recorded(whole)
    assert before.items() <= after.items()
    assert after.keys() == expected.keys()
    assert sum(after[key] == expected[key] for key in after) >= len(after) - 1  # a near-tie may differ by rounding
    shutil.rmtree(tmp_path)


FAILURES = {signal.SIGKILL: "error: engine: worker 1 of 2 of vLLM has ended with exit code -9; the same command draws what is",
            signal.SIGSTOP: "error: engine: a worker of vLLM has not answered for 120 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS);"}
"""A worker that dies, and one that hangs."""


@pytest.mark.parametrize("sent", FAILURES)
def test_a_worker_of_two_that_dies_or_hangs_ends_the_run_in_one_line(tmp_path, monkeypatch, sent):
    """Tensor parallelism by two processes. Another run, with one process, draws what is missing."""
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "120")
    process = start(tmp_path, *SHORT, *TWO)
    while process.poll() is None and not recorded(tmp_path):
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    worker, = (child for child in children if any("Worker_TP1" in word for word in child.cmdline()))
    worker.send_signal(sent)
    output, _ = process.communicate(timeout=HANG)
    assert process.returncode == 2, output
    line, = (line for line in output.splitlines() if line.startswith("error: "))
    assert line.startswith(FAILURES[sent])
    _, left = psutil.wait_procs(children, timeout=HANG)
    assert not left
    before = recorded(tmp_path)
    assert 0 < len(before) < MANY
    output, _ = (process := start(tmp_path, *SHORT)).communicate(timeout=HANG)
    assert process.returncode == 0, output
    after = recorded(tmp_path)
    assert before.items() <= after.items()
    assert len(after) == MANY


def test_a_killed_parent_of_two_workers_leaves_no_process(tmp_path):
    """Tensor parallelism: the workers notice, and the same command draws what is missing."""
    process = start(tmp_path, *SHORT, *TWO)
    while process.poll() is None and not recorded(tmp_path):
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert sum("Worker_TP" in " ".join(child.cmdline()) for child in children) == 2
    process.kill()
    process.communicate(timeout=HANG)  # the workers share its output
    _, left = psutil.wait_procs(children, timeout=HANG)
    assert not left
    before = recorded(tmp_path)
    assert 0 < len(before) < MANY
    output, _ = (process := start(tmp_path, *SHORT, *TWO)).communicate(timeout=HANG)
    assert process.returncode == 0, output
    after = recorded(tmp_path)
    assert before.items() <= after.items()
    assert len(after) == MANY


def test_a_process_of_two_that_dies_leaves_its_samples_to_the_other(tmp_path, monkeypatch):
    """Data parallelism: two processes share a run folder."""
    processes = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        processes.append(start(tmp_path, "hardware.num_slots=2"))
    while processes[0].poll() is None and len(recorded(tmp_path)) < 2:
        time.sleep(0.05)
    children = psutil.Process(processes[1].pid).children(recursive=True)
    processes[1].kill()
    output, _ = processes[0].communicate(timeout=HANG)
    processes[1].communicate(timeout=HANG)
    assert processes[0].returncode == 0, output
    assert len(recorded(tmp_path)) == 12
    _, left = psutil.wait_procs(children, timeout=HANG)
    assert not left
