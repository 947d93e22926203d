"""A GGUF file turned into a Hugging Face directory with bf16 safetensors.

python -m headrace.catalog.gguf GGUF_FILE DIRECTORY
"""

import subprocess
import sys
from pathlib import Path

from headrace.errors import ConfigError


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Write a model, its tokenizer and its chat template.

    Quantised weights are expanded to bf16, so that the directory is an ordinary checkpoint. Runs
    in a process of its own: the caller stays free of torch and of the memory it takes.

    Args:
        gguf: A GGUF file of an architecture that transformers knows.
        directory: An existing, empty directory.

    Raises:
        ConfigError: The conversion failed.
    """
    command = [sys.executable, "-m", "headrace.catalog.gguf", str(gguf), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"cannot convert {gguf.name}: {reason[0]}")


def _convert(gguf: Path, directory: Path) -> None:
    # Imported here, in the process that converts.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parsed = load_gguf_checkpoint(
        gguf, return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
    )
    weights = directory / "model.safetensors"
    save_file(parsed["tensors"], weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file leaves it to its owner alone

    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = config.max_position_embeddings  # a GGUF does not tell
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
