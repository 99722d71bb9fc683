"""Idefics 3: crops of an image and the whole of it."""

from nnterp.testing import CLIP_BLOCK, VisionSuite


class TestIdefics3(VisionSuite):
    """Features put in by a method, sixteen patches of a crop made four."""

    FAMILY = "llama"
    SPECIAL = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    CONFIG = {
        "model_type": "idefics3",
        "image_token_id": 2,
        "scale_factor": 2,
        "vision_config": {
            "model_type": "idefics3_vision",
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
            "max_position_embeddings": 512,
        },
    }
    NATIVE = {
        "vision": "model.vision_model",
        "projector": "model.connector",
        "patch_embed": "model.vision_model.embeddings.patch_embedding",
        "layers": "model.vision_model.encoder.layers",
        "text": "model.text_model",
    }
    BLOCK = CLIP_BLOCK

    def processor(self, tokenizer):
        from transformers import Idefics3Processor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        return Idefics3Processor(images, tokenizer, image_seq_len=4)
