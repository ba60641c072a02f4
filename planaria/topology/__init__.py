"""Placement as arithmetic: what there is, what is asked for, who goes where. Nothing here starts or asks anything."""

from planaria.topology.cluster import Bundle, Cluster, Device, Node, cluster_of_bundles
from planaria.topology.layout import AXES, Coords, Layout
from planaria.topology.placement import Infeasible, Placement, Slot, place, place_at, shrink

__all__ = [
    "AXES",
    "Bundle",
    "Cluster",
    "Coords",
    "Device",
    "Infeasible",
    "Layout",
    "Node",
    "Placement",
    "Slot",
    "cluster_of_bundles",
    "place",
    "place_at",
    "shrink",
]
