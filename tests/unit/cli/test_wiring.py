"""Every process is told where the others are, and of nothing that is not there."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.partition import Partition
from headrace.cli.wiring import PrivateDirectories, StackConfig, stages

DIRECTORIES = PrivateDirectories(run=Path("/run/h"), shared_memory=Path("/dev/shm/h"))
STREAMED = Partition(
    is_streamed=True,
    num_slots=3,
    slot_bytes=4096,
    resident_bytes=5000,
    kv_tokens=600,
    max_sweep_tokens=70,
)
FULL = StackConfig(
    target_dir=Path("/models/target"),
    draft_dir=Path("/models/draft"),
    gamma=5,
    host="127.0.0.1",
    http_port=8001,
    grpc_port=50051,
    partition=STREAMED,
)


def names(config: StackConfig, environ: dict[str, str] | None = None) -> list[list[str]]:
    plan = stages(config, DIRECTORIES, environ or {})
    return [[spec.name for spec in stage] for stage in plan]


def environment(config: StackConfig, environ: dict[str, str] | None = None) -> dict[str, str]:
    return dict(stages(config, DIRECTORIES, environ or {})[-1][0].environment)


def test_storage_starts_first_and_the_gateway_last() -> None:
    assert names(FULL) == [["redis", "streamer"], ["target", "draft"], ["gateway"]]


@pytest.mark.parametrize(
    ("config", "environ", "missing", "unset"),
    [
        (FULL, {"REDIS_URL": "redis://other"}, "redis", None),
        (
            replace(FULL, partition=replace(STREAMED, is_streamed=False)),
            {},
            "streamer",
            "HEADRACE_STREAMER_ADDRESS",
        ),
        (replace(FULL, draft_dir=None), {}, "draft", "HEADRACE_DRAFT_ADDRESS"),
    ],
)
def test_what_is_not_needed_is_neither_started_nor_named(
    config: StackConfig, environ: dict[str, str], missing: str, unset: str | None
) -> None:
    assert missing not in [name for stage in names(config, environ) for name in stage]
    if unset is not None:
        assert unset not in environment(config, {**environ, unset: "unix:/stray"})


def test_a_given_redis_is_passed_on() -> None:
    assert environment(FULL, {"REDIS_URL": "redis://other"})["REDIS_URL"] == "redis://other"
    assert environment(FULL, {"REDIS_URL": ""})["REDIS_URL"] == "unix:///run/h/redis.sock"


def test_internal_hops_stay_in_the_private_directory() -> None:
    values = environment(FULL)
    for name in ("STREAMER", "TARGET", "DRAFT"):
        address = f"unix:/run/h/{name.lower()}.sock"
        assert values[f"HEADRACE_{name}_ADDRESS"] == address
    assert values["HEADRACE_HTTP_ADDRESS"] == "127.0.0.1:8001"
    assert values["HEADRACE_SHM_DIR"] == "/dev/shm/h"


def test_the_users_own_settings_reach_every_process() -> None:
    values = environment(FULL, {"HEADRACE_TARGET_KV_TOKENS": "99", "HEADRACE_THREADS": "7"})
    assert values["HEADRACE_TARGET_KV_TOKENS"] == "99"
    assert values["HEADRACE_THREADS"] == values["OMP_NUM_THREADS"] == "7"


def test_the_partition_reaches_the_processes() -> None:
    values = environment(FULL)
    assert values["HEADRACE_SLOTS"] == "3"
    assert values["HEADRACE_SLOT_BYTES"] == "4096"
    assert values["HEADRACE_RESIDENT_BYTES"] == "5000"
    assert values["HEADRACE_TARGET_KV_TOKENS"] == values["HEADRACE_DRAFT_KV_TOKENS"] == "600"
    assert values["HEADRACE_MAX_SWEEP_TOKENS"] == "70"


def test_the_gateway_gets_its_drain_and_some_more_to_stop() -> None:
    gateway = stages(FULL, DIRECTORIES, {"HEADRACE_DRAIN_S": "120"})[-1][0]
    assert gateway.stop_grace_s > 120


@pytest.mark.parametrize(
    ("host", "url", "listens_on"),
    [
        ("127.0.0.1", "http://127.0.0.1:8001", "127.0.0.1:8001"),
        ("0.0.0.0", "http://127.0.0.1:8001", "0.0.0.0:8001"),
        ("::1", "http://[::1]:8001", "[::1]:8001"),
        ("::", "http://[::1]:8001", "[::]:8001"),
    ],
)
def test_a_public_interface_is_reached_over_loopback(host: str, url: str, listens_on: str) -> None:
    config = replace(FULL, host=host)
    assert config.base_url == url
    assert environment(config)["HEADRACE_HTTP_ADDRESS"] == listens_on
