"""Every operation of PAI's API that its SDKs know: what is done here, what is done in part, what is not planned.

One rule: this table routes requests and writes docs/reference/pai.md, so that neither can claim what is not there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sublet.domain.errors import Refused
from sublet.faces.pai import dlc, nodes, quotas, training, workloads, workspaces
from sublet.faces.pai.call import Call

Handler = Callable[[Call], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`note`: what is missing, or why it is not planned; with a handler and no note it is done."""

    product: str
    action: str
    method: str
    path: str
    handler: Handler | None = None
    note: str = ""

    @property
    def state(self) -> str:
        if self.handler is None:
            return "not planned"
        return "partly" if self.note else "done"


VERSIONS = {"2020-12-03": "DLC", "2022-01-12": "PaiStudio", "2021-02-04": "AIWorkspace"}
ROUTES = {
    "DLC": """
CreateJob POST jobs
CreateJobTemplate POST jobtemplates
CreateRayHistoryServer POST rayhistoryservers
CreateSignal POST jobs/{JobId}/signals
CreateTensorboard POST tensorboards
DeleteJob DELETE jobs/{JobId}
DeleteJobTemplate DELETE jobtemplates/{TemplateId}
DeleteRayHistoryServer DELETE rayhistoryservers/{RayHistoryServerId}
DeleteTensorboard DELETE tensorboards/{TensorboardId}
GetDashboard GET jobs/{JobId}/dashboard
GetJob GET jobs/{JobId}
GetJobEvents GET jobs/{JobId}/events
GetJobMetrics GET jobs/{JobId}/metrics
GetJobSanityCheckResult GET jobs/{JobId}/sanitycheckresult
GetJobTemplate GET jobtemplates/{TemplateId}
GetMetrics GET cms/metrics
GetPodEvents GET jobs/{JobId}/pods/{PodId}/events
GetPodLogs GET jobs/{JobId}/pods/{PodId}/logs
GetRayDashboard GET jobs/{JobId}/rayDashboard
GetRayHistoryServer GET rayhistoryservers/{RayHistoryServerId}
GetSignal GET jobs/{JobId}/signals/{SignalId}
GetTensorboard GET tensorboards/{TensorboardId}
GetTensorboardSharedUrl GET tensorboards/{TensorboardId}/sharedurl
GetToken GET tokens
GetWebTerminal GET jobs/{JobId}/pods/{PodId}/webterminal
ListEcsSpecs GET ecsspecs
ListJobSanityCheckResults GET jobs/{JobId}/sanitycheckresults
ListJobTemplates GET jobtemplates
ListJobs GET jobs
ListRayHistoryServers GET rayhistoryservers
ListSignals GET jobs/{JobId}/signals
ListTensorboards GET tensorboards
SetJobTemplateDefaultVersion PUT jobtemplates/{TemplateId}/defaultversion
StartRayHistoryServer POST rayhistoryservers/{RayHistoryServerId}/start
StartTensorboard PUT tensorboards/{TensorboardId}/start
StopJob POST jobs/{JobId}/stop
StopRayHistoryServer POST rayhistoryservers/{RayHistoryServerId}/stop
StopTensorboard PUT tensorboards/{TensorboardId}/stop
TagResources POST tags
UntagResources DELETE tags
UpdateJob PUT jobs/{JobId}
UpdateJobTemplate PUT jobtemplates/{TemplateId}
UpdateTensorboard PUT tensorboards/{TensorboardId}
""",
    "PaiStudio": """
CheckInstanceWebTerminal POST trainingjobs/{TrainingJobId}/instances/{InstanceId}/webterminals/action/check
CreateAlgorithm POST algorithms
CreateAlgorithmVersion POST algorithms/{AlgorithmId}/versions/{AlgorithmVersion}
CreateInstanceWebTerminal POST trainingjobs/{TrainingJobId}/instances/{InstanceId}/webterminals
CreateQuota POST quotas
CreateResourceGroup POST resources
CreateTrainingJob POST trainingjobs
DeleteAlgorithm DELETE algorithms/{AlgorithmId}
DeleteAlgorithmVersion DELETE algorithms/{AlgorithmId}/versions/{AlgorithmVersion}
DeleteMachineGroup DELETE resources/machinegroups/{MachineGroupId}
DeleteQuota DELETE quotas/{QuotaId}
DeleteResourceGroup DELETE resources/{ResourceGroupId}
DeleteResourceGroupMachineGroup DELETE resources/{ResourceGroupId}/machinegroups/{MachineGroupId}
DeleteTrainingJob DELETE trainingjobs/{TrainingJobId}
DeleteTrainingJobLabels DELETE trainingjobs/{TrainingJobId}/labels
GetAlgorithm GET algorithms/{AlgorithmId}
GetAlgorithmVersion GET algorithms/{AlgorithmId}/versions/{AlgorithmVersion}
GetMachineGroup GET resources/machinegroups/{MachineGroupId}
GetNodeMetrics GET resources/{ResourceGroupId}/nodemetrics/{MetricType}
GetQuota GET quotas/{QuotaId}
GetQuotaWorkloadDiagnosis GET quotas/{QuotaId}/workloads/{WorkloadId}/diagnosis
GetResourceGroup GET resources/{ResourceGroupId}
GetResourceGroupMachineGroup GET resources/{ResourceGroupId}/machinegroups/{MachineGroupId}
GetResourceGroupRequest GET resources/data/request
GetResourceGroupTotal GET resources/data/total
GetSpotPriceHistory GET spots/{InstanceType}/pricehistory
GetToken GET tokens
GetTrainingJob GET trainingjobs/{TrainingJobId}
GetTrainingJobErrorInfo GET trainingjobs/{TrainingJobId}/errorinfo
GetTrainingJobLatestMetrics GET trainingjobs/{TrainingJobId}/latestmetrics
GetUserViewMetrics GET resources/{ResourceGroupId}/usermetrics
ListAlgorithmVersions GET algorithms/{AlgorithmId}/versions
ListAlgorithms GET algorithms
ListNodePods GET nodes/{NodeId}/Pods
ListNodeTypes GET nodetypes
ListNodes GET nodes
ListQuotaActiveUserUsages GET quotas/{QuotaId}/activeuserusages
ListQuotaWorkloads GET quotas/{QuotaId}/workloads
ListQuotas GET quotas
ListResourceGroupMachineGroups GET resources/{ResourceGroupId}/machinegroups
ListResourceGroups GET resources
ListTagResources GET tags
ListTrainingJobEvents GET trainingjobs/{TrainingJobId}/events
ListTrainingJobInstanceEvents GET trainingjobs/{TrainingJobId}/instances/{InstanceId}/events
ListTrainingJobInstanceMetrics GET trainingjobs/{TrainingJobId}/instancemetrics
ListTrainingJobLogs GET trainingjobs/{TrainingJobId}/logs
ListTrainingJobMetrics GET trainingjobs/{TrainingJobId}/metrics
ListTrainingJobOutputModels GET trainingjobs/{TrainingJobId}/outputmodels
ListTrainingJobs GET trainingjobs
OperateNode POST nodes/{NodeId}
ScaleQuota PUT quotas/{QuotaId}/action/scale
StopTrainingJob PUT trainingjobs/{TrainingJobId}/stop
TagResources POST tags
UntagResources DELETE tags
UpdateAlgorithm PUT algorithms/{AlgorithmId}
UpdateAlgorithmVersion PUT algorithms/{AlgorithmId}/versions/{AlgorithmVersion}
UpdateQuota PUT quotas/{QuotaId}
UpdateResourceGroup PUT resources/{ResourceGroupId}
UpdateTrainingJobLabels POST trainingjobs/{TrainingJobId}/labels
""",
    "AIWorkspace": """
CreateWorkspaceResource POST workspaces/{WorkspaceId}/resources
DeleteWorkspaceResource DELETE workspaces/{WorkspaceId}/resources
GetDefaultWorkspace GET defaultWorkspaces
GetWorkspace GET workspaces/{WorkspaceId}
ListCodeSources GET codesources
ListConfigs GET workspaces/{WorkspaceId}/configs
ListDatasets GET datasets
ListImages GET images
ListMembers GET workspaces/{WorkspaceId}/members
ListQuotas GET quotas
ListResources GET resources
ListWorkspaces GET workspaces
UpdateWorkspaceResource PUT workspaces/{WorkspaceId}/resources
""",
}
HANDLERS: Mapping[str, Mapping[str, tuple[Handler, str]]] = {
    "DLC": {
        "CreateJob": (dlc.create_job, "one command for all roles; images and data are not mounted"),
        "GetJob": (dlc.get_job, ""),
        "ListJobs": (dlc.list_jobs, ""),
        "StopJob": (dlc.stop_job, ""),
        "UpdateJob": (dlc.update_job, "JobSpecs and UserCommand cannot be changed"),
        "DeleteJob": (dlc.delete_job, ""),
        "GetJobEvents": (dlc.get_job_events, ""),
        "GetPodEvents": (dlc.get_pod_events, ""),
        "GetPodLogs": (dlc.get_pod_logs, "StartTime, EndTime: lines carry no time"),
        "ListEcsSpecs": (dlc.list_ecs_specs, "no stock and no prices"),
    },
    "PaiStudio": {
        "CreateQuota": (
            quotas.create_quota,
            "ClusterSpec and resource groups are kept only",
        ),
        "GetQuota": (quotas.get_quota, "QuotaDetails in GPUs alone"),
        "ListQuotas": (quotas.list_quotas, "ClusterType, GPUType, LayoutMode, Versions choose nothing"),
        "UpdateQuota": (quotas.update_quota, "a quota keeps its name; lists of priorities to preempt are kept only"),
        "ScaleQuota": (quotas.scale_quota, ""),
        "DeleteQuota": (quotas.delete_quota, ""),
        "ListQuotaWorkloads": (workloads.list_quota_workloads, "those that have not ended; BeforeWorkloadId, NodeName"),
        "GetQuotaWorkloadDiagnosis": (workloads.diagnosis, "reasons in Sublet's codes where PAI's are not public"),
        "ListQuotaActiveUserUsages": (workloads.list_user_usages, ""),
        "ListNodes": (nodes.list_nodes, "HealthCount, HealthRate and machine groups choose nothing"),
        "ListNodeTypes": (nodes.list_node_types, ""),
        "ListNodePods": (nodes.list_node_pods, "GPUIndexes are not told; pods on idle resources have no name"),
        "OperateNode": (nodes.operate_node, "Cordon and Uncordon; no Drain, no ResizeDisk"),
        "CreateTrainingJob": (training.create, "no registered algorithms, no mounted channels"),
        "GetTrainingJob": (training.get, "no metrics and no output model"),
        "ListTrainingJobs": (training.list_all, "Status, TrainingJobName, WorkspaceId, Order"),
        "StopTrainingJob": (training.stop, ""),
        "DeleteTrainingJob": (training.delete, ""),
        "ListTrainingJobLogs": (training.list_logs, "StartTime, EndTime: lines carry no time"),
        "ListTrainingJobEvents": (training.list_events, ""),
    },
    "AIWorkspace": {
        "ListWorkspaces": (workspaces.list_workspaces, "those that jobs or bindings name, and `default`"),
        "GetWorkspace": (workspaces.get_workspace, "names only"),
        "GetDefaultWorkspace": (workspaces.get_default_workspace, "names only"),
        "CreateWorkspaceResource": (workspaces.create_resource, "Attach only"),
        "DeleteWorkspaceResource": (workspaces.delete_resource, "Detach only"),
        "ListResources": (workspaces.list_resources, "bound quotas only"),
        "ListQuotas": (workspaces.list_quotas, "names only"),
        "ListMembers": (workspaces.list_members, "the caller only"),
        "ListImages": (workspaces.none_of("Images"), "there are none"),
        "ListDatasets": (workspaces.none_of("Datasets"), "there are none"),
        "ListCodeSources": (workspaces.none_of("CodeSources"), "there are none"),
    },
}
NOTES: Mapping[str, str] = {  # by a part of the action's name; the first that fits
    "Algorithm": "Send the command itself, in AlgorithmSpec.",
    "Template": "Keep templates as files.",
    "Tensorboard": "Start TensorBoard as a job of its own.",
    "SanityCheck": "Nodes that faults meet are suspected and avoided by themselves.",
    "RayHistoryServer": "Ray jobs are not done.",
    "RayDashboard": "Ray jobs are not done.",
    "Spot": "There are no spot instances.",
    "ResourceGroup": "Nodes form one pool; a quota is a count.",
    "MachineGroup": "Nodes form one pool; a quota is a count.",
    "NodeMetrics": "See /metrics.",
    "UserViewMetrics": "See /metrics.",
    "JobMetrics": "Not yet: usage of instances is not recorded.",
    "GetMetrics": "See /metrics.",
    "TrainingJob": "Not yet.",
    "Signal": "Not yet: only a notice reaches a program.",
    "Tag": "Tags are given when a job is created.",
    "Label": "Labels are given when a job is created.",
    "WebTerminal": "Nobody enters a running instance from outside.",
    "Token": "Sign requests with an access key.",
}


def operations() -> tuple[Operation, ...]:
    """All, in the order of products and names."""
    found = []
    for product, rows in ROUTES.items():
        handlers = HANDLERS.get(product, {})
        for row in rows.split("\n"):
            if row:
                action, method, path = row.split()
                handler, note = handlers.get(action, (None, _why_not(action)))
                found.append(_operation(product, action, method, path, handler, note))
    return tuple(found)


def _operation(product: str, action: str, method: str, path: str, handler: Handler | None, note: str) -> Operation:
    whole = f"/api/v1/{path}"
    return Operation(product=product, action=action, method=method, path=whole, handler=handler, note=note)


def _why_not(action: str) -> str:
    return next((why for part, why in NOTES.items() if part in action), "Sublet has nothing of the kind.")


OPERATIONS = operations()
_BY_SHAPE: dict[tuple[str, str, int], list[Operation]] = {}
for _one in OPERATIONS:
    _BY_SHAPE.setdefault((_one.product, _one.method, _one.path.count("/")), []).append(_one)


def operation_of(version: str, method: str, path: str) -> tuple[Operation, dict[str, str]]:
    """The operation, and the parts of the path in braces, still encoded. A slash at the end does not matter.

    Literal parts win over those in braces. Refused when there is none such.
    """
    product = VERSIONS.get(version)
    if product is None:
        why = f"Known are {', '.join(VERSIONS)}."
        raise Refused(what=f"x-acs-version is {version}.", why=why, code="InvalidVersion")
    words = path.rstrip("/").split("/")
    fitting = []
    for one in _BY_SHAPE.get((product, method, len(words) - 1), ()):
        names = one.path.split("/")
        parts = {n[1:-1]: w for n, w in zip(names, words, strict=True) if n.startswith("{") and w}
        if all(n == w or n[1:-1] in parts for n, w in zip(names, words, strict=True)):
            fitting.append((len(parts), one.action, one, parts))
    if not fitting:
        raise Refused(what=f"{product} has no {method} {path}.", code="InvalidAction.NotFound")
    _, _, found, parts = min(fitting, key=lambda item: item[:2])
    return found, parts
