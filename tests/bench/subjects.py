"""The models that are measured: Llamas whose own arithmetic is small, so that what is around it shows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import nnsight  # noqa: F401 - before any modeling module of transformers
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a")), eos_token="</s>"
    )


def llama(layers: int, width: int = 64, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A ready Llama of ``layers`` blocks, with eager attention and random weights.

    Or with ``weights``, another's state, as its own: models that share memory do not push each other out of the caches.
    """
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        attn_implementation="eager",
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    if weights is not None:
        model.load_state_dict(weights, assign=True)
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread and no autograd: the forward at its fastest, which is when what is around it weighs most."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
