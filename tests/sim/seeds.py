"""What a seed stands for: one engine with its ranks, or (every fourth) a fleet of engines. `simulate` raises Violation.

A run depends on nothing but its seed.
"""

from __future__ import annotations

from tests.sim import deployment, simulation
from tests.sim.deployment import Deployment
from tests.sim.fleet_scenario import draw_fleet
from tests.sim.process import SimWorker
from tests.sim.scenario import draw
from tests.sim.simulation import MakeWorker, Simulation
from tests.sim.world import Violation

FLEETS = 4  # one in so many


def simulate(seed: int, make_worker: MakeWorker = SimWorker, *, keyed: bool = True) -> Simulation | Deployment:
    """Run a seed to its end. Raises Violation, with the history in its notes."""
    sim: Simulation | Deployment
    if seed % FLEETS == FLEETS - 1:
        sim = Deployment(draw_fleet(seed, keyed=keyed), make_worker)
    else:
        sim = Simulation(draw(seed, keyed=keyed), make_worker)
    try:
        sim.run()
    except Violation as e:
        e.add_note(history(sim))
        raise
    except Exception as e:
        broken = Violation("crash", f"{type(e).__name__}: {e}")
        broken.add_note(history(sim))
        raise broken from e
    return sim


def history(sim: Simulation | Deployment) -> str:
    return "\n".join(simulation.lines(sim) if isinstance(sim, Simulation) else deployment.lines(sim))
