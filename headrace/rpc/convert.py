"""Dataclass to message and back, side by side; the only file that knows both forms."""

import numpy as np

from headrace.errors import ShapeMismatch
from headrace.rpc import common_pb2, target_pb2
from headrace.types import (
    ModelInfo,
    Proposal,
    SamplingParams,
    SparseRow,
    StepTimings,
    Verdict,
)


def sampling_to_message(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """SamplingParams for the wire."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )


def sampling_from_message(message: common_pb2.SamplingParams) -> SamplingParams:
    """SamplingParams from the wire; raises InvalidRequest when a value is out of range."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
    )


def proposal_to_message(proposal: Proposal) -> common_pb2.Proposal:
    """Proposal for the wire."""
    return common_pb2.Proposal(
        token_ids=proposal.token_ids,
        draft_rows=[
            common_pb2.SparseRow(token_ids=row.token_ids.tolist(), probs=row.probs.tolist())
            for row in proposal.draft_rows
        ],
    )


def proposal_from_message(message: common_pb2.Proposal) -> Proposal:
    """Proposal from the wire; raises ShapeMismatch when lengths disagree."""
    return Proposal(
        token_ids=tuple(message.token_ids),
        draft_rows=tuple(_row_from_message(row) for row in message.draft_rows),
    )


def _row_from_message(message: common_pb2.SparseRow) -> SparseRow:
    token_ids = np.array(message.token_ids, dtype=np.int64)
    probs = np.array(message.probs, dtype=np.float32)
    if token_ids.size != probs.size:
        raise ShapeMismatch(f"a draft row has {token_ids.size} tokens and {probs.size} values")
    return SparseRow(token_ids=token_ids, probs=probs)


def verdict_to_message(verdict: Verdict) -> target_pb2.VerifyResponse:
    """Verdict for the wire."""
    timings = verdict.timings
    return target_pb2.VerifyResponse(
        step_index=verdict.step_index,
        num_accepted=verdict.num_accepted,
        output_token_ids=verdict.output_token_ids,
        timings=target_pb2.StepTimings(
            queue_ns=timings.queue_ns,
            sweep_ns=timings.sweep_ns,
            stall_ns=timings.stall_ns,
            forward_ns=timings.forward_ns,
            accept_ns=timings.accept_ns,
            bytes_streamed=timings.bytes_streamed,
            num_sweeps=timings.num_sweeps,
            num_sequences=timings.num_sequences,
            num_tokens=timings.num_tokens,
            sweep_index=timings.sweep_index,
        ),
    )


def verdict_from_message(message: target_pb2.VerifyResponse) -> Verdict:
    """Verdict from the wire."""
    timings = message.timings
    return Verdict(
        step_index=message.step_index,
        num_accepted=message.num_accepted,
        output_token_ids=tuple(message.output_token_ids),
        timings=StepTimings(
            queue_ns=timings.queue_ns,
            sweep_ns=timings.sweep_ns,
            stall_ns=timings.stall_ns,
            forward_ns=timings.forward_ns,
            accept_ns=timings.accept_ns,
            bytes_streamed=timings.bytes_streamed,
            num_sweeps=timings.num_sweeps,
            num_sequences=timings.num_sequences,
            num_tokens=timings.num_tokens,
            sweep_index=timings.sweep_index,
        ),
    )


def model_info_to_message(info: ModelInfo) -> common_pb2.ModelInfo:
    """ModelInfo for the wire."""
    return common_pb2.ModelInfo(
        name=info.name,
        vocab_size=info.vocab_size,
        max_context_tokens=info.max_context_tokens,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        num_layers=info.num_layers,
        kv_capacity_tokens=info.kv_capacity_tokens,
        streamed_bytes_per_sweep=info.streamed_bytes_per_sweep,
    )


def model_info_from_message(message: common_pb2.ModelInfo) -> ModelInfo:
    """ModelInfo from the wire."""
    return ModelInfo(
        name=message.name,
        vocab_size=message.vocab_size,
        max_context_tokens=message.max_context_tokens,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        num_layers=message.num_layers,
        kv_capacity_tokens=message.kv_capacity_tokens,
        streamed_bytes_per_sweep=message.streamed_bytes_per_sweep,
    )
