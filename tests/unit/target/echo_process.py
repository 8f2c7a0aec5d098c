"""Sends back what comes over a plan channel until an empty array comes: echo_process.py PATH_THERE PATH_BACK."""

from __future__ import annotations

import sys

from outrider.workers.target.channel import ShmPlanChannel


def main() -> None:
    there = ShmPlanChannel.open(sys.argv[1], 1, 2, deadline_s=30)
    back = ShmPlanChannel.open(sys.argv[2], 0, 2, deadline_s=30)  # the test holds the other end of this one
    while len(values := there.receive()):
        back.send(values)


if __name__ == "__main__":
    main()
