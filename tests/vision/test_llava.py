"""LLaVA with CLIP's tower and with SigLIP's."""

import torch

from nnterp import Unavailable
from nnterp.testing import CLIP_BLOCK, VisionSuite, mistake
from nnterp.testing.comparing import assert_same
from nnterp.testing.edits import moved

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


class TestClip(VisionSuite):
    """LLaVA 1.5: the block before the last, without the class token."""

    FAMILY = "llama"
    CONFIG = {
        "model_type": "llava",
        "image_token_index": 2,
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
        "text_config": {"model_type": "llama", **TEXT},
    }
    NATIVE = {
        "vision": "model.vision_tower",
        "projector": "model.multi_modal_projector",
        "patch_embed": "model.vision_tower.embeddings.patch_embedding",
        "layers": "model.vision_tower.encoder.layers",
        "text": "model.language_model",
    }
    BLOCK = CLIP_BLOCK
    READ = -2

    def processor(self, tokenizer):
        from transformers import LlavaProcessor
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        return LlavaProcessor(
            images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )

    def test_a_name_of_the_callers_own_in_place_of_the_standard_one(self):
        model = self.loaded.load(rename={"model.vision_tower": "eyes"})
        assert model.eyes._module is model._module.model.vision_tower
        with mistake(AttributeError, "rename=", "eyes", r"\['vision', \.\.\.\]"):
            model.vision  # here # noqa: B018


class TestSiglip(TestClip):
    """LLaVA-Interleave: the last block before the tower's norm, every patch a feature."""

    FAMILY = "qwen2"
    CONFIG = {
        "model_type": "llava",
        "image_token_index": 2,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
        "text_config": {"model_type": "qwen2", **TEXT},
    }
    READ = -1

    def processor(self, tokenizer):
        from transformers import LlavaProcessor
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
        return LlavaProcessor(
            images, tokenizer, patch_size=4, vision_feature_select_strategy="full", num_additional_image_tokens=0
        )

    def test_the_norm_is_behind_what_the_projector_reads(self):
        """``tower_output`` is normed, and an edit of it does not come to the text."""
        got = self.traced_edit("tower_output", moved, in_place=False)
        assert_same(got["image_features"], self.everything()["image_features"])

    def test_no_values_in_the_head_that_pools(self):
        model = self.model
        assert self.bare.get_submodule("model.vision_tower.head.mlp") is not None
        with mistake(Unavailable, "head"), torch.no_grad(), model.trace(self.prompt(), images=self.images()):
            model.vision.head.mlp.mlp_output.save()  # here
