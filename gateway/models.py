"""The models behind this gateway: wait for them, and see that they belong together."""

import asyncio
import logging
from dataclasses import dataclass

from gateway.peers import DraftPeer, TargetPeer
from headrace.errors import ConfigError, DeadlineExceeded, PeerUnavailable
from headrace.types import ModelInfo

logger = logging.getLogger(__name__)

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The target and, where there is one, its draft."""

    target: TargetPeer
    target_info: ModelInfo
    draft: DraftPeer | None
    draft_info: ModelInfo | None

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that the target can take."""
        return min(self.target_info.max_context_tokens, self.target_info.kv_capacity_tokens)


async def wait_for_models(
    target: TargetPeer, draft: DraftPeer | None, *, num_tokens: int, timeout_s: float
) -> Models:
    """Ask both processes what they serve, until they answer.

    Args:
        target: The target.
        draft: The draft, if there is one.
        num_tokens: Of the tokenizer; each model needs an output row for each.
        timeout_s: How long they may take to load.

    Raises:
        ConfigError: One does not answer in time, or they cannot speculate together.
    """
    target_info = await _wait_for_model(target, timeout_s)
    draft_info = None if draft is None else await _wait_for_model(draft, timeout_s)
    if draft_info is not None:
        check_pair(target_info, draft_info, num_tokens=num_tokens)
    return Models(target=target, target_info=target_info, draft=draft, draft_info=draft_info)


def check_pair(target: ModelInfo, draft: ModelInfo, *, num_tokens: int) -> None:
    """Refuse a draft that speaks another vocabulary; padding of the output rows may differ.

    Raises:
        ConfigError: The reason, and what to do.
    """
    if draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise ConfigError(
            f"the draft {draft.name!r} has another tokenizer than the target {target.name!r}: "
            "choose a draft of the same family"
        )
    for role, model in (("target", target), ("draft", draft)):
        if model.vocab_size < num_tokens:
            raise ConfigError(
                f"the {role} {model.name!r} has {model.vocab_size} output rows for a tokenizer of "
                f"{num_tokens} tokens: use the tokenizer that it was trained with"
            )


async def _wait_for_model(peer: TargetPeer | DraftPeer, timeout_s: float) -> ModelInfo:
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await peer.get_model()
                except (PeerUnavailable, DeadlineExceeded):
                    logger.info("waiting for the %s", peer.name)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise ConfigError(
            f"the {peer.name} did not answer within {timeout_s:.0f} s: start it, or correct "
            f"HEADRACE_{peer.name.upper()}_ADDRESS"
        ) from None
