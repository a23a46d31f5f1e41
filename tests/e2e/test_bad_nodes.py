"""Nodes that fail: a job keeps away from one, several jobs make it suspected, and it is trusted again."""

import json
from pathlib import Path

from tests.e2e.server import serving, until

CLUSTER = """
nodes:
  - {name: n1, spec: demo, gpu: 4}
  - {name: n2, spec: demo, gpu: 4}
quotas:
  q: {nominal: {demo: 8}}
rules: {suspect: 8s, grace: 7s}
"""
LOST = "echo 'NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.'; exit 1"


def test_a_node_whose_machine_fails_is_avoided_then_suspected_then_trusted_again(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    keys = {"quota": "q", "gpu": 4, "fault_tolerance": {"backoff": {"first": "100ms"}}}
    go = tmp_path / "go"
    command = f"test $SUBLET_ATTEMPT -gt 2 || {{ {LOST}; }}; until [ -e {go} ]; do sleep 0.05; done"
    with serving(tmp_path / "data", tmp_path, "--config", "cluster.yaml") as server:
        job = server.submit(json.dumps({**keys, "command": command}))
        until(lambda: (view := server.job(job))["attempt"] == 3 and view["nodes"] == ["n2"], "attempt 3 on the other")
        go.touch()
        assert server.reaches(job, "succeeded", "failed")["state"] == "succeeded"
        shown = server.run("show", job).out
        restarts = json.loads(server.run("show", job, "-o", "json").out)["restarts"]
        assert [(one["node"], one["cause"], one["avoided"], one["attempt"]) for one in restarts] == [
            ("n1", "hardware", False, 1), ("n1", "hardware", True, 2),
        ]  # fmt: skip
        assert all(one["seconds"] is not None and "fallen off" in one["evidence"] for one in restarts)
        assert "keeps away from n1" in shown and "n1, avoided since" in shown

        assert "suspected" not in server.run("node", "ls").out, "one job alone makes no suspicion"
        other = server.submit(json.dumps({**keys, "command": f"test $SUBLET_ATTEMPT -gt 1 || {{ {LOST}; }}"}))
        assert server.reaches(other, "succeeded", "failed")["state"] == "succeeded"
        assert "Up, suspected" in server.run("node", "ls").out
        told = server.run("node", "show", "n1").out
        assert "suspected  until" in told and "met 2 jobs there" in told and "hardware" in told
        until(lambda: "suspected" not in server.run("node", "ls").out, "trust")
        events = server.run("events").out
        assert "hardware faults met 2 jobs there" in events and "trusted" in events
        assert "met" not in server.run("node", "show", "n1").out
        assert server.run("node", "show", "n3").code == 2

        quiet = server.submit(json.dumps({"quota": "q", "gpu": 1, "command": "echo grace $SUBLET_GRACE_SECONDS"}))
        server.reaches(quiet, "succeeded")
        assert server.run("logs", quiet).out == "grace 7\n", "the cluster's own, where the job asks for none"
