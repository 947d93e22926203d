"""Where the user's own package index keeps a wheel. Names no index: pip knows its own."""

import json
import subprocess
import sys

from headrace.errors import ConfigError

_TIMEOUT_S = 300.0


def wheel_url(requirement: str) -> str:
    """The URL of a wheel, as this interpreter's pip would download it.

    Args:
        requirement: For example "name==1.2".

    Raises:
        ConfigError: There is no pip, or it cannot find the wheel.
    """
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, requirement]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError("pip did not answer: check its index with `pip config list`") from None
    if answer.returncode != 0:
        reasons = [
            line for line in answer.stderr.splitlines() if "No module" in line or "ERROR" in line
        ]
        raise ConfigError(
            f"pip cannot find {requirement}: check the index that pip is configured with"
            + "".join(f"\n  {reason}" for reason in reasons)
        )
    return str(json.loads(answer.stdout)["install"][0]["download_info"]["url"])
