"""Grids: many runs as jobs of SLURM, submitted through submitit. Jobs continue after preemption and failure.

    folder.py       a grid's folder: the submissions and the events of their jobs
    snapshot.py     the code, installed plugins and configurations that the jobs run
    cluster.py      the commands of SLURM
    submission.py   plans and submits the jobs of a command line, and later the jobs of missing samples
    supervise.py    runs in a job: starts the worker, restarts it when it dies, and requeues the job
    work.py         runs in a job: one run, or this job's share of it
    __main__.py     the command, and the state of points and jobs
"""
