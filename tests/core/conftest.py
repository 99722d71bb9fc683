"""Small random models with a real tokenizer, loaded from directories like any checkpoint."""

import pytest
import torch

from nnterp import StandardizedTransformer

TEXT = [
    "The capital of France is Paris and the capital of Germany is Berlin",
    "The Eiffel Tower is in the city of Paris",
    "king king hello hello the queen and the king",
    "When I woke up this morning, I felt happy",
]


def trained_tokenizer(kind="byte-level", add_prefix_space=False):
    """A byte-pair tokenizer of some 400 entries, GPT-2's way ("byte-level") or SentencePiece's ("metaspace")."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "byte-level":
        backend = Tokenizer(models.BPE())
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    else:
        backend = Tokenizer(models.BPE(unk_token="<unk>"))
        splitter = pre_tokenizers.Metaspace(prepend_scheme="first" if add_prefix_space else "never")
        decoder, alphabet = decoders.Metaspace(), []
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), splitter])
    backend.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="<unk>",
        padding_side="left",
    )


@pytest.fixture(scope="session")
def build_tokenizer():
    return trained_tokenizer


def save_small(kind, directory):
    """A random checkpoint of four blocks with a tokenizer, as `from_pretrained` reads it."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    tokenizer = trained_tokenizer()
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.3}
    if kind == "gpt2":
        config = GPT2Config(vocab_size=400, n_embd=32, n_layer=4, n_head=4, n_positions=128, **special)
        module = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            vocab_size=400,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            **special,
        )
        module = LlamaForCausalLM(config)
    module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def small_checkpoint(request, tmp_path_factory):
    """The directory of a small random checkpoint, a Llama and a GPT-2."""
    return save_small(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def gpt2_checkpoint(tmp_path_factory):
    """The directory of the small GPT-2 alone."""
    return save_small("gpt2", tmp_path_factory.mktemp("gpt2-alone"))


def load(directory, **kwargs):
    return StandardizedTransformer(str(directory), dispatch=True, device="cpu", attn_implementation="eager", **kwargs)


@pytest.fixture(scope="session")
def small_model(small_checkpoint):
    return load(small_checkpoint)


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory):
    return load(save_small("llama", tmp_path_factory.mktemp("llama-alone")))


@pytest.fixture(scope="session")
def padding_right(small_checkpoint):
    """The small models with a tokenizer that pads on the right."""
    return load(small_checkpoint, tokenizer_kwargs={"padding_side": "right"})
