"""The story of lending, told with the official SDKs of DLC, PaiStudio and AIWorkspace alone."""

import sys
import time
from collections.abc import Callable
from typing import Any

from alibabacloud_aiworkspace20210204 import models as room_models
from alibabacloud_aiworkspace20210204.client import Client as Rooms
from alibabacloud_pai_dlc20201203 import models
from alibabacloud_pai_dlc20201203.client import Client as Dlc
from alibabacloud_paistudio20220112 import models as studio_models
from alibabacloud_paistudio20220112.client import Client as Studio
from alibabacloud_tea_openapi.models import Config
from Tea.exceptions import TeaException

port, key, secret, command = sys.argv[1:]
config = Config(access_key_id=key, access_key_secret=secret, protocol="http", endpoint=f"127.0.0.1:{port}")
dlc, studio = Dlc(config), Studio(config)
rooms = Rooms(Config(access_key_id=key, access_key_secret=secret, endpoint=f"http://127.0.0.1:{port}"))


def until(is_so: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + 60
    while not (answer := is_so()):
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.1)
    return answer


def refusal(act: Callable[[], Any]) -> tuple[str, int]:
    try:
        act()
    except TeaException as error:
        return error.code, error.status_code
    raise AssertionError("it was not refused")


def new_quota(name: str) -> str:
    promise = studio_models.ResourceSpec(node_specs=[studio_models.NodeSpec(type="demo", count=1)])
    request = studio_models.CreateQuotaRequest(
        quota_name=name, min=promise, resource_type="Lingjun", queue_strategy="PaiStrategyIntelligent",
        labels=[studio_models.Label(key="team", value=name)],
    )  # fmt: skip
    return studio.create_quota(request).body.quota_id


def submit(name: str, quota: str, oversold: str, pods: int, steps: int, pause: float) -> str:
    arguments = "--job-execution-mode=Sync --enable-job-restart True --max-num-of-job-restart 10"
    request = models.CreateJobRequest(
        display_name=name, job_type="PyTorchJob", workspace_id="42", resource_id=quota, priority=4,
        user_command=f"{command} {steps} {pause}", envs={"COLOUR": "grün"},
        job_specs=[models.JobSpec(type="Worker", pod_count=pods, image="training:1",
                                  resource_config=models.ResourceConfig(gpu="2", cpu="1", memory="1Gi"))],
        settings=models.JobSettings(
            oversold_type=oversold, enable_error_monitoring_in_aimaster=True, error_monitoring_args=arguments,
            tags={"story": "lending"}, advanced_settings={"Unknown": {"kept": [1, 2]}},
        ),
    )  # fmt: skip
    request.settings.termination_grace_period_seconds = 2
    return dlc.create_job(request).body.job_id


def job(job_id: str) -> Any:
    return dlc.get_job(job_id, models.GetJobRequest(need_detail=True)).body


def listed(job_id: str) -> Any:
    return dlc.list_jobs(models.ListJobsRequest(job_ids=job_id)).body.jobs[0]


def status(job_id: str, *wanted: str) -> Any:
    return until(lambda: (found := job(job_id)).status in wanted and found, f"{job_id} in {wanted}")


def log(job_id: str, pod: str, uid: str | None = None) -> str:
    return "\n".join(dlc.get_pod_logs(job_id, f"{job_id}-{pod}", models.GetPodLogsRequest(pod_uid=uid)).body.logs)


# two quotas of two GPUs each; four in all
nlp, vision = new_quota("nlp"), new_quota("vision")
shown = studio.list_quotas(studio_models.ListQuotasRequest(quota_ids=f"{nlp},{vision}")).body
assert shown.total_count == 2 and {one.quota_name for one in shown.quotas} == {"nlp", "vision"}
assert shown.quotas[0].min.node_specs[0].count == 1 and shown.quotas[0].queue_strategy == "PaiStrategyIntelligent"
binding = room_models.CreateWorkspaceResourceRequest(
    option="Attach",
    resources=[
        room_models.CreateWorkspaceResourceRequestResources(
            name="nlp", quotas=[room_models.CreateWorkspaceResourceRequestResourcesQuotas(id=nlp)]
        )
    ],
)
rooms.create_workspace_resource("42", binding)
assert rooms.get_workspace("42", room_models.GetWorkspaceRequest()).body.status == "ENABLED"
assert refusal(lambda: studio.delete_quota(nlp)) == ("QuotaInUse", 400)

# a job of four GPUs that takes only idle ones: two of them are vision's
borrower = submit("borrower", nlp, "ForceQuotaOverSold", 2, 80, 0.05)
running = status(borrower, "Running")
assert listed(borrower).use_oversold_resource is True
assert all(pod.node_name is None and pod.sub_status == "Normal" for pod in running.pods), running.pods
assert [pod.type for pod in running.pods] == ["master", "worker"]
assert running.settings.to_map()["AdvancedSettings"] == {"Unknown": {"kept": [1, 2]}}
assert running.envs == {"COLOUR": "grün"}
until(lambda: "begins at 0" in log(borrower, "worker-0"), "the first step")
old_uid = running.pods[0].pod_uid

# vision wants its own: the borrower has to leave
owner = submit("owner", vision, "ForbiddenQuotaOverSold", 1, 8, 0.05)
told = status(borrower, "Restarting")
assert told.pods[0].sub_status == "Evicted" and told.reason_code == "ResourcePreempted", told.to_map()
mine = status(owner, "Running", "Succeeded")
assert mine.pods[0].node_name and listed(owner).use_oversold_resource is False
queued = until(
    lambda: (found := job(borrower)).status in ("Queuing", "EnvPreparing", "Running") and found, "its return"
)
assert queued.pods[0].history_pods[0].sub_status == "Evicted", queued.to_map()
assert queued.pods[0].history_pods[0].pod_uid == old_uid
waiting = studio.list_quota_workloads(nlp, studio_models.ListQuotaWorkloadsRequest()).body.workloads
assert [one.workload_id for one in waiting] == [borrower] and waiting[0].use_oversold_resource is True

# it comes back by itself, goes on from its checkpoint, and ends well
assert status(owner, "Succeeded").reason_code == "JobSucceeded"
done = status(borrower, "Succeeded", "Failed")
assert done.status == "Succeeded", done.to_map()
went = [one.status for one in done.status_history]
turn = ["Running", "Restarting", "Queuing", "EnvPreparing", "Running", "Succeeded"]
assert went[-6:] == turn, went
back = next(one for one in done.status_history[1:] if one.status == "Queuing" and "Rollback" in one.reason_message)
assert back.reason_code == "JobEnqueued"
assert done.restart_times == "0/10"  # a preemption spends nothing
first, last = log(borrower, "master-0", old_uid), log(borrower, "master-0")
names = f"RANK=0 WORLD_SIZE=2 NPROC_PER_NODE=2 DLC_JOB_ID={borrower} COLOUR=grün"
assert f"begins at 0 {names}" in first and "done" not in first, first
resumed = int(last.split("begins at ")[1].split()[0])
assert 0 < resumed < 80 and "done at 80" in last, last
events = dlc.get_job_events(borrower, models.GetJobEventsRequest()).body.events
assert any("Resource Preempted" in line for line in events), events
assert any(
    "runs" in line
    for line in dlc.get_pod_events(borrower, f"{borrower}-worker-0", models.GetPodEventsRequest()).body.events
)

# what is listed, and what is refused
counted = lambda **query: dlc.list_jobs(models.ListJobsRequest(**query)).body.total_count  # noqa: E731
assert counted(oversold_info="ForceQuotaOverSold", tags={"story": "lending"}, workspace_id="42") == 1
assert counted(oversold_info="AcceptQuotaOverSold-true") == 0 and counted(resource_id=vision, display_name="OWN") == 1
assert counted(status="Succeeded", show_own=True, sort_by="GmtFinishTime", order="asc") == 2
assert counted(end_time="2020-01-01T00:00:00Z") == 0
assert refusal(lambda: dlc.stop_job(owner)) == ("InvalidJobStatus", 400)
assert refusal(lambda: job("dlc0000000000000")) == ("JobNotFound", 404)
assert refusal(lambda: dlc.list_tensorboards(models.ListTensorboardsRequest())) == ("UnsupportedOperation", 400)
dlc.delete_job(owner)
assert refusal(lambda: job(owner)) == ("JobNotFound", 404) and counted(display_name="owner") == 0
other = Dlc(Config(access_key_id=key, access_key_secret="wrong", protocol="http", endpoint=f"127.0.0.1:{port}"))
assert refusal(lambda: other.list_jobs(models.ListJobsRequest())) == ("SignatureDoesNotMatch", 403)

# the quotas change and go
half = studio_models.ResourceSpec(node_specs=[studio_models.NodeSpec(type="demo", count=0)])
studio.scale_quota(vision, studio_models.ScaleQuotaRequest(min=half))
change = studio_models.UpdateQuotaRequest(
    queue_strategy="PaiStrategyStrictFIFO",
    quota_config=studio_models.QuotaConfig(
        enable_sub_quota_preemption=True, oversold_usage_config=studio_models.OversoldUsageConfig(disabled=True)
    ),
)
studio.update_quota(nlp, change)
changed = studio.get_quota(nlp, studio_models.GetQuotaRequest()).body
assert changed.queue_strategy == "PaiStrategyStrictFIFO" and changed.quota_config.oversold_usage_config.disabled is True
assert changed.quota_config.enable_sub_quota_preemption is True
nodes = studio.list_nodes(studio_models.ListNodesRequest(quota_id=nlp)).body.nodes
studio.operate_node(nodes[0].node_name, studio_models.OperateNodeRequest(operation="Cordon"))
closed = studio.list_nodes(studio_models.ListNodesRequest(node_statuses="SchedulingDisabled")).body.nodes
assert [one.node_name for one in closed] == [nodes[0].node_name]
studio.operate_node(nodes[0].node_name, studio_models.OperateNodeRequest(operation="Uncordon"))
rooms.delete_workspace_resource("42", room_models.DeleteWorkspaceResourceRequest(resource_ids=nlp))
for one in (nlp, vision):
    studio.delete_quota(one)
assert refusal(lambda: studio.get_quota(nlp, studio_models.GetQuotaRequest())) == ("QuotaNotFound", 404)
print("all of it")
