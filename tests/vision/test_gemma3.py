"""Gemma 3: SigLIP's patches pooled, and tokens of an image that see each other both ways."""

import torch

from nnterp.testing import CLIP_BLOCK, VisionSuite


class TestGemma3(VisionSuite):
    """Four features for sixteen patches."""

    FAMILY = "gemma3_text"
    SPECIAL = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    IMAGE = "<start_of_image>"
    CONFIG = {
        "model_type": "gemma3",
        "image_token_index": 2,
        "boi_token_index": 3,
        "eoi_token_index": 4,
        "mm_tokens_per_image": 4,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "max_position_embeddings": 128,
        },
    }
    NATIVE = {
        "vision": "model.vision_tower",
        "projector": "model.multi_modal_projector",
        "patch_embed": "model.vision_tower.embeddings.patch_embedding",
        "layers": "model.vision_tower.encoder.layers",
        "text": "model.language_model",
    }
    BLOCK = CLIP_BLOCK

    def processor(self, tokenizer):
        from transformers import Gemma3Processor
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        names = dict(zip(("image_token", "boi_token", "eoi_token"), self.SPECIAL, strict=True))
        tokenizer._set_model_specific_special_tokens(special_tokens=names)
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return Gemma3Processor(images, tokenizer, image_seq_length=4)

    def test_features_are_the_projectors(self):
        model = self.model
        with torch.no_grad(), model.trace(self.prompt(2), images=self.images(2)):
            projected = model.projector.output.save()
            features = model.vision.image_features.save()
        assert projected.shape[:2] == (2, 4)
        assert torch.equal(features, projected.flatten(0, 1))
