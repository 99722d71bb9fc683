"""LLaVA with each of its towers."""

from nnterp.testing import CLIP_BLOCK, VisionSuite

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
