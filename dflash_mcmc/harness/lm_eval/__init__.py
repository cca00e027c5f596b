"""lm-evaluation-harness (Gao et al. 2024, doi 10.5281/zenodo.12608602): `--model dflash_mcmc`.

`lm_eval` has no entry points for models. `python -m dflash_mcmc.harness.lm_eval` registers the model and starts its
command line.
"""
