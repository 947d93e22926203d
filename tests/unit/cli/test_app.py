"""The command line from the outside."""

import socket

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.ports import claim_port
from headrace.errors import ConfigError

runner = CliRunner()


def test_an_error_is_one_line_and_exit_code_1() -> None:
    result = runner.invoke(app, ["run", "hello", "--target", "./absent"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("headrace: there is no directory ./absent")


@pytest.mark.parametrize(
    "options", [["--gamma", "many"], ["--max-tokens", "0"], ["--temperature", "-1"], ["--nonsense"]]
)
def test_wrong_usage_is_exit_code_2(options: list[str]) -> None:
    assert runner.invoke(app, ["run", "hello", *options]).exit_code == 2


def test_an_empty_prompt_is_refused() -> None:
    result = runner.invoke(app, ["run", "  "])
    assert result.exit_code == 2
    assert "give a question" in result.stderr


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = runner.invoke(app, ["serve", "--http-port", str(port), "--target", "./absent"])
    assert result.exit_code == 1
    assert f"cannot listen on port {port}" in result.stderr
    assert "--http-port" in result.stderr


def test_port_0_is_a_free_port() -> None:
    port = claim_port("127.0.0.1", 0, "--http-port")
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


def test_a_foreign_interface_is_refused() -> None:
    with pytest.raises(ConfigError, match="--http-port"):
        claim_port("192.0.2.1", 0, "--http-port")
