"""What Ray's state API says of a fleet, as its users see it (`ray list actors`): it needs Ray's dashboard."""

from __future__ import annotations

import pytest

from tests.proc.servers import Server, needs_smollm2
from tests.ray.clusters import joined_nodes, reserved
from tests.ray.test_fleet import check_plan, plan_of

pytestmark = [needs_smollm2, pytest.mark.long]


def test_the_state_api_says_what_plan_printed() -> None:
    from ray.util.state import list_actors, list_placement_groups

    layout = ["-dp", "2", "-tp", "2"]
    with joined_nodes(2, 1, 2, dashboard=True) as cluster:
        api = f"http://{cluster.head_node.webui_url}"
        planned = plan_of(*layout)
        with Server("smollm2", "--null-worker", *layout, "--data-parallel-backend", "ray") as server:
            actors = list_actors(address=api, filters=[("state", "=", "ALIVE")], detail=True)
            said = reserved((actor.pid, actor.node_id, actor.required_resources) for actor in actors)
            check_plan(server, planned, said)
            groups = list_placement_groups(address=api, filters=[("state", "=", "CREATED")], detail=True)
            assert {group.placement_group_id for group in groups} == {group for _, group, _ in said.values()}
