"""LLaVA-NeXT: images cut into tiles, the whole image first."""

import torch

from nnterp.testing import CLIP_BLOCK, VisionSuite

PINPOINTS = [[16, 16], [16, 32], [32, 16]]


class TestLlavaNext(VisionSuite):
    """A row of the tower is a tile."""

    FAMILY = "llama"
    CONFIG = {
        "model_type": "llava_next",
        "image_token_index": 2,
        "image_grid_pinpoints": PINPOINTS,
        "vision_config": {
            "model_type": "clip_vision_model",
            "projection_dim": 32,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 256,
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
    READ = -2
    #: Three tiles of the first, and of the second two.
    IMAGE_SIZES = ((60, 40), (16, 16))

    def pixels(self, count):
        return [tile for image in self.inputs(count)["pixel_values"] for tile in image if tile.any()]

    def processor(self, tokenizer):
        from transformers import LlavaNextProcessor
        from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

        images = LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=PINPOINTS
        )
        return LlavaNextProcessor(
            images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )

    def test_features_are_more_than_the_projector_returns(self):
        """A vector of its own ends each row of the tiles put together, and padding is left out."""
        model = self.model
        with torch.no_grad(), model.trace(self.prompt(), images=self.images()):
            projected = model.projector.output.save()
            features = model.vision.image_features.save()
        base = projected[0]
        assert torch.equal(features[: len(base)], base)
        newline = self.bare.get_submodule("model").image_newline
        ends = (features == newline).all(dim=-1)
        assert 0 < ends.sum() < len(features)
        assert len(features) != projected.flatten(0, 1).shape[0]
