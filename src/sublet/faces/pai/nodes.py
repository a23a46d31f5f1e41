"""PaiStudio's nodes: what stands on them, and closing and opening them.

One rule: what stands on idle resources is counted on a node and not named there.
"""

from collections.abc import Mapping
from typing import Any

from sublet.core.views import NodeView
from sublet.domain.errors import Refused
from sublet.domain.leases import LeaseKind
from sublet.domain.nodes import NodeState
from sublet.faces.pai import history, names, pods, quotas
from sublet.faces.pai.call import Call, invalid, missing, page
from sublet.faces.pai.orders import OVERSOLD
from sublet.service import commands

STATES = {
    NodeState.UP: "Ready",
    NodeState.DRAINING: "SchedulingDisabled",
    NodeState.LOST: "NotReady",
    NodeState.QUARANTINED: "NotReady",
}


def list_nodes(call: Call) -> dict[str, Any]:
    views = call.desk.books.read(lambda core: core.nodes())
    specs = _specs_of_quota(call)
    found = [_node(view) for view in views if specs is None or view.node.spec in specs]
    return page(call, "Nodes", [one for one in found if _is_meant(call, one)])


def _specs_of_quota(call: Call) -> set[str] | None:
    """A quota is a count and no set of machines: what is listed are the nodes of its kinds."""
    if not call.text("QuotaId"):
        return None
    name = quotas.name_in(call, call.text("QuotaId"))
    promised = call.desk.feed.quotas[name].nominal
    return set(promised or ())


def _is_meant(call: Call, one: Mapping[str, Any]) -> bool:
    return (
        (not call.words("NodeNames") or one["NodeName"] in call.words("NodeNames"))
        and (not call.words("NodeTypes") or one["NodeType"] in call.words("NodeTypes"))
        and (not call.words("NodeStatuses") or one["NodeStatus"] in call.words("NodeStatuses"))
        and call.text("GPUType") in ("", one["GPUType"])
        and call.text("AcceleratorType").upper() in ("", "GPU")
    )


def _node(view: NodeView) -> dict[str, Any]:
    node = view.node
    return {
        "NodeName": node.name,
        "NodeType": node.spec,
        "NodeStatus": STATES[view.state],
        "OrderStatus": "Running",
        "AcceleratorType": "GPU",
        "GPUType": node.spec,
        "GPU": str(node.gpu),
        "CPU": str(node.cpu_milli // 1000),
        "Memory": str(node.memory_bytes // 2**30),
        "RequestGPU": str(node.gpu - view.free_gpu),
        "IsBound": True,
        "WorkloadNum": len(view.leases),
        "Users": [],
        "HyperNode": node.rack,
    }


def list_node_types(call: Call) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    for record in call.desk.feed.nodes.values():
        node = record.node
        kinds.setdefault(
            node.spec,
            {
                "NodeType": node.spec,
                "AcceleratorType": "GPU",
                "GPUType": node.spec,
                "GPU": str(node.gpu),
                "CPU": str(node.cpu_milli // 1000),
                "Memory": str(node.memory_bytes // 2**30),
            },
        )
    return page(call, "NodeTypes", [kinds[spec] for spec in sorted(kinds)])


def list_node_pods(call: Call) -> dict[str, Any]:
    """Those In Quota by name; of idle ones, when they are asked for, only what they take."""
    name = call.path["NodeId"]
    if name not in call.desk.feed.nodes:
        raise Refused(what=f"There is no node {name}.", hint="See ListNodes.", code="NodeNotFound", field="NodeId")
    wanted = {one.lower() for one in call.words("OversoldTypes")}
    found = []
    for record in call.desk.books.read(lambda core: list(core.jobs())):
        lease = record.lease
        if lease is None or (wanted and OVERSOLD[record.request.idle].lower() not in wanted):
            continue
        shown_id, is_idle = names.dlc_id(record.request.id), lease.kind is LeaseKind.IDLE
        for role in pods.roles(record):
            for number in range(role.count):
                instance = role.first + number
                if instance >= len(lease.nodes) or lease.nodes[instance] != name or instance not in record.live:
                    continue
                found.append(
                    {
                        "PodName": "" if is_idle else names.pod_id(shown_id, role.name, number),
                        "WorkloadId": "" if is_idle else shown_id,
                        "WorkloadType": "DLC",
                        "ResourceSpec": {"GPU": str(lease.gpus[instance])},
                        "Phase": "Running" if history.status_of(record) == "Running" else "Pending",
                        "GPUIndexes": [],
                    }
                )
    return page(call, "NodePodInfos", found)


def operate_node(call: Call) -> dict[str, Any]:
    """Cordon: it takes nobody new. Uncordon: it does again."""
    name, operation = call.path["NodeId"], str(call.body.get("Operation") or "")
    if not operation:
        raise missing("Operation")
    if operation == "Cordon":
        commands.drain(call.desk, name)
    elif operation == "Uncordon":
        commands.resume(call.desk, name)
    elif operation == "Drain":
        why = "Nobody is evicted for a drain here: whoever is on the node stays to its end."
        raise Refused(what="Drain is not done.", why=why, hint="Use Cordon.", code="UnsupportedOperation")
    else:
        raise invalid("Operation", operation, "It may be Cordon or Uncordon.")
    return {"NodeId": name}
