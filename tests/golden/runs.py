"""The runs whose records are stored: every sampler, decoder, blend and probe on the embedded pair.

    python -m tests.golden.runs compare    # draw all of them and compare to the last bit, on the machine that stored them
    python -m tests.golden.runs store      # draw all of them and store their records, only where records are meant to change

`tests/golden/test_golden.py` compares on any machine: floats to a tolerance, everything else exactly.
"""

import contextlib
import io
import json
import math
import sys
import tempfile
from pathlib import Path

from dflash_mcmc.config.command import check_command
from dflash_mcmc.process import machine
from dflash_mcmc.runner.loop import execute
from dflash_mcmc.store.records import key_of, read_records

STORED = Path(__file__).with_name("records")
SMALL = ("dataset.limit=2", "dataset.max_new_tokens=32", "seed=7", "tracker=none", "hardware.num_slots=4")
BLOCKS = ("sampler.num_blocks=4",)
MH = (*BLOCKS, "sampler.num_steps=2")
RUNS: dict[str, tuple[str, ...]] = {
    "greedy": ("sampler=greedy",),
    "temperature": ("sampler=temperature", "sampler.temperature=0.8", "sampler.top_k=20", "sampler.top_p=0.95",
                    "num_chains=2"),
    "temperature_penalty": ("sampler=temperature", "sampler.min_p=0.05", "sampler.repetition_penalty=1.2"),
    "power_mh": ("sampler=power_mh", *MH, "sampler.alpha=2", "num_chains=2"),
    "power_mh_entropy": ("condition=entropy_ps", *MH),
    "power_mh_published": ("sampler=power_mh", *MH, "sampler.rule=published"),
    "best_of_n": ("sampler=best_of_n", "sampler.num_candidates=3", "sampler.select=power"),
    "power_smc": ("sampler=power_smc", "sampler.num_particles=4", "sampler.block_size=8"),
    "csmc": ("condition=csmc", "sampler.num_particles=3", "sampler.block_size=8", "sampler.num_steps=2"),
    "replica_exchange": ("sampler=replica_exchange", *MH),
    "isir": ("condition=isir", *MH, "sampler.num_tries=3"),
    "lookahead": ("sampler=lookahead", "sampler.block_size=8", "sampler.rollout_length=4"),
    "draft_mh": ("sampler=draft_mh", "draft=tiny", *MH),
    "draft_mh_mixture": ("sampler=draft_mh", "draft=tiny", *MH, "sampler.proposal=mixture"),
    "draft_refine": ("sampler=draft_refine", "draft=tiny", *MH),
    "draft_refine_confidence": ("sampler=draft_refine", "draft=tiny", *MH, "sampler.cut=confidence"),
    "temperature_counts": ("sampler=temperature", "sampler.temperature=0.9", "sampler.frequency_penalty=0.4",
                           "sampler.presence_penalty=0.3", "decoder=speculative_match", "draft=tiny"),
    "blend_layer": ("condition=blend_greedy", "blend.beta=0.2"),
    "blend_layer_final": ("condition=blend_ps", *MH, "blend.beta=0.1", "blend.norm=final"),
    "blend_layer_matched": ("condition=blend_ps", *MH, "blend.beta=0.1", "sampler.proposal=matched"),
    "blend_draft": ("condition=draft_blend_ps", "draft=tiny", *MH, "blend.beta=0.1"),
    "match_greedy": ("sampler=greedy", "decoder=speculative_match", "draft=tiny"),
    "match_ngram": ("sampler=temperature", "sampler.temperature=1", "decoder=speculative_match", "draft=ngram",
                    "decoder.trace=true"),
    "match_power_mh": ("sampler=power_mh", *MH, "decoder=speculative_match", "draft=tiny"),
    "rejection_token": ("sampler=temperature", "sampler.temperature=0.8", "decoder=speculative_rejection", "draft=tiny",
                        "decoder.verification=token"),
    "rejection_block": ("sampler=temperature", "sampler.temperature=1", "decoder=speculative_rejection", "draft=tiny",
                        "decoder.verification=block", "decoder.trace=true"),
    "rejection_self": ("sampler=power_mh", *MH, "decoder=speculative_rejection", "draft=self"),
    "fault": ("experiment=faults", "dataset.limit=2", "decoder.fault=redraw_after_mismatch"),
    "probe_deep_readout": ("probe=deep_readout", "draft=tiny", "probe.answers=greedy"),
    "probe_difficulty": ("probe=difficulty", "draft=tiny", "sampler=greedy", "dataset.max_new_tokens=128"),
    "probe_layer_rank": ("probe=layer_rank", "draft=tiny", "probe.answers=greedy"),
    "probe_logit_blend": ("probe=logit_blend", "draft=tiny", "probe.answers=greedy", "probe.betas=[0.05,0.2]"),
    "probe_speculative_mcmc": ("probe=speculative_mcmc", "draft=tiny", "probe.alpha=2", "probe.num_samples=4",
                               "probe.timed_rows=0", "dataset.limit=1"),
    "probe_rejection_sampling": ("probe=rejection_sampling", "probe.chunk_size=100", "probe.num_draws=200", "tracker=none"),
}
NO_DATASET = ("probe_rejection_sampling",)
TIMES = ("seconds", "share_seconds", "prefill_seconds", "grade_seconds")
"""Fields that a clock measures."""
ADDED = ("finish_reason", "prompt_forwards")
"""Keys that records have got since the runs were stored. `test_golden.py` compares the first one with what the stored records
imply, and `runner/test_samples.py` the other one with the engine's meter."""


def overrides(name: str) -> list[str]:
    """The command line of a stored run, without its folder."""
    if name in NO_DATASET:
        return list(RUNS[name])
    given = {text.partition("=")[0] for text in RUNS[name]}
    return [*(text for text in SMALL if text.partition("=")[0] not in given), *RUNS[name]]


def stored(name: str) -> dict:
    """The stored records of a run and the name of its folder."""
    return json.loads((STORED / f"{name}.json").read_text())


def read(outputs: Path) -> dict:
    """The records of the only run below a folder of outputs and the name of its folder."""
    folder, = (path.parent for path in outputs.glob("*/*/run.json"))
    records = sorted(read_records(folder), key=key_of)
    return {"folder": "/".join(folder.parts[-2:]), "records": [without_times(record) for record in records]}


def as_stored(found: dict) -> dict:
    """A run without the keys that its records have got since."""
    return {**found, "records": [{name: value for name, value in record.items() if name not in ADDED}
                                 for record in found["records"]]}


def without_times(value: object) -> object:
    """A record without the fields that a clock measures."""
    if isinstance(value, dict):
        return {name: without_times(inner) for name, inner in value.items() if name not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def differences(found: object, expected: object, tolerance: float, place: str = "") -> list[str]:
    """A line for each place where two values differ. The tolerance of floats is relative to the larger of 1 and their size."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if list(found) != list(expected):
            return [f"{place}: keys {list(found)} instead of {list(expected)}"]
        return [line for key in expected for line in differences(found[key], expected[key], tolerance, f"{place}.{key}")]
    if isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return [f"{place}: {len(found)} values instead of {len(expected)}"]
        return [line for number, pair in enumerate(zip(found, expected, strict=True))
                for line in differences(*pair, tolerance, f"{place}[{number}]")]
    if isinstance(expected, float) and isinstance(found, float):
        alike = found == expected or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
        return [] if alike else [f"{place}: {found!r} instead of {expected!r}"]
    return [] if type(found) is type(expected) and found == expected else [f"{place}: {found!r} instead of {expected!r}"]


def draw(name: str, outputs: Path) -> dict:
    """Draws a stored run in this process, into a folder of outputs, and reads it there."""
    job, = check_command([*overrides(name), f"paths.outputs={outputs}"]).jobs
    execute(job)
    return read(outputs)


def main(verb: str, *names: str) -> None:
    """`store` or `compare`, for all runs or for the given names."""
    machine.keep_bits()
    wrong = 0
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as outputs, contextlib.redirect_stderr(io.StringIO()):  # without progress bars
            found = draw(name, Path(outputs))
        if verb == "store":
            STORED.mkdir(exist_ok=True)
            (STORED / f"{name}.json").write_text(json.dumps(as_stored(found), separators=(",", ":")) + "\n")
            print(f"{name}: stored, {found['folder']}, {len(found['records'])} records", flush=True)
            continue
        lines = differences(as_stored(found), stored(name), 0.0)
        wrong += bool(lines)
        print(f"{name}: {'the same' if not lines else '; '.join(lines[:3])}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
