"""What a seed stands for: one engine with its ranks, or (every fourth) a fleet of engines; and beside it a server that
is ended and begun again. A run depends on nothing but its seed.
"""

from __future__ import annotations

from tests.sim import deployment, restarts, simulation
from tests.sim.deployment import Deployment
from tests.sim.fleet_scenario import draw_fleet
from tests.sim.process import SimWorker
from tests.sim.restarts import Restarts
from tests.sim.scenario import draw
from tests.sim.simulation import MakeWorker, Simulation
from tests.sim.world import Violation

FLEETS = 4  # one in so many


Sim = Simulation | Deployment | Restarts


def simulate(seed: int, make_worker: MakeWorker = SimWorker, *, keyed: bool = True) -> Simulation | Deployment:
    """Run a seed's engines to their end. Raises Violation, with the history in its notes."""
    sim: Simulation | Deployment
    if seed % FLEETS == FLEETS - 1:
        sim = Deployment(draw_fleet(seed, keyed=keyed), make_worker)
    else:
        sim = Simulation(draw(seed, keyed=keyed), make_worker)
    _run(sim)
    return sim


def restart(seed: int) -> Restarts:
    """Likewise the server's journal."""
    sim = Restarts(seed)
    _run(sim)
    return sim


def _run(sim: Sim) -> None:
    try:
        sim.run()
    except Violation as e:
        e.add_note(history(sim))
        raise
    except Exception as e:
        broken = Violation("crash", f"{type(e).__name__}: {e}")
        broken.add_note(history(sim))
        raise broken from e


def history(sim: Sim) -> str:
    match sim:
        case Simulation():
            return "\n".join(simulation.lines(sim))
        case Deployment():
            return "\n".join(deployment.lines(sim))
        case Restarts():
            return "\n".join(restarts.lines(sim))
