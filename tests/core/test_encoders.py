"""What is no decoder with a language-model head is refused: encoders, encoder-decoders, decoders under other heads."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nnterp import StandardizedTransformer, UnsupportedFamily, loading

CONFIGS = json.loads((Path(__file__).parent / "tiny_decoders.json").read_text())

#: The types of the causal mapping that are encoders, encoder-decoders or cut out of one.
# fmt: off
ENCODERS = (
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
    "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus", "plbart", "prophetnet",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm",
    "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
)
# fmt: on


def test_encoders_are_refused_and_decoders_are_not():
    for model_type in ENCODERS:
        with pytest.raises(UnsupportedFamily, match="nnterp standardizes decoder-only transformers"):
            loading.refuse_encoders(AutoConfig.for_model(model_type), model_type)
    for model_type in set(CONFIGS) & set(CONFIG_MAPPING):
        loading.refuse_encoders(AutoConfig.for_model(model_type, **CONFIGS[model_type]), model_type)


BART = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


@pytest.mark.parametrize(
    ("model_type", "sizes", "message"),
    [
        ("bert", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}, "'bert' is an encoder, whose"),
        ("bart", {"d_model": 32, **BART}, "'bart' is an encoder-decoder"),
        ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 2}, "'xlnet' is an encoder, whose"),
    ],
)
def test_a_ready_encoder_is_refused(model_type, sizes, message):
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=50, **sizes))
    with pytest.raises(UnsupportedFamily, match=message):
        StandardizedTransformer(module)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_a_ready_decoder_without_a_language_model_head_is_refused(model_type, kind):
    module = kind.from_config(AutoConfig.for_model(model_type, **CONFIGS[model_type]))
    with pytest.raises(
        UnsupportedFamily, match=rf"{type(module).__name__} has no language-model head.*AutoModelForCau"
    ):
        StandardizedTransformer(module)
