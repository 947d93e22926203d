"""What the user sees."""

import io

from rich.console import Console

from headrace.cli.readiness import Readiness
from headrace.cli.status import (
    LiveDisplay,
    PlainDisplay,
    ProcessStatus,
    RateMeter,
    StackStatus,
)


def make_status() -> StackStatus:
    target = ProcessStatus(started_at_s=0.0, readiness=Readiness.LOADING, memory_bytes=310_000_000)
    return StackStatus(
        endpoints="HTTP http://127.0.0.1:8001/v1",
        processes={"target": target},
        gb_per_s=1.94,
    )


def test_a_rate_spans_the_last_samples() -> None:
    meter = RateMeter()
    assert meter.add(10.0, 5_000_000_000) == 0.0
    assert meter.add(12.0, 9_000_000_000) == 2.0
    idle = [meter.add(float(second), 9_000_000_000) for second in range(13, 20)]
    assert idle[-1] == 0.0


def test_plain_lines_come_once_for_each_change() -> None:
    output = io.StringIO()
    display = PlainDisplay(output)
    status = make_status()
    display.show(status)
    display.show(status)
    text = output.getvalue()
    assert "0.31 GB in memory" in text
    assert "1.94 GB/s" in text
    num_lines = len(text.splitlines())
    status.processes["target"].readiness = Readiness.READY
    status.is_serving = True
    display.show(status)
    display.show(status)
    new_lines = output.getvalue().splitlines()[num_lines:]
    assert len(new_lines) == 2
    assert new_lines[0].startswith("target: ready")
    assert new_lines[1] == "serving: HTTP http://127.0.0.1:8001/v1"


def test_a_closed_display_is_silent() -> None:
    output = io.StringIO()
    display = PlainDisplay(output)
    display.close()
    display.show(make_status())
    assert output.getvalue() == ""


def test_the_live_table_shows_states_memory_and_rate() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, record=True, width=100)
    display = LiveDisplay(console)
    display.show(make_status())
    display.close()
    text = console.export_text()
    for part in ("target", "loading", "0.31 GB in memory", "1.94 GB/s"):
        assert part in text
