"""The settings of the gateway process, read once from the environment."""

from dataclasses import dataclass
from pathlib import Path

from headrace.config import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of the gateway process."""

    target_dir: Path
    """Only its tokenizer and configuration are read."""
    target_address: str
    draft_address: str | None
    """None: plain decoding."""
    redis_url: str
    http_address: str
    rpc_address: str
    model_name: str | None
    """None: the target's own name."""
    default_max_tokens: int
    gamma: int
    max_live_sequences: int
    max_waiting_sequences: int
    owner_lease_s: float
    request_ttl_s: float
    request_timeout_s: float
    drain_s: float
    start_timeout_s: float
    """How long the peers may take to load their models."""

    @classmethod
    def from_environment(cls, environment: Environment) -> "Config":
        """Read the settings; raises ConfigError naming what is wrong."""
        return cls(
            target_dir=environment.directory("HEADRACE_TARGET_DIR"),
            target_address=environment.text("HEADRACE_TARGET_ADDRESS"),
            draft_address=environment.optional_text("HEADRACE_DRAFT_ADDRESS"),
            redis_url=environment.text("REDIS_URL"),
            http_address=environment.text("HEADRACE_HTTP_ADDRESS", "127.0.0.1:8001"),
            rpc_address=environment.text("HEADRACE_GRPC_ADDRESS", "127.0.0.1:50051"),
            model_name=environment.optional_text("HEADRACE_MODEL_NAME"),
            default_max_tokens=environment.integer("HEADRACE_DEFAULT_MAX_TOKENS", 1_024, minimum=1),
            gamma=environment.integer("HEADRACE_GAMMA", 4),
            max_live_sequences=environment.integer("HEADRACE_MAX_LIVE_SEQUENCES", 64, minimum=1),
            max_waiting_sequences=environment.integer("HEADRACE_MAX_WAITING_SEQUENCES", 256),
            owner_lease_s=environment.number("HEADRACE_OWNER_LEASE_S", 10, minimum=1),
            request_ttl_s=environment.number("HEADRACE_REQUEST_TTL_S", 3600, minimum=1),
            request_timeout_s=environment.number("HEADRACE_REQUEST_TIMEOUT_S", 3600, minimum=1),
            drain_s=environment.number("HEADRACE_DRAIN_S", 30),
            start_timeout_s=environment.number("HEADRACE_START_TIMEOUT_S", 600, minimum=1),
        )
