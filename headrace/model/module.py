"""A Hugging Face decoder without weights: parameters on the meta device, bound to tensors later.

Any decoder-only model that transformers can build from a config and that takes the attention
interface works. Code from a model directory is never run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from headrace.errors import CheckpointCorrupt, ConfigError
from headrace.model import attention_interface, falcon_attention
from headrace.model.attention_probe import probe_kv_shapes
from headrace.model.formats import float8
from headrace.model.kv_cache import LayerKVShape

_CHOOSE = "choose a model whose layers all have plain attention, as Llama, Qwen 3 or Mixtral do"


class UnboundModule:
    """A decoder whose parameters are bound to tensors by name."""

    def __init__(self, directory: Path) -> None:
        """Build the module that a directory's config.json describes.

        Raises:
            ConfigError: transformers has no decoder for it, it needs code of its own, or it cannot
                be served.
        """
        self.config = _load_config(directory)
        try:
            _check_config(self.config)
            self.dtype = _dtype(self.config)
            self.num_layers = int(self.config.num_hidden_layers)
            """Decoder layers, L."""
            self.module = _build(self.config, self.dtype)
            self.vocab_size = int(self.module.get_output_embeddings().weight.shape[0])
            """Rows of the output, V."""
            self._kv_shapes = probe_kv_shapes(self.module, self.num_layers)
            self.max_context_tokens = _max_context_tokens(self.config)
            """Longest sequence that the model was made for."""
        except ConfigError as error:
            raise ConfigError(
                f"this {self.config.model_type} model cannot be served: {error.message}"
            ) from error

    def kv_shapes(self) -> list[LayerKVShape]:
        """[L] what each layer stores for one token."""
        return self._kv_shapes

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Let parameters and buffers be these tensors, without a copy.

        Args:
            tensors: By the module's own names; parameters that are tied are bound together.

        Raises:
            CheckpointCorrupt: A tensor has another shape than the module's.
        """
        for name, tensor in tensors.items():
            for places, attribute, shape in self._slots[name]:
                if tensor.shape != shape:
                    raise CheckpointCorrupt(
                        f"tensor {name} has shape {list(tensor.shape)}, "
                        f"config.json asks for {list(shape)}"
                    )
                places[attribute] = tensor

    def move_buffers(self, device: torch.device) -> None:
        """Put what the module computes with beside its parameters on a device."""
        for owner in self.module.modules():
            for attribute, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[attribute] = buffer.to(device)

    @cached_property
    def _slots(self) -> dict[str, list["_Slot"]]:
        """Every tensor's places; tied parameters share one list under each of their names."""
        by_identity: dict[int, list[_Slot]] = {}
        by_name: dict[str, list[_Slot]] = {}
        for prefix, owner in self.module.named_modules():
            for places in (owner._parameters, owner._buffers):
                for attribute, tensor in places.items():
                    if tensor is not None:
                        slots = by_identity.setdefault(id(tensor), [])
                        slots.append((places, attribute, tensor.shape))
                        by_name[f"{prefix}.{attribute}" if prefix else attribute] = slots
        return by_name


_Slot = tuple[dict[str, Any], str, torch.Size]


def _load_config(directory: Path) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{directory}: config.json does not describe a model that this version of "
            f"transformers knows ({error})"
        ) from None
    return config.get_text_config(decoder=True)


def _dtype(config: PretrainedConfig) -> torch.dtype:
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return torch.float32 if dtype is None else dtype


def _check_config(config: PretrainedConfig) -> None:
    """Refuse what could not be served exactly, before anything is built."""
    if config.is_encoder_decoder:
        raise ConfigError(f"it has an encoder; {_CHOOSE}")
    if not getattr(config, "is_causal", True) or (
        getattr(config, "use_bidirectional_attention", None) in {True, "all"}
    ):
        raise ConfigError(f"its tokens see later ones; {_CHOOSE}")
    if getattr(config, "alibi", False):
        raise ConfigError(f"its attention takes biases by distance (alibi); {_CHOOSE}")
    if any(rope.get("rope_type") == "dynamic" for rope in _rope_parameters(config)):
        raise ConfigError(
            "its rope_type, dynamic, lets the longest sequence change all others; set rope_type to "
            "yarn or default in config.json if the model was made for it"
        )
    if getattr(config, "quantization_config", None) is not None:
        float8.check_quantization(config.quantization_config)


def _max_context_tokens(config: PretrainedConfig) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise ConfigError(
            "config.json does not say how long a sequence may be; add max_position_embeddings to it"
        )
    # Beyond the second limit the keys of all sequences would be rotated by other frequencies.
    ropes = [r for r in _rope_parameters(config) if r.get("rope_type") == "longrope"]
    return min([int(limit), *(int(rope["original_max_position_embeddings"]) for rope in ropes)])


def _rope_parameters(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """The rotary embeddings' parameters: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def _build(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    attention_interface.register()
    falcon_attention.register()
    try:
        with no_init_weights(), _parameters_on_meta():
            module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention_interface.IMPLEMENTATION
            )
    except (ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"transformers has no decoder for it that takes the attention interface; {_CHOOSE}"
        ) from error
    if module._is_stateful:
        raise ConfigError(
            "some of its layers keep a running state instead of keys and values, and that cannot "
            f"go back when a guess was wrong; {_CHOOSE}"
        )
    module.tie_weights()
    module.register_forward_pre_hook(_begin_pass, with_kwargs=True)
    module.register_forward_hook(_end_pass, always_call=True)
    return module.eval()


def _begin_pass(
    _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let the model's attention be that of the pass that the keyword ragged_batch gives."""
    packed_pass = keywords.pop("ragged_batch")
    attention_interface.begin(packed_pass)
    no_padding = torch.ones_like(keywords["input_ids"])
    return arguments, {**keywords, "cache": packed_pass, "attention_mask": no_padding}


def _end_pass(*_: object) -> None:
    attention_interface.end()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each parameter on the meta device as it is made; buffers stay real, with their values.

    Building everything under torch.device("meta") would leave rotary frequencies and the like
    without values, and nothing in general can tell how to compute them again.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
