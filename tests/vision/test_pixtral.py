"""Pixtral's tower, in Mistral 3 and in LLaVA: images of their own sizes, packed into one row."""

import re

import torch
from transformers import BatchFeature, ProcessorMixin

from nnterp import Unavailable
from nnterp.testing import VisionSuite, mistake
from nnterp.testing.oracles import Site


class PillowPixtral(ProcessorMixin):
    """What transformers' ``PixtralProcessor`` does, which cannot be imported without torchvision: its own image
    processor of Pillow's, and in the prompt a line of image tokens for each row of patches, with a break behind it.
    """

    def __init__(self, image_processor, tokenizer, merged):
        super().__init__(image_processor, tokenizer)
        self.side, self.image_token = 4 * merged, "[IMG]"

    def __call__(self, text=None, images=None, return_tensors=None, **options):
        texts, encoding = [text] if isinstance(text, str) else list(text), {}
        if images is not None:
            flat = [image for each in images for image in (each if isinstance(each, list) else [each])]
            encoding = dict(
                self.image_processor(flat, patch_size={"height": self.side, "width": self.side}, return_tensors="pt")
            )
            lines = iter([self.lines(*size) for size in encoding["image_sizes"].tolist()])
            texts = [re.sub(re.escape("[IMG]"), lambda found: next(lines), each) for each in texts]
        return BatchFeature({**self.tokenizer(texts, return_tensors="pt", **options), **encoding})

    def lines(self, height, width):
        row = "[IMG]" * (width // self.side)
        return "[IMG_BREAK]".join([row] * (height // self.side)) + "[IMG_END]"


class Packed(VisionSuite):
    """What holds of a tower that packs its images: Pixtral's, in Mistral 3 and in LLaVA."""

    BLOCK = {
        "input_layernorm": "attention_norm",
        "self_attn": "attention",
        "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward",
    }
    PATCH_SITE = Site("", "input")
    IMAGE = "[IMG]"
    SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")

    def pixels(self, count):
        inputs = self.inputs(count)
        sizes = inputs["image_sizes"].tolist()
        return [image[:, :height, :width] for image, (height, width) in zip(inputs["pixel_values"], sizes, strict=True)]

    def embedded(self, embed, image):
        conv = self.bare.get_submodule(f"{self.NATIVE['vision']}.patch_conv")
        return conv(image.unsqueeze(0))[0].permute(1, 2, 0).detach()

    def test_images_of_other_shapes(self):
        """The two images are not laid out alike, so a map that mixed them up would show."""
        grid = self.everything(2)["grid"]
        assert len(set(grid)) == 2 and all(rows != columns for rows, columns in grid)

    def test_no_pattern_from_one_image_to_another(self):
        read, grid = self.everything(2), self.everything(2)["grid"]
        first = grid[0][0] * grid[0][1]
        pattern = read["self_attn.attention_probabilities", 0]
        assert not pattern[..., :first, first:].any() and not pattern[..., first:, :first].any()

    def test_any_resolution(self):
        with mistake(Unavailable, "image_size", "any resolution"):
            self.model.vision.image_size  # here # noqa: B018

    def test_a_map_outside_the_trace_needs_the_grid(self):
        norms = self.everything(2)["layer_output", 0].norm(dim=-1)
        with mistake(ValueError, "grid", r"patch_map\(values, grid\)"):
            self.model.vision.patch_map(norms)  # here
        maps = self.model.vision.patch_map(norms, self.everything(2)["grid"])
        assert torch.equal(torch.cat([each.flatten() for each in maps]), norms[0])

    PROCESSOR_LOADS = False

    def processor(self, tokenizer):
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        images = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": 4, "width": 4})
        return PillowPixtral(images, tokenizer, self.MERGED)

    #: How many patches the projector merges along a side.
    MERGED = 1


class TestMistral3(Packed):
    """Two by two patches for a feature."""

    FAMILY = "mistral"
    MERGED = 2
    CONFIG = {
        "model_type": "mistral3",
        "image_token_index": 2,
        "spatial_merge_size": 2,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 4,
            "head_dim": 8,
        },
        "text_config": {
            "model_type": "mistral",
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "sliding_window": 12,
        },
    }
    NATIVE = {
        "vision": "model.vision_tower",
        "projector": "model.multi_modal_projector",
        "patch_embed": "model.vision_tower.ln_pre",
        "layers": "model.vision_tower.transformer.layers",
        "text": "model.language_model",
    }


class TestLlava(Packed):
    """Pixtral 12B as LLaVA has it: the last block's stream, a patch a feature."""

    FAMILY = "mistral"
    CONFIG = {
        **TestMistral3.CONFIG,
        "model_type": "llava",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    NATIVE = TestMistral3.NATIVE
