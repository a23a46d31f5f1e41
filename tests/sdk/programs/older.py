"""The older ways: the SDK of 1.4.13, the core SDK's bare request, and alipai's estimator; all sign with HMAC-SHA1."""

import json
import sys
import time

port, key, secret, command, quota, older = sys.argv[1:]
sys.path.insert(0, older)

import alibabacloud_pai_dlc20201203
from alibabacloud_pai_dlc20201203 import models
from alibabacloud_pai_dlc20201203.client import Client
from alibabacloud_tea_openapi.models import Config
from aliyunsdkcore.client import AcsClient
from aliyunsdkcore.request import CommonRequest

assert alibabacloud_pai_dlc20201203.__version__ == "1.4.13"
dlc = Client(Config(access_key_id=key, access_key_secret=secret, protocol="http", endpoint=f"127.0.0.1:{port}"))


def bare(path: str, action: str, **query: str) -> dict:
    request = CommonRequest()
    request.set_domain(f"127.0.0.1:{port}")
    request.set_protocol_type("http")
    request.set_version("2020-12-03")
    request.set_action_name(action)
    request.set_method("GET")
    request.set_uri_pattern(path)
    for name, value in query.items():
        request.add_query_param(name, value)
    return json.loads(AcsClient(key, secret, "cn-local").do_action_with_exception(request))


settings = models.JobSettings(oversold_type="AcceptQuotaOverSold", tags={"way": "older"})
spec = models.JobSpec(type="Worker", pod_count=1, image="i", resource_config=models.ResourceConfig(gpu="1"))
request = models.CreateJobRequest(
    display_name="ältere Zeit", job_type="PyTorchJob", job_specs=[spec], user_command=f"{command} 3 0.01",
    resource_id=quota, settings=settings,
)  # fmt: skip
job = dlc.create_job(request).body.job_id
listed = dlc.list_jobs(models.ListJobsRequest(display_name="ÄLTERE ZEIT", show_own=False, tags={"way": "older"})).body
assert [one.job_id for one in listed.jobs] == [job] and listed.jobs[0].use_oversold_resource is False
found = bare(f"/api/v1/jobs/{job}", "GetJob", NeedDetail="True")
assert found["JobId"] == job and found["Settings"]["OversoldType"] == "AcceptQuotaOverSold"
assert bare("/api/v1/jobs", "ListJobs", DisplayName="a b+c*~", Status="")["TotalCount"] == 0

from pai.estimator import Estimator
from pai.job import InstanceSpec
from pai.session import CredentialConfig, setup_default_session

owner = CredentialConfig(type="access_key", access_key_id=key, access_key_secret=secret)
session = setup_default_session(
    region_id="cn-local", workspace_id="1", credential_config=owner, network="PUBLIC", oss_bucket_name="none",
    header={"host": f"http://127.0.0.1:{port}"},
)  # fmt: skip
estimator = Estimator(
    image_uri="training:1", command=f"{command} $PAI_HPS_STEPS 0.01", hyperparameters={"steps": 5},
    output_path="oss://none/out", resource_id=quota, instance_count=1, base_job_name="estimated",
    instance_spec=InstanceSpec(cpu="1", gpu="1", memory="1"), labels={"OversoldType": "ForceQuotaOverSold"},
)  # fmt: skip
training = estimator.fit(wait=True, show_logs=False)
assert training.is_succeeded()
lines = session.training_job_api.list_logs(training.training_job_id, page_size=50).items
assert lines[-1] == "done at 5", lines
shown = session.training_job_api.get(training.training_job_id)
assert shown["Status"] == "Succeed" and shown["TrainingJobName"].startswith("estimated"), shown
listed = dlc.list_jobs(models.ListJobsRequest(display_name="estimated")).body
assert listed.jobs[0].use_oversold_resource is True  # the label chose the idle policy that alipai's models drop
specs = session.job_api.list_ecs_specs(page_number=1, page_size=10).items
assert {one["InstanceType"] for one in specs} == {"demo", "demo.1"}
deadline = time.monotonic() + 30
while dlc.get_job(job, models.GetJobRequest()).body.status != "Succeeded":
    assert time.monotonic() < deadline
    time.sleep(0.2)
print("all of it")
