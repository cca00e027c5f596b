"""Grids: many runs as jobs of SLURM, through submitit, which hold no shell and go on after preemption and failure.

    launcher.py     what can be asked for: the fields of hydra/launcher=slurm
    planning.py     points, what each of them lacks, and how many jobs that takes
    folder.py       a grid's folder: what was submitted, and what its jobs say
    snapshot.py     the code and the configurations that the jobs run
    cluster.py      the commands of SLURM
    submission.py   from a command line to jobs; what is missing, submitted again
    supervise.py    in a job: starts the worker, again where it dies, and requeues the job
    work.py         in a job: one run, or this job's part of it
    status.py       how far everything is
"""
