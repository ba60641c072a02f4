"""Processes of tests that are forked from one that has imported what they need: there is one of those in a process."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.model.rank_main", "tests.proc.link_rank", "planaria.kernels.reference", "planaria.mesh.gloo"]
)
