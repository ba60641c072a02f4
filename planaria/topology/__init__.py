"""Placement as arithmetic: what there is, what is asked for, who goes where. Nothing here starts or asks anything."""

from planaria.topology.cluster import Bundle, Cluster, Device, LaneGroup, Node, cluster_of_bundles
from planaria.topology.layout import AXES, Coords, Layout
from planaria.topology.nearest import DoesNotFit, HeadTooSmall, Instead
from planaria.topology.packing import STRATEGIES, Packing, pack, pack_groups
from planaria.topology.placement import Infeasible, Placement, RankSlot, place, place_at, shrink

__all__ = [
    "AXES",
    "STRATEGIES",
    "Bundle",
    "Cluster",
    "Coords",
    "Device",
    "DoesNotFit",
    "HeadTooSmall",
    "Infeasible",
    "Instead",
    "LaneGroup",
    "Layout",
    "Node",
    "Packing",
    "Placement",
    "RankSlot",
    "cluster_of_bundles",
    "pack",
    "pack_groups",
    "place",
    "place_at",
    "shrink",
]
