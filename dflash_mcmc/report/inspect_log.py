"""A run as a log of inspect_ai. Needs the package inspect_ai."""

import math
import os
from importlib.metadata import version
from pathlib import Path

import numpy as np
from inspect_ai import log, model as models, scorer

from dflash_mcmc.config.identity import name_of_path
from dflash_mcmc.grading import verdicts
from dflash_mcmc.report.reading import Run
from dflash_mcmc.statistics.estimates import accuracy, outcomes
from dflash_mcmc.store import files, records

_VALUES = {verdicts.CORRECT: scorer.CORRECT, verdicts.WRONG: scorer.INCORRECT}
"""The value of a score; NOANSWER for all other verdicts, which inspect_ai counts like wrong answers, as reports do."""
_ELSEWHERE = ("problem", "chain", "text", "gold", "answer", "tokens", "trace", "walk")
"""Fields of a record that are not in a sample's metadata: they have a place of their own, or are large."""


def write(run: Run, folder: Path, form: str) -> Path:
    """Writes the log of a run, and returns its path. The same run has the same path. Raises UserError, and OSError.

    Args:
        form: "eval" or "json".
    """
    files.make_folder(folder, "the log's folder")
    path = folder / f"{run.experiment}-{run.digest}.{form}"
    partial = folder / f".{path.stem}.{os.getpid()}.part"
    try:
        log.write_eval_log(log_of(run), partial, format="eval" if form == "eval" else "json")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def log_of(run: Run) -> log.EvalLog:
    """The log of a run: a sample for each record, whose epoch is the number of the chain from 1 on. Raises UserError."""
    problems, config, dataset = records.read_problems(run.folder), run.config, dict(run.config.get("dataset") or {})
    of_model = dict(config.get("model") or {})
    model = f"dflash/{name_of_path(of_model['path']) if of_model.get('path') else of_model.get('name', 'model')}"
    grader, started = str(run.identity.get("grader", "grader")), run.sessions[0]["started"]
    samples = [_sample(record, problems.get(record["problem"]), model, grader) for record in run.records]
    spec = log.EvalSpec(
        eval_id=run.digest, run_id=run.digest, task_id=run.digest, created=started, task=str(dataset.get("name", "task")),
        task_display_name=f"{dataset.get('name', 'task')} {run.label}", solver=run.label, tags=[run.experiment, run.condition],
        dataset=log.EvalDataset(name=str(dataset.get("name")), samples=len(run.problems), sample_ids=list(run.problems)),
        model=model, config=log.EvalConfig(epochs=run.num_chains, epochs_reducer=["mean"]),
        model_generate_config=models.GenerateConfig(seed=config.get("seed"), max_tokens=dataset.get("max_new_tokens"),
                                                    stop_seqs=list(dataset.get("stop") or []) or None),
        packages={"dflash_mcmc": version("dflash_mcmc"), "inspect_ai": version("inspect_ai")},
        metadata={"experiment": run.experiment, "condition": run.condition, "identity": run.identity,
                  "expected_samples": run.expected})
    # Accuracy over all samples, and its standard error over problems, as inspect_ai computes it after a mean of epochs
    means = outcomes(run.records).correct
    error = float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0
    metrics = {"accuracy": log.EvalMetric(name="accuracy", value=accuracy(run.records).value or 0.0),
               "stderr": log.EvalMetric(name="stderr", value=error)}
    score = log.EvalScore(name=grader, scorer=grader, reducer="mean", scored_samples=len(run.problems), metrics=metrics)
    results = log.EvalResults(total_samples=run.expected or len(run.records), completed_samples=len(run.records),
                              scores=[score])
    usage = {model: sum((sample.output.usage for sample in samples if sample.output.usage), models.ModelUsage())}
    status = "success" if run.complete else "cancelled"
    return log.EvalLog(status=status, eval=spec, plan=log.EvalPlan(name=run.label), results=results,
                   stats=log.EvalStats(started_at=started, completed_at="", model_usage=usage), samples=samples)


def _sample(record: records.Record, problem: records.ProblemText | None, model: str, grader: str) -> log.EvalSample:
    asked = problem["question"] if problem else f"(the question of {record['problem']} is not in a run of this version)"
    why = " ".join(filter(None, [record["verdict"], record.get("rule", ""), record["reason"]]))
    score = scorer.Score(value=_VALUES.get(record["verdict"], scorer.NOANSWER), answer=record["answer"], explanation=why)
    messages: list[models.ChatMessage] = [models.ChatMessageUser(content=asked)]
    output = models.ModelOutput(model=model)
    if record["verdict"] not in verdicts.UNDRAWN:
        answer = models.ChatMessageAssistant(content=record["text"], model=model, source="generate")
        messages.append(answer)
        reason = "max_tokens" if record["finish_reason"] == records.LENGTH else "stop"
        output = models.ModelOutput(
            model=model, choices=[models.ChatCompletionChoice(message=answer, stop_reason=reason)],  # type: ignore[arg-type]
            usage=models.ModelUsage(output_tokens=record["num_tokens"], total_tokens=record["num_tokens"]),
            time=record["seconds"])
    metadata = {name: value for name, value in record.items() if name not in _ELSEWHERE}
    metadata |= {"finish_reason": record["finish_reason"], **({"prompt": problem["prompt"]} if problem else {})}
    return log.EvalSample(
        id=record["problem"], epoch=record["chain"] + 1, input=asked, target=record["gold"], messages=messages, output=output,
        scores={grader: score}, metadata=metadata, total_time=record["seconds"],
        model_usage={model: output.usage} if output.usage else {})
