"""The text side of multimodal checkpoints, however they load: names, values and edits, with an image and without."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from nnterp import StandardizedTransformer
from nnterp.testing import checkpoint
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same

PROMPT = "The quick brown fox"
IMAGE = 299
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}
SIGLIP = {"model_type": "siglip_vision_model", **VISION}

#: Where the text model is, its family, what the wrapper's config says, and the image inputs (tokens, further inputs).
WRAPPERS = {
    "llava": (
        "model.language_model",
        "llama",
        {"image_token_index": IMAGE, "vision_config": CLIP},
        (4, {"pixel_values": (1, 3, 16, 16)}),
    ),
    "llava_next": (
        "model.language_model",
        "llama",
        {"image_token_index": IMAGE, "vision_config": CLIP, "image_grid_pinpoints": [[16, 16]]},
        (10, {"pixel_values": (1, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}),
    ),
    "idefics3": (
        "model.text_model",
        "llama",
        {"image_token_id": IMAGE, "vision_config": {"model_type": "idefics3_vision", **VISION}, "scale_factor": 2},
        (1, {"pixel_values": (1, 1, 3, 16, 16)}),
    ),
    "llava_onevision": (
        "model.language_model",
        "qwen2",
        {"image_token_index": IMAGE, "vision_config": SIGLIP, "image_grid_pinpoints": [[16, 16]]},
        (10, {"pixel_values": (1, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}),
    ),
    "mistral3": (
        "model.language_model",
        "mistral",
        {
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "vision_config": {"model_type": "pixtral", "head_dim": 8, **VISION, "image_size": 32},
        },
        (4, {"pixel_values": (1, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]])}),
    ),
}
HEAD_INSIDE = {
    "image_token_index": IMAGE,
    "num_query_tokens": 2,
    "vision_config": {"model_type": "blip_2_vision_model", **VISION},
    "qformer_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "encoder_hidden_size": 32,
        "vocab_size": 64,
    },
    "text_config": {
        "model_type": "opt",
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "vocab_size": checkpoint.VOCAB,
    },
}


class Wrapper:
    """One wrapper's tiny checkpoint, and copies of it that transformers alone loads."""

    def __init__(self, name, directory):
        self.path, self.family, fields, (tokens, shapes) = WRAPPERS[name]
        fields = {**fields, "text_config": {"model_type": self.family, **SIZES}}
        self.directory = checkpoint.save(checkpoint.config(model_type=name, **fields), directory)
        self.tokenizer = checkpoint.tokenizer()
        self.bare = self.load_bare()
        ids = torch.tensor([[40, 41, *[IMAGE] * tokens, 42, 43, 44]])
        generator = torch.Generator().manual_seed(2)
        images = {k: torch.randn(v, generator=generator) if isinstance(v, tuple) else v for k, v in shapes.items()}
        self.with_image = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}

    def load_bare(self):
        loaded = AutoModelForImageTextToText.from_pretrained(self.directory, attn_implementation="eager")
        return loaded.eval()

    def processor(self):
        """A processor that takes text as it is: LLaVA's reads image tokens in it, of which there are none here."""
        from transformers import CLIPImageProcessor, LlavaProcessor

        return LlavaProcessor(CLIPImageProcessor(), self.tokenizer, patch_size=8, image_token="<|image|>")

    def load(self, way):
        source, options = str(self.directory), {"attn_implementation": "eager"}
        if way.startswith("image-text-to-text"):
            options |= {"task": "image-text-to-text", "processor": self.processor()}
        if way.endswith("module"):
            source, options["tokenizer"] = self.load_bare(), self.tokenizer
            del options["attn_implementation"]
        elif not way.endswith("lazily"):
            options["dispatch"] = True
        return StandardizedTransformer(source, **options)

    def hooked(self, inputs, edit=None):
        """What torch hooks on the bare text model see of a run, by value and block, and the logits; ``edit`` is done
        to what block 1 returns.
        """
        text, seen, handles = self.bare.get_submodule(self.path), {}, []

        def keep(name):
            def hook(module, args, output):
                first = output[0] if isinstance(output, tuple) else output
                seen[name] = first.detach().clone()
                if edit is not None and name == ("layer_output", 1):
                    return (edit(first), *output[1:]) if isinstance(output, tuple) else edit(first)
                return None

            return hook

        for name, module in {"token_embeddings": text.embed_tokens, "final_norm_output": text.norm}.items():
            handles.append(module.register_forward_hook(keep(name)))
        for index, block in enumerate(text.layers):
            handles.append(block.self_attn.register_forward_hook(keep(("attention_output", index))))
            handles.append(block.mlp.register_forward_hook(keep(("mlp_output", index))))
            handles.append(block.register_forward_hook(keep(("layer_output", index))))
        try:
            with torch.no_grad():
                seen["logits"] = self.bare(**inputs).logits
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def traced(self, model, *inputs, **named):
        with torch.no_grad(), model.trace(*inputs, **named):
            read = {}.save()
            read["token_embeddings"] = model.token_embeddings.clone()
            for index, block in enumerate(model.layers):
                read["attention_output", index] = block.self_attn.attention_output.clone()
                read["mlp_output", index] = block.mlp.mlp_output.clone()
                read["layer_output", index] = block.layer_output.clone()
            read["final_norm_output"] = model.final_norm_output.clone()
            read["logits"] = model.logits.clone()
        return read


@pytest.fixture(scope="module", params=list(WRAPPERS))
def wrapper(request, tmp_path_factory):
    return Wrapper(request.param, tmp_path_factory.mktemp(request.param))


WAYS = (
    "text-generation",
    "text-generation, lazily",
    "ready module",
    "image-text-to-text",
    "image-text-to-text, lazily",
    "image-text-to-text, ready module",
)


@pytest.fixture(scope="module", params=WAYS)
def model(request, wrapper):
    return wrapper.load(request.param)


def test_names_and_sizes(wrapper, model):
    """The standard names are the text model's modules, and the sizes its config's; a lazy load has them too."""
    text = model.get(wrapper.path)
    assert model.family.__name__.endswith(f".{wrapper.family}")
    assert model.layers is text.layers and model.embed_tokens is text.embed_tokens and model.norm is text.norm
    assert isinstance(model.layers[1], model.family.Layer) and isinstance(model.layers[1].mlp, model.family.Mlp)
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (3, 32, checkpoint.VOCAB)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate_size) == (4, 2, 8, 48)
    assert {value: reason for value, reason in model.support().items() if reason} == {}
    blocks = {id(block) for block in model.layers}
    strays = [each.path for each in model.modules() if isinstance(each, model.family.Layer) and id(each) not in blocks]
    assert not strays, "a block of the tower carries the text family's values"


def test_text_alone(wrapper, model):
    """A prompt without images gives the values that torch hooks on the bare text model see, bit by bit."""
    encoding = dict(wrapper.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False))
    expected = wrapper.hooked(encoding)
    read = wrapper.traced(model, PROMPT)
    assert read.keys() == expected.keys()
    for place, value in read.items():
        assert_same(value, expected[place])


def test_text_values_of_a_prompt_with_an_image(wrapper, model):
    expected = wrapper.hooked(wrapper.with_image)
    read = wrapper.traced(model, **wrapper.with_image)
    for place, value in read.items():
        assert_same(value, expected[place])
    other = {**wrapper.with_image, "pixel_values": -wrapper.with_image["pixel_values"]}
    assert_differs(wrapper.hooked(other)["logits"], expected["logits"])


def test_edits_reach_the_logits(wrapper, model):
    for inputs in ({"input_ids": torch.tensor([[40, 41, 42, 43]])}, wrapper.with_image):
        clean = wrapper.hooked(inputs)["logits"]
        expected = wrapper.hooked(inputs, lambda old: old * 0.5)["logits"]
        with torch.no_grad(), model.trace(**inputs):
            model.layers[1].layer_output = model.layers[1].layer_output * 0.5
            logits = model.logits.save()
        assert_close(logits, expected, ULPS_AFTER_MODEL)
        assert_differs(logits, clean)


def test_generate(wrapper, model):
    encoding = wrapper.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    expected = wrapper.bare.generate(**encoding, **options)
    with model.generate(PROMPT, **options) as tracer:
        seen = [].save()
        for _ in tracer.iter[:3]:
            seen.append(model.layers[2].layer_output.shape[1])
        ids = tracer.result.save()
    assert ids.tolist() == expected.tolist()
    assert seen == [encoding["input_ids"].shape[1], 1, 1]


# -- what the kinds of wrapper do not show --------------------------------------------------------------------------


def test_a_head_inside_the_text_model():
    """BLIP-2 holds a whole causal language model: the root has the names of what is inside it, the head's too."""
    config = AutoConfig.for_model("blip-2", **HEAD_INSIDE)
    bare = checkpoint.randomized(AutoModelForImageTextToText.from_config(config, attn_implementation="eager")).eval()
    model = StandardizedTransformer(bare, tokenizer=checkpoint.tokenizer())
    decoder = model.language_model.model.decoder
    assert model.layers is decoder.layers and model.norm is decoder.final_layer_norm
    assert model.embed_tokens is decoder.embed_tokens and model.lm_head is model.language_model.lm_head
    inputs = {
        "input_ids": torch.tensor([[IMAGE, IMAGE, 40, 41]]),
        "pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3)),
    }
    with torch.no_grad():
        clean = bare(**inputs).logits
    with torch.no_grad(), model.trace(**inputs):
        head = model.lm_head_output.save()
        logits = model.logits.save()
    assert_same(head, clean)
    assert_same(logits, clean)
    with torch.no_grad(), model.trace(**inputs):
        model.final_norm_output = torch.zeros_like(model.final_norm_output)
        logits = model.logits.save()
    assert not logits.any()


@pytest.mark.parametrize("name", ["vision", "projector"])
def test_the_image_side_without_an_overlay(name, monkeypatch):
    """It says which extra brings it where that is missing; where it is there, that it does not serve this wrapper."""
    from nnterp import families

    config = AutoConfig.for_model("blip-2", **HEAD_INSIDE)
    model = StandardizedTransformer(AutoModelForImageTextToText.from_config(config), tokenizer=checkpoint.tokenizer())
    with pytest.raises(AttributeError, match=f"no model.{name}: .*blip-2"):
        getattr(model, name)
    others = [plugin for plugin in families.plugins() if plugin.distribution != "nnterp-vision"]
    monkeypatch.setattr(families, "plugins", lambda: others)
    with pytest.raises(AttributeError, match=r"pip install 'nnterp\[vision\]'"):
        getattr(model, name)
    assert not hasattr(model, name)


def test_the_callers_names_are_paths_of_the_wrapper(tmp_path):
    llava = Wrapper("llava", tmp_path)
    model = StandardizedTransformer(str(llava.directory), rename={"model.vision_tower": "eyes"})
    assert model.eyes is model.model.vision_tower and model.layers is model.model.language_model.layers
    with pytest.raises(ValueError, match="names no module"):
        StandardizedTransformer(str(llava.directory), rename={"model.layers": "blocks"})


def test_a_processor_of_its_own(tmp_path):
    """A checkpoint that is saved with its processor loads as an image-text-to-text model, and text goes through it."""
    llava = Wrapper("llava", tmp_path)
    llava.processor().save_pretrained(llava.directory)
    model = StandardizedTransformer(str(llava.directory), task="image-text-to-text", attn_implementation="eager")
    assert type(model.processor) is type(llava.processor()) and not model.dispatched
    encoding = dict(llava.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False))
    read = llava.traced(model, PROMPT)
    for place, value in llava.hooked(encoding).items():
        assert_same(read[place], value)
