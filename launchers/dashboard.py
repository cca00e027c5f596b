"""The comparison page in your Weights & Biases account, made from code.

    python -m dflash_mcmc -m experiment=demo condition=greedy,ps,blend_ps tracker=wandb    draws runs, or logs drawn ones
    wandb sync outputs/wandb/offline-run-*                                                  uploads runs drawn without a login
    make dashboard                                                                          writes the page, prints its address
    make dashboard RUNS=outputs/demo                                                        also logs the report of these runs
    python launchers/dashboard.py --experiment demo --swept sampler.alpha blend.beta        only the runs of one experiment

The page shows accuracy by condition with intervals, the sweep, acceptance, cost against accuracy, the table of samples, and
the results of probes. RUNS are folders of runs, as for `python -m dflash_mcmc.report`. Their report (paired table, figures,
the whole page) is logged next to the runs, and its lineage in W&B names the records that it is made from. An existing page
is overwritten at the same address, so make your own additions in a copy.

You need an account, which `wandb login` sets up, and the package wandb-workspaces (pip install -e '.[dashboard]').
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from dflash_mcmc.errors import UserError
from dflash_mcmc.process import program


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    given = _parser().parse_args(arguments)
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise UserError("the page needs the package wandb-workspaces, which is not installed: pip install wandb-workspaces")
    from dflash_mcmc.tracker.wandb import page

    api, place = page.connect(given.entity, given.project, given.experiment)
    if given.runs:
        from dflash_mcmc.report.build import build

        built = build(given.runs, outputs=given.outputs)
        experiments = {run.experiment for study in built.studies for run in study.runs}
        if given.experiment is None and len(experiments) == 1:
            place = place._replace(experiment=experiments.pop())
        with page.asking():
            page.publish(built, place, given.outputs)
    print(page.make(api, place, given.swept, given.outputs / "wandb" / "pages.json"))


def _parser() -> argparse.ArgumentParser:
    from dflash_mcmc.tracker.wandb import WandbTracker
    from dflash_mcmc.tracker.wandb.page import SWEPT

    project = WandbTracker().project
    parser = program.OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run or an experiment, whose report is logged too")
    parser.add_argument("--experiment", metavar="NAME", help="only its runs; default: that of RUNS, else all of the project")
    parser.add_argument("--project", default=project, help=f"default: {project}, that of tracker=wandb")
    parser.add_argument("--entity", help="user or team; default: that of your account")
    parser.add_argument("--swept", nargs="+", default=list(SWEPT), metavar="FIELD",
                        help=f"fields of the configuration that were swept; default: {' '.join(SWEPT)}")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER", help="default: outputs")
    return parser


if __name__ == "__main__":
    main()
