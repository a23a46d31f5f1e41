"""AIWorkspace: workspaces, and the quotas that are bound to them.

One rule: a workspace is the name that jobs carry; it owns no capacity.
"""

from typing import Any

from sublet.domain.errors import Refused
from sublet.faces.pai import names, quotas
from sublet.faces.pai.book import WORKSPACE
from sublet.faces.pai.call import Call, invalid, missing, page

DEFAULT = "default"


def _known(call: Call) -> list[str]:
    """Those that jobs were submitted to, that quotas are bound to, and the default one."""
    live = call.desk.books.read(lambda core: {one.request.workspace for one in core.jobs()})
    return sorted({DEFAULT, *live, *call.book.notes(WORKSPACE)})


def _shown(name: str) -> dict[str, Any]:
    return {
        "WorkspaceId": name,
        "WorkspaceName": name,
        "DisplayName": name,
        "Description": "",
        "Status": "ENABLED",
        "EnvTypes": ["prod"],
        "IsDefault": name == DEFAULT,
    }


def list_workspaces(call: Call) -> dict[str, Any]:
    wanted = call.text("WorkspaceName").lower()
    found = [_shown(name) for name in _known(call) if wanted in name.lower()]
    ids = call.words("WorkspaceIds")
    return page(call, "Workspaces", [one for one in found if not ids or one["WorkspaceId"] in ids], usual=20)


def get_workspace(call: Call) -> dict[str, Any]:
    name = call.path["WorkspaceId"]
    if name not in _known(call):
        raise Refused(what=f"There is no workspace {name}.", code="WorkspaceNotFound", field="WorkspaceId")
    return {**_shown(name), "Owner": {"UserId": call.who.user, "UserName": call.who.user}, "AdminNames": []}


def get_default_workspace(call: Call) -> dict[str, Any]:
    return {**_shown(DEFAULT), "Owner": {"UserId": call.who.user, "UserName": call.who.user}, "Conditions": []}


def create_resource(call: Call) -> dict[str, Any]:
    """Binds quotas to the workspace."""
    room = call.path["WorkspaceId"]
    resources = call.body.get("Resources") or []
    if not resources:
        raise missing("Resources")
    if call.body.get("Option", "Attach") != "Attach":
        raise invalid("Option", call.body["Option"], "Quotas are created by CreateQuota; here they are attached.")
    bound = [quotas.name_in(call, str(one["Id"])) for one in _quotas_of(resources)]
    note = call.book.note(WORKSPACE, room)
    call.book.put(WORKSPACE, room, {**note, "quotas": sorted({*note.get("quotas", ()), *bound})})
    return {"Resources": [{"Id": names.quota_id(one)} for one in bound], "TotalCount": len(bound)}


def _quotas_of(resources: Any) -> list[dict[str, str]]:
    found = []
    for one in resources:
        for quota in one.get("Quotas") or [{"Id": one.get("Id") or one.get("Name")}]:
            if not quota.get("Id"):
                raise missing("Resources.Quotas.Id", "Only quotas are bound here.")
            found.append({"Id": str(quota["Id"])})
    return found


def delete_resource(call: Call) -> dict[str, Any]:
    """Takes quotas from the workspace; they go on existing."""
    room, note = call.path["WorkspaceId"], call.book.note(WORKSPACE, call.path["WorkspaceId"])
    if call.text("Option", "Detach") != "Detach":
        raise invalid("Option", call.text("Option"), "A quota is deleted by DeleteQuota.")
    gone = {quotas.name_in(call, one) for one in (*call.words("ResourceIds"), *call.words("GroupName"))}
    left = [one for one in note.get("quotas", ()) if one not in gone]
    call.book.put(WORKSPACE, room, {**note, "quotas": left})
    return {"ResourceIds": [names.quota_id(one) for one in sorted(gone)]}


def list_resources(call: Call) -> dict[str, Any]:
    """The quotas, of one workspace or of all."""
    room = call.text("WorkspaceId")
    rooms = call.book.notes(WORKSPACE)
    found = []
    for name, note in sorted(rooms.items()):
        for quota in note.get("quotas", ()):
            if room in ("", name) and quota in call.desk.feed.quotas:
                one = {"Id": names.quota_id(quota), "Name": quota, "QuotaType": "PAI", "Mode": "isolate"}
                found.append({"Name": quota, "ProductType": "DLC", "WorkspaceId": name, "Quotas": [one]})
    return page(call, "Resources", found)


def list_quotas(call: Call) -> dict[str, Any]:
    found = []
    for quota in sorted(call.desk.feed.quotas):
        if call.text("Name").lower() in quota.lower():
            found.append(
                {"Id": names.quota_id(quota), "Name": quota, "DisplayName": quota, "QuotaType": "PAI", "Specs": []}
            )
    return page(call, "Quotas", found)


def none_of(name: str) -> Any:
    """A list of things of which there are none here."""

    def handler(call: Call) -> dict[str, Any]:
        return page(call, name, [])

    return handler


def list_members(call: Call) -> dict[str, Any]:
    user = call.who.user
    one = {"UserId": user, "MemberId": user, "MemberName": user, "DisplayName": user, "Roles": ["PAI.WorkspaceAdmin"]}
    return page(call, "Members", [one])
