"""The hostile peer, as the parent sees it: a process that attacks when told to, and tells what came of it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from shmsched.tools.load.ear import Ear
from shmsched.tools.load.hostile import FAULT
from shmsched.tools.load.tally import KEPT_EXAMPLES

END_S = 5.0
MOST_AHEAD = 4


@dataclass(slots=True)
class Garbage:
    """Started at the first attack. It has no more than a few attacks ahead of it."""

    socket: Path
    seed: int
    ear: Ear
    attacks: Counter[str] = field(default_factory=Counter)
    """What the daemon did about them."""
    faults_found: list[str] = field(default_factory=list)
    """In words."""
    _process: subprocess.Popen[bytes] | None = None
    _said: bytes = b""
    _ahead: int = 0

    def attack(self) -> bool:
        """False if enough attacks are ahead."""
        if self._ahead >= MOST_AHEAD:
            return False
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        try:
            os.write(process.stdin.fileno(), b"\n")
            self._ahead += 1
        except BrokenPipeError:
            self.faults_found.append("the hostile peer has ended, which it must not")
            self._ahead = MOST_AHEAD
        return True

    def _started(self) -> subprocess.Popen[bytes]:
        with self.ear.pipe("the hostile peer") as stderr:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "shmsched.tools.load.hostile", str(self.socket), str(self.seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    def hear(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        while select.select([process.stdout], [], [], 0)[0]:
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return
            self._take(data)

    def finish(self) -> None:
        """Let it end the attack that it is at."""
        if self._process is None:
            return
        try:
            # It ends with its input.
            said, _ = self._process.communicate(timeout=END_S)
            self._take(said)
        except subprocess.TimeoutExpired:
            self.faults_found.append("the hostile peer hung in an attack; it was killed")
            self.end()

    def end(self) -> None:
        """After a run that was broken off: leave nobody behind."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def _take(self, data: bytes) -> None:
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            name, _, outcome = line.decode(errors="replace").partition("\t")
            self._ahead -= 1
            if outcome.startswith(FAULT):
                self.attacks["was answered with a fault"] += 1
                if len(self.faults_found) < KEPT_EXAMPLES:
                    self.faults_found.append(f"after an attack with {name}: {outcome.removeprefix(FAULT + ': ')}")
            else:
                self.attacks[outcome] += 1
