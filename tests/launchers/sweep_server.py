"""The local server of Weights & Biases, extended by grid sweeps and their agents."""

import itertools
import json

import yaml

from tests.tracker.loopback import ENTITY, Loopback, Run


class SweepServer(Loopback):
    """Gives each point of a sweep to one agent. A preempted point is given out again, with the same id."""

    def __init__(self):
        super().__init__()
        self.sweeps: dict[str, dict] = {}
        self.of_sweep: dict[str, str] = {}
        """Sweep of each run, as reported by the run."""
        self.preempted: list[str] = []
        self._pending: dict[str, list[tuple[str, dict]]] = {}
        self._given: dict[str, dict] = {}
        self._agents: dict[str, str] = {}

    def _UpsertSweep(self, given):
        name = f"sweep{len(self.sweeps) + 1}"
        config = self.sweeps[name] = yaml.safe_load(given["config"])
        values = (field["values"] for field in config["parameters"].values())
        points = (dict(zip(config["parameters"], point, strict=True)) for point in itertools.product(*values))
        self._pending[name] = [(f"{name}-{number}", point) for number, point in enumerate(points)]
        project = {"id": "p1", "name": given["projectName"], "entity": {"id": "e1", "name": ENTITY}}
        return {"upsertSweep": {"sweep": {"name": name, "project": project}, "configValidationWarnings": []}}

    def _SweepWithRuns(self, given):
        name = given["sweep"]
        sweep = {"id": name, "name": name, "method": "grid", "state": "RUNNING", "description": None,
                 "config": yaml.safe_dump(self.sweeps[name]), "createdAt": None, "heartbeatAt": None, "updatedAt": None,
                 "earlyStopJobRunning": False, "bestLoss": None, "controller": None, "scheduler": None, "runs": {"edges": []}}
        return {"project": {"sweep": sweep}}

    def _CreateAgent(self, given):
        number = self._new_id("agent")
        self._agents[number] = given["sweep"]
        return {"createAgent": {"agent": {"id": number}}}

    def _Heartbeat(self, given):
        """Gives a point to an agent without work, or the command to exit."""
        commands = []
        if not json.loads(given["runState"]):
            sweep = self._agents[given["id"]]
            if self._pending[sweep]:
                name, point = self._pending[sweep].pop(0)
                self._given[name] = point
                commands = [{"id": name, "type": "run", "run_id": name, "program": None,
                             "args": {field: {"value": value} for field, value in point.items()}}]
            else:
                commands = [{"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": given["id"]}, "commands": json.dumps(commands)}}

    def _UpsertBucket(self, given):
        if given.get("sweep"):
            self.of_sweep[given["name"]] = given["sweep"]
        return super()._UpsertBucket(given)

    def _stream(self, run: Run, body: dict) -> dict:
        if body.get("preempting") and run.name not in self.preempted:
            self.preempted.append(run.name)
            self._pending[self.of_sweep[run.name]].insert(0, (run.name, self._given[run.name]))
        return super()._stream(run, body)
