"""The text models of the Qwen-VL wrappers: the whole text suite, and rotary positions of three axes."""

import pytest
import torch
from torch import Tensor

from nnterp import StandardizedTransformer
from nnterp.testing import FamilySuite, checkpoint
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.oracles import greedy

#: Heads 8 wide, whose four pairs `mrope_section` gives to the three axes of a position.
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
#: Heads 12 wide, with six pairs.
WIDER = {**TEXT["rope_parameters"], "mrope_section": [2, 2, 2]}
IMAGE = 290
TOKENS = {"image_token_id": IMAGE, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}
NATIVE = {
    "embed_tokens": "model.language_model.embed_tokens",
    "layers": "model.language_model.layers",
    "norm": "model.language_model.norm",
}


class TestQwen2VL(FamilySuite):
    FAMILY = "qwen2_vl_text"
    CONFIG = {
        "model_type": "qwen2_vl",
        **TOKENS,
        "text_config": {"model_type": "qwen2_vl_text", **TEXT},
        "vision_config": {
            "model_type": "qwen2_vl_vision",
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 8,
        },
    }
    NATIVE = NATIVE


class TestQwen25VL(FamilySuite):
    FAMILY = "qwen2_5_vl_text"
    CONFIG = {
        "model_type": "qwen2_5_vl",
        **TOKENS,
        "text_config": {"model_type": "qwen2_5_vl_text", **TEXT},
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 8,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "window_size": 32,
        },
    }
    NATIVE = NATIVE
    LAYOUTS = {
        "full": {},
        "windows": {
            "config": {
                "text_config": {
                    "model_type": "qwen2_5_vl_text",
                    **TEXT,
                    "use_sliding_window": True,
                    "sliding_window": 3,
                    "max_window_layers": 1,
                    "tie_word_embeddings": True,
                }
            }
        },
    }


class TestQwen3VL(FamilySuite):
    FAMILY = "qwen3_vl_text"
    CONFIG = {
        "model_type": "qwen3_vl",
        **TOKENS,
        "text_config": {"model_type": "qwen3_vl_text", **TEXT, "head_dim": 12, "rope_parameters": WIDER},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 8,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
    }
    NATIVE = NATIVE
    EXPECTED_UNAVAILABLE = {"deepstack_output": "no image reaches this load"}


# -- an image's positions ---------------------------------------------------------------------------------------------

#: One image of 4 by 6 patches, merged two by two, between two tokens and three.
IMAGE_INPUTS = {
    "input_ids": torch.tensor([[40, 41, *[IMAGE] * 6, 42, 43, 44]]),
    "attention_mask": torch.ones(1, 11, dtype=torch.long),
    "mm_token_type_ids": torch.tensor([[0, 0, *[1] * 6, 0, 0, 0]]),
    "image_grid_thw": torch.tensor([[1, 4, 6]]),
    "pixel_values": torch.randn(24, 384, generator=torch.Generator().manual_seed(4)),
}
#: The positions of those tokens along time, height and width: the text goes on behind the longest side of the image.
POSITIONS = torch.tensor(
    [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
)


def rotated(heads: Tensor, axes: list[int]) -> Tensor:
    """``[batch, heads, seq, width]`` with its pairs turned by their angles, pair ``i`` by positions of ``axes[i]``."""
    pairs = torch.arange(len(axes), dtype=torch.float32)
    angles = POSITIONS[axes].T.float() * 10000.0 ** (-pairs / len(axes))
    first, second = heads.chunk(2, -1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


@pytest.fixture(scope="module", params=[(TestQwen2VL, "0012"), (TestQwen25VL, "0012"), (TestQwen3VL, "012012")])
def with_image(request, tmp_path_factory):
    """A wrapper that an image reaches: a copy by nnterp, one by transformers, the axis of each pair of a head."""
    suite, axes = request.param
    directory = checkpoint.save(checkpoint.config(**suite.CONFIG), tmp_path_factory.mktemp(suite.FAMILY))
    options = {"attn_implementation": "eager"}
    model = StandardizedTransformer(str(directory), dispatch=True, **options)
    bare = checkpoint.auto_class(model.config).from_pretrained(directory, **options).eval()
    return model, bare, [int(axis) for axis in axes]


def hooked(bare, call):
    """What ``call`` gives, and by name what hooks on the second text block of the bare model see at each call."""
    block, seen, handles = bare.model.language_model.layers[1], {}, []

    def keep(name):
        def hook(module, args, output):
            seen.setdefault(name, []).append((output[0] if isinstance(output, tuple) else output).detach().clone())

        return hook

    for name in ("q_norm", "k_norm", "q_proj", "k_proj", "v_proj"):
        if hasattr(block.self_attn, name):
            handles.append(getattr(block.self_attn, name).register_forward_hook(keep(name)))
    handles.append(block.register_forward_hook(keep("stream")))
    try:
        with torch.no_grad():
            return call(), seen
    finally:
        for handle in handles:
            handle.remove()


def test_queries_and_keys_are_rotated_along_three_axes(with_image):
    """The projections of the bare model (normed in Qwen3-VL), turned by the formula, are what is served."""
    model, bare, axes = with_image
    output, seen = hooked(bare, lambda: bare(**IMAGE_INPUTS))
    attention = model.layers[1].self_attn
    with torch.no_grad(), model.trace(**IMAGE_INPUTS):
        queries = attention.attention_queries.clone().save()
        keys = attention.attention_keys.clone().save()
        values = attention.attention_values.clone().save()
        logits = model.logits.save()
    assert_same(logits, output.logits)
    for served, name in ((queries, "q"), (keys, "k"), (values, "v")):
        (projected,) = seen.get(f"{name}_norm", seen[f"{name}_proj"])
        projected = projected.view(1, 11, -1, 2 * len(axes)).transpose(1, 2)
        assert_close(served, projected if name == "v" else rotated(projected, axes))
        if name != "v":
            assert_differs(served, rotated(projected, [0] * len(axes)))


def test_generation_from_an_image(with_image):
    """Every step's stream is the bare model's, and an edit from the second step on is the bare model's edit."""
    model, bare, _ = with_image
    output, seen = hooked(
        bare, lambda: bare.generate(**IMAGE_INPUTS, **greedy(3), return_dict_in_generate=True, output_logits=True)
    )
    block = model.layers[1]
    with model.generate(**IMAGE_INPUTS, **greedy(3)) as tracer:
        read, logits = [].save(), [].save()
        for _ in tracer.iter[0:3]:
            read.append(block.layer_output.clone())
            logits.append(model.logits[:, -1].clone())
        tokens = tracer.result.save()
    assert_same(tokens, output.sequences)
    for got, bare_stream in zip(read, seen["stream"], strict=True):
        assert_close(got, bare_stream, ULPS_AFTER_MODEL)

    def halve(module, args, output):
        return output * (0.5 if output.shape[1] == 1 else 1.0)

    handle = bare.model.language_model.layers[1].register_forward_hook(halve)
    with torch.no_grad():
        halved = bare.generate(**IMAGE_INPUTS, **greedy(3), return_dict_in_generate=True, output_logits=True)
    handle.remove()
    with model.generate(**IMAGE_INPUTS, **greedy(3)) as tracer:
        edited = [].save()
        for step in tracer.iter[0:3]:
            if step:
                block.layer_output = block.layer_output * 0.5
            edited.append(model.logits[:, -1].clone())
    for got, bare_logits in zip(edited, halved.logits, strict=True):
        assert_close(got, bare_logits, ULPS_AFTER_MODEL)
    assert_same(edited[0], logits[0])
    assert_differs(edited[1], logits[1])


def test_text_behind_an_image_is_as_it_was(with_image):
    """What a run with an image leaves in the wrapper (how far its positions lag) does not move a text's."""
    model, bare, _ = with_image
    text = torch.tensor([[40, 41, 42, 43, 44]])
    with torch.no_grad():
        expected = bare(input_ids=text).logits
    for run, options in ((model.trace, {}), (model.generate, greedy(2))):
        with torch.no_grad(), run(**IMAGE_INPUTS, **options):
            model.layers[0].layer_output.save()
        with torch.no_grad(), model.trace(text):
            logits = model.logits.save()
        assert_same(logits, expected)
