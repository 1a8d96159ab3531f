"""A trajectory or a group as one HTML file, without scripts or references. Every text is escaped by the template."""

from __future__ import annotations

from deploy.dashboard.conversation import GroupView
from deploy.page import render_template
from protocol.errors import UserError

TEMPLATE = "trajectory.html"


def group_page(view: GroupView) -> str:
    """Return the page of a group with all its trajectories. Raises UserError without jinja2."""
    return _page(view, list(range(len(view.group.trajectories))))


def trajectory_page(view: GroupView, place: int) -> str:
    """Return the page of one trajectory. Raises UserError if the group has no such trajectory."""
    if place >= len(view.group.trajectories):
        raise UserError(f"the group of seq {view.group.seq} has {len(view.group.trajectories)} trajectories")
    return _page(view, [place])


def _page(view: GroupView, places: list[int]) -> str:
    group = view.to_json()
    group["trajectories"] = [group["trajectories"][place] for place in places]
    return render_template(TEMPLATE, group=group, life=view.life(), places=places)
