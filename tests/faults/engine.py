"""An engine's process that fails when it is told to; otherwise `planaria.engine_process`."""

from __future__ import annotations

import sys
from typing import Any

from planaria import engine_process
from planaria.executor.gang import Gang
from tests.faults.harm import harm, watch
from tests.faults.orders import Orders


def main() -> int:
    orders = Orders()
    orders.sign("engine")
    watch(lambda: "engine", orders)
    form = Gang._form

    def form_or_fail(self: Gang, *args: Any) -> None:
        phase = "recovery" if self.epoch else "start-up"
        for who, _ in orders.at(phase):
            if who == "engine":
                harm(orders.take(who, phase))
            elif not who.startswith("rank") and who != "spare":
                orders.tell_on(who, phase)
        form(self, *args)

    Gang._form = form_or_fail  # type: ignore[assignment, method-assign]
    return engine_process.main()


if __name__ == "__main__":
    sys.exit(main())
