"""What a sweep is predicted to take, worked out by hand."""

import os
from pathlib import Path

from headrace.bench.diagnosis import predict
from headrace.bench.drive import measure_drive


def test_a_streamed_sweep_takes_as_long_as_its_reads() -> None:
    # 4 GB at 2 GB/s are read in 2 s; 5 GB are computed with in 0.5 s, or 2.5 s with 16 tokens.
    expected = predict(
        streamed_bytes=4_000_000_000,
        weight_bytes=5_000_000_000,
        drive_gb_per_s=2.0,
        compute_gb_per_s=10.0,
        compute_gb_per_s_16=2.0,
    )
    assert expected.limited_by == "drive"
    assert expected.seconds_per_sweep == 2.0
    assert expected.tokens_per_s == 0.5
    assert expected.tokens_per_s_16 == 16 / 2.5


def test_a_resident_sweep_takes_as_long_as_its_computation() -> None:
    expected = predict(
        streamed_bytes=0,
        weight_bytes=1_000_000_000,
        drive_gb_per_s=1.0,
        compute_gb_per_s=10.0,
        compute_gb_per_s_16=5.0,
    )
    assert expected.limited_by == "processor"
    assert expected.seconds_per_sweep == 0.1
    assert expected.tokens_per_s_16 == 16 / 0.2


def test_files_of_any_length_can_be_measured(tmp_path: Path) -> None:
    sizes = (1, 4096, 5_000_000)
    files = [tmp_path / str(size) for size in sizes]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(os.urandom(size))
    assert measure_drive(files, duration_s=0.2).gb_per_s > 0
