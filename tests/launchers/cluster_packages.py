"""The Debian (or Ubuntu) packages of a SLURM cluster with accounting."""

from __future__ import annotations

import os
import shutil
import subprocess

SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
"""Where programs are looked for: the daemons are in folders that an ordinary user's PATH lacks."""

PROGRAMS = {
    "munge": "munged",
    "slurm-client": "sbatch",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "mariadb-server-core": "mariadbd",
    "mariadb-client-core": "my_print_defaults",  # called by mariadb-install-db
}
"""Package: a program of it that is used here."""


class CannotInstall(Exception):
    """The packages are not there, and this machine does not let us install them."""


def missing_packages() -> list[str]:
    """Packages whose program is not found."""
    return [package for package, program in PROGRAMS.items() if shutil.which(program, path=SEARCH_PATH) is None]


def install() -> None:
    """Installs what is missing with apt-get, as root or through a sudo that asks no password.

    Never removes a package (a MySQL server excludes MariaDB's) and waits up to 5 minutes for another apt-get.
    Raises CannotInstall with the reason in one line.
    """
    missing = missing_packages()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise CannotInstall(f"no apt-get, and these are missing: {', '.join(missing)}")
    if not _may_install():
        raise CannotInstall(f"neither root nor a sudo without password, and these are missing: {', '.join(missing)}")
    # The lists of a fresh image are empty, those of an old one name files that are gone: the second attempt refreshes them.
    answer = _apt_get("install", "--no-install-recommends", "--no-remove", *missing)
    if answer.returncode:
        _apt_get("update")
        answer = _apt_get("install", "--no-install-recommends", "--no-remove", *missing)
    if answer.returncode:
        errors = [line for line in answer.stderr.splitlines() if line.startswith("E:")]
        raise CannotInstall(f"apt-get install {' '.join(missing)}: {errors[-1] if errors else answer.stderr.strip()[-200:]}")
    if missing_packages():
        raise RuntimeError(f"apt-get installed {missing}, but their programs are not found: {missing_packages()}")


def _may_install() -> bool:
    if os.geteuid() == 0:
        return True
    return shutil.which("sudo") is not None and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0


def _apt_get(*arguments: str) -> subprocess.CompletedProcess:
    elevate = ["sudo", "-n"] if os.geteuid() else []
    command = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=300", "-y", "-qq", *arguments]
    return subprocess.run([*elevate, *command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
