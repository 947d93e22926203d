"""Becomes another program, which ends when the launcher does, even if that is killed.

    python -m headrace.cli.tether LAUNCHER_PID COMMAND [ARGUMENT ...]

The kernel keeps the wish over exec, so the program itself need not know.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Tie this process to its launcher and exec the command."""
    launcher_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher_pid:  # it died before this process could ask
        sys.exit("the launcher is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
