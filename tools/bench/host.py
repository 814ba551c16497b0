"""``python -m shmsched.tools.bench.host``: one contestant. Its plan and its orders come on standard input, a line each.

It ends, and everything that it started with it, when its standard input does.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import ExitStack
from typing import Any

from shmsched.tools.bench.crew import Crew
from shmsched.tools.bench.plan import Plan, Round, RoundResult


def main() -> None:
    plan = Plan.from_json(json.loads(sys.stdin.readline()))
    peer = importlib.import_module(f"shmsched.tools.bench.peers.{plan.transport.value}")
    with ExitStack() as stack:
        crew = Crew(plan)
        socket = peer.start(plan, crew, stack)
        crew.wait_ready()
        _say({"ready": True, "socket": socket, "processes": crew.processes})
        for line in sys.stdin:
            result = RoundResult.of(crew.run(Round(**json.loads(line))))
            _say(result.to_json())


def _say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
