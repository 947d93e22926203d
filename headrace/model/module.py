"""A Hugging Face decoder without weights: parameters on the meta device, bound to tensors later.

Any decoder-only model that transformers can build from a config and that takes the attention
interface works. Code from a model directory is never run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from headrace.errors import CheckpointCorrupt, ConfigError
from headrace.model import attention
from headrace.model.kv_cache import LayerKVShape


class UnboundModule:
    """A decoder whose parameters are bound to tensors by their checkpoint names."""

    def __init__(self, directory: Path) -> None:
        """Build the module that a directory's config.json describes.

        Raises:
            ConfigError: transformers has no decoder for it, or it needs code of its own.
        """
        self.config = _load_config(directory)
        self.dtype = _dtype(self.config)
        self.module = _build(self.config, self.dtype)
        self._parameters = _parameters_by_name(self.module)

    @property
    def num_layers(self) -> int:
        """Decoder layers, L."""
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the output, V."""
        return int(self.config.vocab_size)

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence that the model was made for."""
        return int(self.config.max_position_embeddings)

    def kv_shapes(self) -> list[LayerKVShape]:
        """[L] what each layer stores for one token."""
        config = self.config
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = LayerKVShape(num_heads=num_heads, key_dim=head_dim, value_dim=head_dim)
        return [shape] * self.num_layers

    def layer(self, name: str) -> nn.Module:
        """The submodule of a decoder layer, by the name its tensors begin with."""
        return self.module.get_submodule(self._qualified(name))

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Let parameters be these tensors, without a copy.

        Args:
            tensors: By checkpoint name; shape and dtype as the module's own.

        Raises:
            CheckpointCorrupt: A name or shape that the module does not have.
        """
        for name, tensor in tensors.items():
            slots = self._parameters.get(self._qualified(name))
            if slots is None:
                raise CheckpointCorrupt(f"tensor {name} has no place in this model's architecture")
            for owner, attribute, shape in slots:
                if tensor.shape != shape:
                    raise CheckpointCorrupt(
                        f"tensor {name} has shape {list(tensor.shape)}, "
                        f"config.json asks for {list(shape)}"
                    )
                owner._parameters[attribute] = tensor  # type: ignore[assignment]

    def require(self, names: set[str]) -> None:
        """Check that a checkpoint holds every parameter.

        Args:
            names: Every tensor name of the checkpoint.

        Raises:
            CheckpointCorrupt: Lists the parameters that it lacks.
        """
        have = {self._qualified(name) for name in names}
        tied = {id(slots) for name, slots in self._parameters.items() if name in have}
        missing = [n for n, slots in self._parameters.items() if id(slots) not in tied]
        if missing:
            raise CheckpointCorrupt(
                f"the checkpoint lacks {len(missing)} tensors of {self.config.model_type}: "
                + ", ".join(missing[:8])
            )

    def _qualified(self, name: str) -> str:
        """Some checkpoints leave out the prefix of the base model."""
        if name in self._parameters or name.startswith(f"{self.module.base_model_prefix}."):
            return name
        return f"{self.module.base_model_prefix}.{name}"


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


def _build(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    attention.register()
    try:
        with no_init_weights(), _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION
            )
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"{config.model_type} models cannot be served: transformers has no decoder for it "
            f"that takes the attention interface ({error})"
        ) from None
    model.tie_weights()
    module: nn.Module = model.eval()
    return module


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


_Slot = tuple[nn.Module, str, torch.Size]


def _parameters_by_name(module: nn.Module) -> dict[str, list[_Slot]]:
    """Every parameter's places; tied parameters share one list under each of their names."""
    by_identity: dict[int, list[_Slot]] = {}
    by_name: dict[str, list[_Slot]] = {}
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            slots = by_identity.setdefault(id(parameter), [])
            slots.append((owner, attribute, parameter.shape))
            by_name[f"{prefix}.{attribute}" if prefix else attribute] = slots
    return by_name
