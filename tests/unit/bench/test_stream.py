"""The figures of `headrace bench stream`, worked out by hand."""

from headrace.bench.stream import Round, StreamReport
from headrace.bench.sweeps import SweepSample

_GB = 10**9


def _round(disk_gb_per_s: float, seconds: float, *, idle_share: float = 0.0) -> Round:
    """Three sweeps of 2 GB each for every number of tokens; those of 64 leave the disk idle."""
    return Round(
        disk_gb_per_s=disk_gb_per_s,
        samples={
            tokens: SweepSample(
                num_sweeps=3,
                elapsed_s=3 * seconds,
                num_bytes=6 * _GB,
                busy_s=3 * seconds * (1 - idle_share if tokens == 64 else 1),
            )
            for tokens in (1, 8, 64)
        },
    )


def test_the_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_the_medians() -> None:
    # Rates 2, 1, 0.5 beside disks of 2, 4, 0.5: ratios 1, 0.25, 1.
    rounds = [_round(2.0, 1.0), _round(4.0, 2.0), _round(0.5, 4.0)]
    report = StreamReport(
        rounds=rounds, peak_rss_bytes={"target": 5}, model_bytes=2 * _GB, memory_cap_bytes=None
    ).as_object()
    assert report == {
        "disk_gb_per_s": 2.0,
        "stream_gb_per_s": 1.0,
        "ratio": 1.0,
        "sweeps": [{"tokens": tokens, "seconds": 2.0} for tokens in (1, 8, 64)],
        "disk_idle_share": 0.0,
        "peak_rss_bytes": {"target": 5},
        "model_bytes": 2 * _GB,
        "memory_cap_bytes": None,
    }


def test_the_idle_share_is_that_of_the_sweeps_that_leave_the_disk_idle_longest() -> None:
    rounds = [_round(2.0, 1.0, idle_share=share) for share in (0.1, 0.3, 0.2)]
    report = StreamReport(rounds=rounds, peak_rss_bytes={}, model_bytes=1, memory_cap_bytes=1)
    assert report.as_object()["disk_idle_share"] == 0.2
