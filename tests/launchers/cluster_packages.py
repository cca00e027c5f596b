"""The Debian (or Ubuntu) packages of a SLURM cluster with accounting."""

import os
import shutil
import subprocess

SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
"""Folders with programs. The daemons are in folders that are not in the PATH of ordinary users."""

PROGRAMS = {
    "munge": "munged",
    "slurm-client": "sbatch",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "mariadb-server-core": "mariadbd",
    "mariadb-client-core": "my_print_defaults",  # called by mariadb-install-db
}
"""Packages, each with one of its programs."""


class CannotInstall(Exception):
    """The packages are missing, and this machine does not allow their installation."""


def missing_packages() -> list[str]:
    """Packages whose program is missing."""
    return [package for package, program in PROGRAMS.items() if shutil.which(program, path=SEARCH_PATH) is None]


def install() -> None:
    """Installs missing packages with apt-get, as root or through a sudo without password.

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
    # In a fresh image the package lists are empty, and in an old one outdated. The second attempt updates them.
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
